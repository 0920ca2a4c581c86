"""Engines that are set aside for an evaluation, with updates, deaths and ends of it in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rlsys.data.trajectory import Trajectory
from rlsys.orchestrator.engine_pool import EnginePool, NoneSetAside, Reserved
from tests.orchestrator.groups.engines import Engines, ask, at, make, settle, taking
from tests.support.trajectories import question
from tests.support.virtual_time import now, run_virtually


async def update(group: EnginePool, version: int) -> None:
    """A whole update, as `WeightSync` does it."""
    await group.begin_update(version)
    await group.load_bucket(version)
    await group.finish_update(version, f"digest {version}")


async def evaluate(reserved: Reserved, numbers: Sequence[int]) -> list[Trajectory]:
    return await asyncio.gather(*(reserved.answer(question(100 + number)) for number in numbers))


async def hold(group: EnginePool, until: float, engines: int = 1) -> Reserved:
    """An evaluation that asks nothing and ends then."""
    async with group.reserve(engines) as reserved:
        await asyncio.sleep(until - now())
    return reserved


def updates_of(engines: Engines, index: int) -> list[tuple[str, Any]]:
    return [
        (method, args[0]) for method, args in engines.ranks[index].log if method in ("begin_update", "finish_update")
    ]


def test_an_evaluation_has_its_engines_for_itself_while_the_others_roll() -> None:
    async def story() -> None:
        engines = Engines(3, taking(run_group=10, answer=4))
        group, tracer = make(engines)
        await update(group, 1)
        rolling = asyncio.ensure_future(group.run_group(question(30), 30))  # on engine 0, until 10
        await settle()
        async with group.reserve(1) as reserved:
            assert (reserved.capacity, reserved.version, group.capacity) == (8, 1, 4)
            both = asyncio.gather(ask(group, 5), evaluate(reserved, range(9)))
            found, answers = await both
        assert group.capacity == 6
        assert [engines.starts[f"q:{number}"][0][0] for number in range(3)] == [2, 0, 2]
        assert found[3:] == [("whole", 20.0)] * 2, "the room of engine 1 is not for rollouts"
        assert {engine for number in range(9) for engine, _ in engines.answered_by[f"q:{100 + number}"]} == {1}
        assert [engines.starts[f"q:{100 + number}"][0][1] for number in range(9)] == [0.0] * 8 + [4.0]
        assert [answer.question_uid for answer in answers] == [f"q:{100 + number}" for number in range(9)]
        await rolling
        names = {span.name for span in tracer.drain() if span.lane == "engine 1"}
        assert names == {"eval.episode"}

    run_virtually(story())


def test_a_switch_passes_over_the_engine_and_is_made_up_for_at_the_end() -> None:
    async def story() -> None:
        engines = Engines(2, taking(run_group=10, answer=30, finish_update=3))
        group, _ = make(engines)
        await update(group, 1)
        started = now()
        async with group.reserve(1) as reserved:
            asking = asyncio.ensure_future(evaluate(reserved, [0]))
            await asyncio.sleep(1)
            await update(group, 2)
            engines.published = 2
            assert now() == started + 4, "the evaluation is not waited for"
            (answer,) = await asking
            late = await reserved.answer(question(200))
        assert {int(one.versions[1]) for one in (answer, late)} == {1} == {reserved.version}
        assert now() == started + 60 + 3
        await ask(group, 4)
        assert {engines.starts[f"q:{number}"][0][0] for number in range(4)} == {0, 1}
        assert engines.breaches == []
        assert updates_of(engines, 0) == updates_of(engines, 1)

    run_virtually(story())


def test_an_engine_whose_staged_version_is_superseded_waits_for_the_next() -> None:
    async def story() -> None:
        engines = Engines(2, taking(run_group=10))
        group, _ = make(engines)
        holding = asyncio.ensure_future(hold(group, until=20))
        await asyncio.sleep(10)
        await update(group, 1)
        engines.published = 1
        await group.begin_update(2)
        await group.load_bucket(2)
        await holding
        assert now() == 20, "nothing to wait for"
        await ask(group, 3)
        assert {engines.starts[f"q:{number}"][0][0] for number in range(3)} == {1}
        # An evaluation that now begins has the engine that is not behind.
        again = await hold(group, until=now() + 1)
        assert again.version == 1
        await group.finish_update(2, "digest 2")
        engines.published = 2
        await ask(group, 2)
        assert engines.starts["q:0"][-1][0] == 0
        assert engines.breaches == []
        assert updates_of(engines, 0) == [
            ("begin_update", 1), ("begin_update", 2), ("finish_update", 2),
        ]  # fmt: skip

    run_virtually(story())


def test_deaths_among_those_set_aside_and_the_others() -> None:
    async def story() -> None:
        engines = Engines(4, taking(run_group=10, answer=10))
        group, _ = make(engines)
        async with group.reserve(2) as reserved:
            asking = [asyncio.ensure_future(reserved.answer(question(50 + n))) for n in range(2)]
            await at(1, engines.die, 0)
            await asyncio.wait(asking)
            assert [engines.starts[f"q:{50 + n}"] for n in range(2)] == [[(0, 0.0), (1, 1.0)], [(1, 0.0)]]
            asking = [asyncio.ensure_future(reserved.answer(question(60 + n))) for n in range(10)]
            await asyncio.sleep(1)
            engines.die(1)
            for one in asking:
                with pytest.raises(NoneSetAside, match="rank 1"):
                    await one
            with pytest.raises(NoneSetAside):
                await reserved.answer(question(70))
            assert await ask(group, 2) == [("whole", now())] * 2
        assert group.living == (2, 3)

    run_virtually(story())


@pytest.mark.parametrize("end", ["failure", "cancellation", "cancellation in the end"])
def test_engines_come_back_with_the_newest_version_however_it_ends(end: str) -> None:
    async def story() -> None:
        engines = Engines(2, taking(run_group=10, finish_update=3))
        group, _ = make(engines)

        async def evaluation() -> None:
            async with group.reserve(1):
                await update(group, 1)
                engines.published = 1
                if end == "failure":
                    raise ZeroDivisionError
                if end == "cancellation":
                    await asyncio.sleep(1000)

        evaluating = asyncio.ensure_future(evaluation())
        if end != "failure":
            await asyncio.sleep(4)
            evaluating.cancel()
        with pytest.raises(ZeroDivisionError if end == "failure" else asyncio.CancelledError):
            await evaluating
        rolling = asyncio.ensure_future(ask(group, 3))
        await update(group, 2)
        engines.published = 2
        await rolling
        await ask(group, 2)
        assert {engines.starts[f"q:{number}"][-1][0] for number in range(2)} == {0, 1}
        assert ("finish_update", 1) in updates_of(engines, 0)
        assert engines.breaches == []

    run_virtually(story())
