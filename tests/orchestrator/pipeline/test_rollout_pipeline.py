"""The pipeline over seeded interleavings, bugs planted on purpose that the checks must see, and runs timed by hand."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlsys.data.question import PromptSource, Question
from rlsys.data.trajectory import Group, Sample, Scores, Trajectory
from rlsys.errors import root_cause
from rlsys.orchestrator.engine_pool import NoEngineLeft
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.scheduler import DropReason, StalenessScheduler
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn
from tests.orchestrator.pipeline.planted import PLANTED
from tests.orchestrator.pipeline.script import Script
from tests.orchestrator.pipeline.simulation import Parts, Simulation, breach_of, simulate
from tests.orchestrator.pipeline.watched import Property
from tests.support.trajectories import question, rewarded, trajectory
from tests.support.virtual_time import now, run_virtually

SEEDS = 1000
"""Seeds of a block, of which the first is always run."""


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))])
def test_every_property_holds_under_any_interleaving(block: int) -> None:
    """On a failure, `simulate(seed)` is the run again. `python -m bench.interleavings` takes more seeds."""
    for seed in range(SEEDS * block, SEEDS * (block + 1)):
        try:
            simulate(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(("broken", "planted"), PLANTED)
def test_a_bug_planted_on_purpose_is_found_out(broken: Property, planted: Callable[[], Parts]) -> None:
    """The property is seen to be broken within 1,000 seeds."""
    parts = planted()
    assert broken in (breach_of(simulate, seed, parts) for seed in range(1000))


@dataclass
class Timed(Script):
    """Durations worked out beforehand: of the first, second, ... call; the last is that of all later ones.

    Scoring and training take theirs for each sample. Episodes have one turn.
    """

    turns: int = 1
    mixed: bool = True
    times: Mapping[str, list[float]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def duration_s(self, stage: str, count: int = 1) -> float:
        durations = self.times.get(stage, [0.0])
        self.calls[stage] += 1
        return count * durations[min(self.calls[stage], len(durations)) - 1]


def timed(**settings: Any) -> tuple[Simulation, float]:
    """A run, and when it ends."""
    simulation = Simulation(Timed(random.Random(0), **settings), Parts())

    async def until_the_end() -> float:
        await simulation.drive()
        return now()

    end = run_virtually(until_the_end(), on_idle=simulation.check_idle)
    simulation.check_end()
    return simulation, end


TIMES: dict[str, list[float]] = {"roll": [10], "score": [1], "train": [2]}


@pytest.mark.parametrize("reward_s", [0, 25])
@pytest.mark.parametrize("sequential", [False, True])
def test_stages_wait_for_the_whole_step_only_in_sequence(sequential: bool, reward_s: float) -> None:
    """Four groups are rolled in 10 s each, one at a time, while others are rewarded.

    Each is scored in 1 s and trained in 2 s: beside the others, or in sequence once the last is rewarded.
    """
    settings = {"sequential": sequential, "least": float("inf") if sequential else 1}
    _, end = timed(steps=1, sizes=(4,), slots=1, most=4, times={**TIMES, "reward": [reward_s]}, **settings)
    assert end == pytest.approx(40 + reward_s + (4 + 8 if sequential else 1 + 2))


def test_the_critic_learns_beside_the_actor_and_alone_while_it_warms_up() -> None:
    """Steps of one group, 10 s to roll, 1 s to score; then learning: 2 s, in the second step 2 s and 7 s at once."""
    times = {**TIMES, "train": [2, 2, 7]}
    _, end = timed(steps=2, sizes=(1,), critic=True, warmup=1, times=times)
    assert end == pytest.approx((10 + 1 + 2) + (10 + 1 + 7))


class Instant:
    """Workers and devices in one, which answer without ever giving way, as none does in a simulation."""

    capacity, waits_for, groups = 2, "", ("inference",)
    version = 0

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
        return RolloutPipeline(scheduler, prompts, self, self, handlers, ScoreBatchSize(1, 1), self)


def test_an_episode_that_is_aborted_before_its_first_turn_frees_its_slot() -> None:
    """The first of two is done before the second, which is to spare, has begun; ten times, with two slots."""
    workers = Instant()
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


def test_the_death_of_the_last_engine_ends_the_run_also_while_nothing_is_rolled() -> None:
    class Dead(Instant):
        capacity = 0

        async def run_group(self, asked: Question, *_: Any) -> list[Trajectory]:
            raise NoEngineLeft(asked.uid)

    pipeline = Dead().pipeline(StalenessScheduler(groups_per_step=1, max_staleness=0))
    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(pipeline.run())
    assert isinstance(root_cause(caught.value), NoEngineLeft)
