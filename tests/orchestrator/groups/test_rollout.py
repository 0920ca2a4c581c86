"""Tests of the engine pool under a virtual clock: deaths, cancellation, weight switches, evaluations, progress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import now
from rlsys.errors import RunError
from rlsys.orchestrator.engine_pool import (
    ABORT_TIMEOUT_S,
    IN_FLIGHT_TIMEOUT_S,
    EnginePool,
    ReservedEngines,
)
from rlsys.orchestrator.membership import Members, NoEngineLeft, Orphans, Router
from rlsys.rollout.agent.episode import EngineActivity
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.orchestrator.groups.engines import CALL_TIMEOUT_S, NEVER, SAMPLES, Engines, Worker, ask, make, taking
from tests.support.trajectories import question, trajectory
from tests.support.virtual_time import virtually
from tests.support.waiting import let_tasks_run


def test_key_goes_to_the_least_loaded_engine_and_survives_one_death() -> None:
    router = Router(Members.first(3), slots=4)

    def assign(key: str, size: int = 2) -> int | None:
        one = router.assign(key, size)
        return None if one is None else one.engine

    def die(engine: int) -> Orphans:
        return router.update(router.members.remove(router.members.of_engine[engine]))

    assert [assign(key) for key in "abcd"] == [0, 1, 2, 0]
    router.release("c")
    assert assign("e") == 2, "the least loaded, not the next in turn"
    router.update(router.members.suspect(router.members.of_engine[1]))
    assert assign("f", 3) is None, "the other engines have too little room"
    router.update(router.members.trust(router.members.of_engine[1]))
    assert die(0) == Orphans(("a", "d"), {})
    assert [assign(key) for key in "ad"] == [1, 2]
    orphans = die(2)
    assert (orphans.retry, [*orphans.lost]) == (("e",), ["d"])
    router.release("a")
    assert assign("a") == 1
    assert die(1).retry == ("b", "a"), "a key that was released is new"
    with pytest.raises(NoEngineLeft):
        assign("e")


@pytest.mark.parametrize(("takes", "until"), [(3.0, 8.0), (NEVER, 5.0 + ABORT_TIMEOUT_S)])
@virtually
async def test_cancelled_group_is_aborted_on_its_engine_before_its_slot_is_free(takes: float, until: float) -> None:
    engines = Engines(1, taking(run_group=100, abort_group=takes))
    group, _ = make(engines, slots=SAMPLES)
    first = asyncio.ensure_future(group.run_group(question(0), 0))
    following = asyncio.ensure_future(group.run_group(question(1), 1))
    await asyncio.sleep(5)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert now() == until
    await following
    (_, run), aborted, *_ = engines.ranks[0].log
    assert aborted == ("abort_group", (run[2],)), "the key of the cancelled group"
    assert engines.starts["q:1"] == [(0, until)]


@virtually
async def test_engine_takes_groups_again_once_it_has_switched_itself() -> None:
    engines = Engines(2, taking(run_group=10, finish_update=1))
    group, tracer = make(engines)
    first = asyncio.ensure_future(ask(group, 1))  # on engine 0, until second 10
    await asyncio.sleep(5)
    await group.begin_update(7)
    await group.load_bucket("handle")
    switch = asyncio.ensure_future(group.finish_update(7, "digest"))
    later = asyncio.ensure_future(group.run_group(question(9), 9))
    await asyncio.gather(first, later)
    assert engines.starts["q:9"] == [(1, 6)], "engine 1 had no group to finish"
    await switch
    assert now() == 16
    assert engines.breaches == []
    assert [call for call in engines.ranks[0].log if call[0] != "run_group"] == [
        ("begin_update", (7,)),
        ("load_bucket", ("handle",)),
        ("finish_update", (7, "digest")),
    ]
    versions = {str(span.args["question"]): span.args.get("version") for span in tracer.drain()}
    assert versions == {"q:0": None, "q:9": 7}


@virtually
async def test_error_of_one_engine_ends_the_update_at_once() -> None:
    refusal = RunError("The engine refused a weight update.")
    engines = Engines(2, taking(finish_update=1), failures={"finish_update": refusal})
    group, _ = make(engines)
    engines.ranks[1].silent = True
    with pytest.raises(RunError) as caught:
        await group.finish_update(1, "")
    assert caught.value is refusal
    assert now() == 1, "the silent engine is not waited for"
    assert tuple(group.living) == (0, 1)


@virtually
async def test_engine_that_answers_but_does_not_load_a_bucket_is_left_out() -> None:
    engines = Engines(2)

    def load(worker: Worker, call: asyncio.Future[Any], method: str, args: tuple[Any, ...]) -> None:
        if worker.number == 0:
            engines._plain(worker, call, method, args)

    engines._load_bucket = load  # type: ignore[attr-defined]
    group, _ = make(engines)
    await update(group, 1)
    assert CALL_TIMEOUT_S <= now() < CALL_TIMEOUT_S + 10
    assert tuple(group.living) == (0,)
    assert [worker.killed for worker in engines.ranks] == [False, True]
    assert ("finish_update", (1, "digest 1")) in engines.ranks[0].log


@virtually
async def test_rollouts_wait_for_the_tools_that_every_engine_waits_for() -> None:
    engines = Engines(2)
    group, _ = make(engines)
    for first, second, waits_for in (("search", "search", "search"), ("search", "sum", "search and sum"), ("", "", "")):
        engines.ranks[0].activity = EngineActivity(not first, {first: 3} if first else {})
        engines.ranks[1].activity = EngineActivity(False, {second: 1} if second else {})
        await group.activity()
        assert group.waits_for == waits_for


async def update(group: EnginePool, version: int) -> None:
    """Update the pool's engines as `WeightSync` does."""
    await group.begin_update(version)
    await group.load_bucket(version)
    await group.finish_update(version, f"digest {version}")


async def hold(group: EnginePool, until: float, engines: int = 1) -> ReservedEngines:
    """Run an evaluation that asks no questions and ends at the time `until`."""
    async with group.reserve(engines) as reserved:
        await asyncio.sleep(until - now())
    return reserved


def updates_of(engines: Engines, index: int) -> list[tuple[str, Any]]:
    return [
        (method, args[0]) for method, args in engines.ranks[index].log if method in ("begin_update", "finish_update")
    ]


@virtually
async def test_reserved_engine_skips_a_switch_and_makes_it_when_it_is_put_back() -> None:
    engines = Engines(2, taking(run_group=10, answer=30, finish_update=3))
    group, _ = make(engines)
    await update(group, 1)
    started = now()
    async with group.reserve(1) as reserved:
        asking = asyncio.ensure_future(reserved.answer(question(100)))
        await asyncio.sleep(1)
        await update(group, 2)
        engines.published = 2
        assert now() == started + 4, "the evaluation is not waited for"
        answer = await asking
        late = await reserved.answer(question(200))
    assert {int(one.versions[1]) for one in (answer, late)} == {1} == {reserved.version}
    assert now() == started + 60 + 3
    await ask(group, 4)
    assert {engines.starts[f"q:{number}"][0][0] for number in range(4)} == {0, 1}
    assert engines.breaches == []
    assert updates_of(engines, 0) == updates_of(engines, 1)


@virtually
async def test_engine_whose_staged_version_is_superseded_waits_for_the_next() -> None:
    engines = Engines(2, taking(run_group=10))
    group, _ = make(engines)
    holding = asyncio.ensure_future(hold(group, until=20))
    await asyncio.sleep(10)
    await update(group, 1)
    engines.published = 1
    await group.begin_update(2)
    await group.load_bucket(2)
    await holding
    assert now() == 20, "there is no version to switch to"
    await ask(group, 3)
    assert {engines.starts[f"q:{number}"][0][0] for number in range(3)} == {1}
    # The next evaluation gets the engine that already has the new version.
    again = await hold(group, until=now() + 1)
    assert again.version == 1
    await group.finish_update(2, "digest 2")
    engines.published = 2
    await ask(group, 2)
    assert engines.starts["q:0"][-1][0] == 0
    assert engines.breaches == []
    assert updates_of(engines, 0) == [("begin_update", 1), ("begin_update", 2), ("finish_update", 2)]


def ended(number: int, *samples: int) -> tuple[EpisodeProgress, ...]:
    return tuple(trajectory(uid=f"q:{number}", sample=sample) for sample in samples)


def episodes_of(begun: dict[int, tuple[EpisodeProgress, ...]]) -> dict[int, list[tuple[str, int]]]:
    """Return (question, sample) of each episode, by prompt group."""
    return {prompt_group: [(one.question_uid, one.sample) for one in found] for prompt_group, found in begun.items()}


@virtually
async def test_running_groups_report_progress_and_queued_ones_keep_theirs() -> None:
    engines = Engines(1, taking(run_group=10))
    group, _ = make(engines, slots=2 * SAMPLES)
    given = {0: (), 1: ended(1, 2), 2: ended(2, 1, 3), 3: ()}
    asked = [
        asyncio.ensure_future(group.run_group(question(number), 70 + number, begun)) for number, begun in given.items()
    ]
    evaluation = asyncio.ensure_future(group.answer(question(9)))
    await asyncio.sleep(1)
    assert episodes_of(await group.in_flight()) == {
        70: [("q:0", 0)],
        71: [("q:1", 0), ("q:1", 2)],
        72: [("q:2", 1), ("q:2", 3)],  # in the queue
    }
    await asyncio.sleep(10)
    assert episodes_of(await group.in_flight()) == {
        72: [("q:2", 0), ("q:2", 1), ("q:2", 3)],
        73: [("q:3", 0)],
    }
    await asyncio.gather(*asked, evaluation)
    assert await group.in_flight() == {}


@virtually
async def test_progress_on_a_dead_or_silent_engine_is_that_of_the_call() -> None:
    engines = Engines(3, taking(run_group=200))
    group, _ = make(engines)
    asked = [asyncio.ensure_future(group.run_group(question(number), number, ended(number, 3))) for number in range(3)]
    await let_tasks_run()
    engines.die(0)
    engines.ranks[2].silent = True
    found = episodes_of(await group.in_flight())
    # Engine 1 had reported before the group of engine 0 moved to it.
    assert found == {0: [("q:0", 3)], 1: [("q:1", 0), ("q:1", 3)], 2: [("q:2", 3)]}
    assert now() == IN_FLIGHT_TIMEOUT_S
    given = [begun for worker in engines.ranks for key, begun in worker.begun.items() if key.startswith("q:0")]
    assert [[one.sample for one in begun] for begun in given] == [[3], [3]], (
        "the second engine resumes from the same progress"
    )
    for one in asked:
        one.cancel()
    await asyncio.wait(asked)


@virtually
async def test_groups_wait_for_the_agents_that_an_engine_runs_at_a_time() -> None:
    """Otherwise their time on the engine would begin long before their agents do."""
    engines = Engines(1, taking(run_group=10))
    group, _ = make(engines, slots=64, agents=SAMPLES)
    assert group.capacity == 1
    await ask(group, 3)
    assert [engines.starts[f"q:{number}"] for number in range(3)] == [[(0, 0.0)], [(0, 10.0)], [(0, 20.0)]]


@virtually
async def test_engines_that_stop_late_or_have_died_do_not_fail_the_end_of_a_run() -> None:
    engines = Engines(3, lambda method, _: NEVER if method == "stop" else 0.0)
    group, _ = make(engines)
    engines.die(2)
    await group.stop(30.0)
    assert now() == 30.0
    assert all(("stop", ()) in worker.log for worker in engines.ranks)
    failing, _ = make(Engines(1, failures={"stop": RunError("its tools do not end")}))
    await failing.stop(30.0)


@virtually
async def test_capacity_that_returns_is_announced() -> None:
    group, _ = make(Engines(2))
    seen: list[int] = []
    group.engines.subscribe(lambda _: seen.append(group.capacity))
    async with group.reserve(1):
        divided = group.capacity
    assert seen == [divided, 2 * divided]
