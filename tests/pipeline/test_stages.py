"""The pipeline's invariants over seeded interleavings, and proof that the checks would see a breach."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlsys.errors import root_cause
from rlsys.pipeline.group import Group, Sample
from rlsys.pipeline.stages import Floats
from tests.pipeline.step import Record, Script, Watched, WorkerError, Workers, check, run_step
from tests.pipeline.virtual_time import HangError, now, run_virtually

SEEDS, BLOCKS = 1200, 4


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_question_is_generated_scored_and_trained_exactly_once(block: int) -> None:
    for seed in range(block, SEEDS, BLOCKS):
        script = Script.seeded(seed)
        check(script, *run_virtually(run_step(script)))


@pytest.mark.parametrize("worker", ["generate", "score", "train", "apply"])
def test_a_failing_worker_ends_the_step_at_once(worker: str) -> None:
    reported = []
    for seed in range(300):
        call = random.Random(f"{worker} {seed}").randint(1, 4)
        try:
            run_virtually(run_step(replace(Script.seeded(seed), fails=(worker, call))))
        except BaseExceptionGroup as group:
            reported.append(root_cause(group))
    assert len(reported) > 100
    assert {(type(error), str(error)) for error in reported} == {(WorkerError, worker)}


def test_groups_are_trained_while_others_are_generated() -> None:
    """Four groups of 10 s, one at a time; scoring takes 1 s, training 2 s: 43 s, not 52 s."""
    script = Script(4, 2, 1, 2, 2, lambda _: 10.0, lambda _: 1.0, lambda _: 2.0)

    async def timed() -> tuple[Record, float]:
        record, *_ = await run_step(script)
        return record, now()

    record, end = run_virtually(timed())
    assert record.finished_at == pytest.approx([10, 20, 30, 40])
    assert record.trained_at == pytest.approx([13, 23, 33, 43])
    assert end == pytest.approx(43)


def test_a_slow_learner_holds_the_generator_back() -> None:
    """Generation is instant; at most what fits behind the learner is begun before it has trained."""
    script = Script(20, 1, 2, 1, 20, lambda _: 0.0, lambda _: 0.0, lambda _: 100.0)

    async def begun_when(time: float) -> int:
        seen: list[Record] = []

        class Seen(Workers):
            def __init__(self, script: Script, record: Record) -> None:
                super().__init__(script, record)
                seen.append(record)

        running = asyncio.create_task(run_step(script, workers=Seen))
        await asyncio.sleep(time)
        begun = len(seen[0].started)
        await running
        return begun

    # In the learner 1, in its channel 1, held by the scorer 1, in the first channel 1, held by runners 2.
    assert run_virtually(begun_when(50)) == 6
    assert run_virtually(begun_when(150)) == 7


class Losing(Watched):
    """Loses the third item."""

    puts = 0

    async def put(self, item: Group) -> None:
        self.puts += 1
        if self.puts != 3:
            await super().put(item)


class Doubling(Watched):
    """Puts the third item twice."""

    puts = 0

    async def put(self, item: Group) -> None:
        self.puts += 1
        await super().put(item)
        if self.puts == 3:
            await super().put(item)


class Boundless(Watched):
    """Never lets a writer wait."""

    async def put(self, item: Group) -> None:
        room, self.capacity = self.capacity, 10**9
        await super().put(item)
        self.capacity = room


class Lagging(Watched):
    """Gives out nothing before it is full: hardly a stream."""

    async def _take(self, most: int) -> list[Group]:
        while len(self) < self.capacity and not self._closed:
            await asyncio.sleep(0.25)
        return await super()._take(most)


class Silent(Watched):
    """Closes without telling who waits."""

    async def close(self) -> None:
        self._closed = True


class Exchanging(Workers):
    """Returns log-probs in another order than asked."""

    async def compute(self, samples: Sequence[Sample]) -> list[tuple[Floats, Floats | None]]:
        return (await super().compute(samples))[::-1]


class Greedy(Workers):
    """Runs a group more than it has room for."""

    def __init__(self, script: Script, record: Record) -> None:
        super().__init__(script, record)
        self.capacity += 1


@pytest.mark.parametrize("channel", [Losing, Doubling, Boundless, Lagging, Silent])
def test_a_broken_channel_is_found_out(channel: type[Watched]) -> None:
    assert _breaches(channel, Workers) > 5


@pytest.mark.parametrize("workers", [Exchanging, Greedy])
def test_broken_workers_are_found_out(workers: type[Workers]) -> None:
    assert _breaches(Watched, workers) > 5


def _breaches(channel: type[Watched], workers: type[Workers]) -> int:
    """How many of some steps break an invariant or hang."""
    found = 0
    for seed in range(60):
        script = Script.seeded(seed)
        try:
            check(script, *run_virtually(run_step(script, channel, workers)))
        except (AssertionError, HangError):
            found += 1
    return found
