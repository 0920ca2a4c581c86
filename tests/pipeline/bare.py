"""Workers that answer without ever giving way, as none does in a simulation. Tests override what they need."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rlsys.data.group import Group, Sample, Scores
from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.orchestrator.pipeline.flow import Bites, Flow, FlowState, Handlers
from rlsys.orchestrator.pipeline.ledger import Ledger
from rlsys.rollout.agent.begun import Begun
from tests.pipeline.build import question, rewarded, trajectory


class Bare:
    """Rollout group, inference group, learner, rewards and devices in one."""

    capacity = 2
    waits_for = ""
    groups = ("inference",)
    blocked: asyncio.Event | None = None
    """What the devices wait for before a rollout."""
    version = 0

    async def run_group(self, asked: Question, _ticket: int, _begun: Sequence[Begun] = ()) -> list[Trajectory]:
        """One episode."""
        return [trajectory(uid=asked.uid, version=self.version)]

    async def under_way(self) -> Mapping[int, tuple[Begun, ...]]:
        """Groups are done as soon as they are begun."""
        return {}

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        """Nothing known."""
        return [Scores(sample.trajectory.rollout_logprobs) for sample in samples]

    def enough(self, _: Sequence[Sample]) -> bool:
        """Any."""
        return True

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> None:
        """Nothing."""

    async def apply(self) -> Mapping[str, float]:
        """Nothing."""
        return {}

    async def need(self, *groups: str) -> None:
        """There, unless blocked."""
        if self.blocked is not None and "rollout" in groups:
            await self.blocked.wait()

    async def reward(self, asked: Question, trajectories: Sequence[Trajectory]) -> Group:
        """Nought."""
        return Group(asked, tuple(rewarded(one, 0.0) for one in trajectories))

    def flow(self, ledger: Ledger, state: FlowState | None = None) -> tuple[Flow, PromptSource]:
        """Five questions; groups are scored one by one."""
        prompts = PromptSource([question(number) for number in range(5)], seed=0)
        handlers = Handlers(self.reward, lambda group: group)
        flow = Flow(ledger, prompts, self, self, handlers, Bites(1, 1), self, lambda _: lambda _: None, state)
        return flow, prompts
