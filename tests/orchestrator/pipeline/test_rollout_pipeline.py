"""Tests of the rollout pipeline: properties over seeded interleavings, planted bugs, and workers that never yield."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.config.schema import RunConfig, TrainerConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Sample, Scores, Trajectory
from rlsys.errors import root_cause
from rlsys.orchestrator.membership import NoEngineLeft
from rlsys.orchestrator.pipeline.scheduler import DropReason, StalenessScheduler
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn, mini_batches, score_batch_size
from tests.orchestrator.pipeline.planted import PLANTED
from tests.orchestrator.pipeline.script import SEEDS
from tests.orchestrator.pipeline.simulation import Parts, breach_of, simulate
from tests.orchestrator.pipeline.watched import Property
from tests.support.instant_workers import InstantWorkers


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))])
def test_every_property_holds_in_any_interleaving(block: int) -> None:
    """`simulate(seed)` repeats a run that failed. `python -m bench.interleavings` tries more seeds."""
    for seed in range(SEEDS * block, SEEDS * (block + 1)):
        try:
            simulate(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(("broken", "planted"), PLANTED)
def test_planted_bug_is_found(broken: Property, planted: Callable[[], Parts]) -> None:
    parts = planted()
    assert broken in (breach_of(simulate, seed, parts) for seed in range(SEEDS))


def test_group_cancelled_before_its_first_turn_frees_its_slot() -> None:
    """Each of ten steps ends before the task of its second group, which is a spare one, has started."""
    workers = InstantWorkers()
    pipeline = workers.pipeline(StalenessScheduler(groups_per_step=1, max_staleness=0, oversample=2))

    async def ten_steps() -> int:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            for step in range(1, 11):
                await learn(pipeline, {"actor": workers}, workers, MiniBatches([1]))
                workers.version = step
                pipeline.publish(step)
            pipeline.stop()
        return pipeline.scheduler.dropped[DropReason.surplus]

    assert run_virtually(ten_steps()) >= 9


def test_death_of_the_last_engine_ends_the_run_while_nothing_rolls() -> None:
    class DeadWorkers(InstantWorkers):
        capacity = 0

        async def run_group(self, asked: Question, *_: Any) -> list[Trajectory]:
            raise NoEngineLeft(asked.uid)

    pipeline = DeadWorkers().pipeline(StalenessScheduler(groups_per_step=1, max_staleness=0))
    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(pipeline.run())
    assert isinstance(root_cause(caught.value), NoEngineLeft)


@pytest.mark.parametrize(("prompts", "parts", "most"), [(512, 1, 32), (512, 64, 8), (2048, 1, 128)])
def test_actor_is_not_left_a_long_tail_where_scoring_is_the_slowest_stage(prompts: int, parts: int, most: int) -> None:
    """A group rolls out every 0.1 s, is scored in 0.15 s and trained in 0.1 s. If a batch had all groups that wait, the
    batches would grow by half each time, and a third of the step would be trained after the last of them."""

    class TimedWorkers(InstantWorkers):
        capacity = prompts
        begun, scored_at = 0, 0.0

        def __init__(self) -> None:
            self.batch_size, self.sizes = score_batch_size(config), list[int]()

        async def run_group(self, asked: Question, *_: Any) -> list[Trajectory]:
            self.begun += 1
            await asyncio.sleep(0.1 * self.begun)
            return await super().run_group(asked)

        async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
            await asyncio.sleep(0.15 * len(samples))
            self.sizes.append(len(samples))
            self.scored_at = now()
            return await super().compute(samples)

        async def accumulate(self, samples: Sequence[Sample], *_: Any) -> None:
            await asyncio.sleep(0.1 * len(samples))

    config = RunConfig(trainer=TrainerConfig(prompts_per_step=prompts, mini_batches=parts))
    workers = TimedWorkers()
    pipeline = workers.pipeline(StalenessScheduler(prompts, max_staleness=0))

    async def step() -> float:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            await learn(pipeline, {"actor": workers}, workers, mini_batches(config))
            ended = now()
            pipeline.stop()
        return ended

    ended = run_virtually(step())
    assert (sum(workers.sizes), max(workers.sizes)) == (prompts, most)
    assert ended - workers.scored_at <= 0.1 * most + 1e-6, "only the last batch is trained with nothing beside it"
    assert ended < 1.05 * prompts * 0.15, "scoring alone determines the step"


def test_room_that_returns_is_used_at_once() -> None:
    """The first group never ends, so that no other event wakes the pipeline."""

    class SlowWorkers(InstantWorkers):
        capacity = 1
        begun = 0

        async def run_group(self, asked: Question, *_: Any) -> list[Trajectory]:  # noqa: ARG002
            self.begun += 1
            return await asyncio.Event().wait()  # type: ignore[return-value]

    workers = SlowWorkers()
    pipeline = workers.pipeline(StalenessScheduler(groups_per_step=2, max_staleness=0))

    async def grow() -> tuple[int, int]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            await asyncio.sleep(1)
            before, workers.capacity = workers.begun, 2
            pipeline.wake()
            await asyncio.sleep(1)
            pipeline.stop()
        return before, workers.begun

    assert run_virtually(grow()) == (1, 2)
