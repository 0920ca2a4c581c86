"""Runs of the real scheduler, pipeline and learner's loop with a schedule that the config names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import run_virtually
from rlsys.config.schema import RunConfig
from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Sample, Trajectory
from rlsys.errors import UserError, root_cause
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, RolloutPipeline
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn, make_scheduler, score_batch_size
from tests.support.composed import composed
from tests.support.instant_workers import InstantWorkers
from tests.support.trajectories import question, trajectory

KEY = "trainer.schedule.kind"
STEPS, PROMPTS = 4, 2


def config_of(kind: str, *overrides: str) -> RunConfig:
    """Return the config of a run of `STEPS` steps of `PROMPTS` prompt groups."""
    sizes = (f"trainer.steps={STEPS}", f"trainer.prompts_per_step={PROMPTS}", "trainer.mini_batches=1")
    return composed(f"trainer.schedule={kind}", *sizes, *overrides)


class Workers(InstantWorkers):
    """Workers whose rollouts take a second, and whose training calls take ten."""

    capacity = 8

    def __init__(self) -> None:
        self.running = self.most_running = 0
        self.trained: list[list[int]] = []
        """Prompt groups of each step, in the order of training."""

    async def run_group(self, asked: Question, number: int, *_: Any) -> list[Trajectory]:
        version = self.version
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await asyncio.sleep(1)
        self.running -= 1
        return [trajectory(uid=asked.uid, version=version, sample=number)]

    async def in_flight(self) -> Mapping[int, Any]:
        return {}

    async def accumulate(self, samples: Sequence[Sample], last: bool) -> None:  # noqa: ARG002
        self.trained[-1] += [sample.trajectory.sample for sample in samples]
        await asyncio.sleep(10)


def run(config: RunConfig) -> tuple[Workers, RolloutPipeline]:
    """Train the steps of `config`, and check that every prompt handed out is trained or back in the source."""
    workers, handed_out = Workers(), [question(number) for number in range(20)]
    prompts, handlers = PromptSource(handed_out, seed=0), Handlers(workers.reward, lambda group: group)
    pipeline = RolloutPipeline(
        make_scheduler(config), prompts, workers, workers, handlers, score_batch_size(config), workers
    )

    async def steps() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            for step in range(1, STEPS + 1):
                workers.trained.append([])
                await learn(pipeline, {"actor": workers}, workers, MiniBatches([PROMPTS]))
                workers.version = step
                pipeline.publish(step)
            pipeline.stop()

    try:
        run_virtually(steps())
    finally:
        state, closed = prompts.state(), pipeline.scheduler.version
        assert pipeline.scheduler.outstanding == []
        assert len(state.given_back) + closed * PROMPTS == state.position
    return workers, pipeline


def assert_named(kind: str, *overrides: str) -> None:
    """Assert that a run ends with a sentence that names its schedule; `run` checks that no prompt is lost."""
    with pytest.raises(ExceptionGroup) as caught:
        run(config_of(kind, *overrides))
    error = root_cause(caught.value)
    assert isinstance(error, UserError)
    assert (error.code, error.key) == ("user_code", KEY)
    assert kind in str(error)
    assert "\n" not in str(error)
