"""Workers and devices of a pipeline that answer at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Group, Sample, Scores, Trajectory
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler
from tests.support.trajectories import question, rewarded, trajectory


class InstantWorkers:
    """Workers and devices that answer without ever yielding to the event loop, unlike the workers of a simulation."""

    capacity, waits_for, groups = 2, "", ("inference",)
    version = 0
    batch_size = ScoreBatchSize(1, 1)

    async def run_group(self, asked: Question, *_: Any) -> list[Trajectory]:
        return [trajectory(uid=asked.uid, version=self.version)]

    async def reward(self, asked: Question, trajectories: Sequence[Trajectory]) -> Group:
        return Group(asked, tuple(rewarded(one, 0.0) for one in trajectories))

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        return [Scores(sample.trajectory.rollout_logprobs) for sample in samples]

    def fills_micro_batches(self, _: Sequence[Sample]) -> bool:
        return True

    async def accumulate(self, *_: Any) -> None: ...

    async def apply(self) -> Mapping[str, float]:
        return {}

    async def onload(self, *groups: str) -> None: ...

    def pipeline(self, scheduler: StalenessScheduler) -> RolloutPipeline:
        prompts, handlers = PromptSource([question(1), question(2)], seed=0), Handlers(self.reward, lambda group: group)
        return RolloutPipeline(scheduler, prompts, self, self, handlers, self.batch_size, self)
