"""Workers that answer without ever giving way, as none does in a simulation. Tests override what they need."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rlsys.data.question import PromptSource, Question
from rlsys.data.trajectory import Group, Sample, Scores, Trajectory
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, PipelineState, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.support.trajectories import question, rewarded, trajectory


class Bare:
    """Rollout group, inference group, learner, rewards and devices in one."""

    capacity = 2
    waits_for = ""
    groups = ("inference",)
    blocked: asyncio.Event | None = None
    """The event that the devices wait for before a rollout."""
    version = 0

    async def run_group(
        self, asked: Question, _ticket: int, _begun: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        """One episode."""
        return [trajectory(uid=asked.uid, version=self.version)]

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
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

    def pipeline(
        self, scheduler: StalenessScheduler, state: PipelineState | None = None
    ) -> tuple[RolloutPipeline, PromptSource]:
        """Five questions; groups are scored one by one."""
        prompts = PromptSource([question(number) for number in range(5)], seed=0)
        handlers = Handlers(self.reward, lambda group: group)
        pipeline = RolloutPipeline(scheduler, prompts, self, self, handlers, ScoreBatchSize(1, 1), self, state)
        return pipeline, prompts
