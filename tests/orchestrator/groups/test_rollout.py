"""Engines that die, hang and switch weights under a virtual clock: every group comes back, or says why not."""

from __future__ import annotations

import asyncio

import pytest

from rlsys.errors import RunError
from rlsys.orchestrator.engine_pool import ABORT_TIMEOUT_S, PING_TIMEOUT_S, NoEngineLeft
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost
from rlsys.rollout.agent.episode import EngineActivity
from tests.orchestrator.groups.engines import LIMIT_S, NEVER, SAMPLES, Engines, ask, at, make, taking
from tests.support.trajectories import question
from tests.support.virtual_time import now, run_virtually


def methods(engines: Engines, index: int) -> list[str]:
    return [method for method, _ in engines.ranks[index].log]


def test_questions_go_to_the_engine_with_the_fewest_and_wait_while_all_are_full() -> None:
    async def story() -> None:
        engines = Engines(2, taking(run_group=10))
        group, _ = make(engines)
        assert group.capacity == 4
        assert await ask(group, 5) == [("whole", 10.0)] * 4 + [("whole", 20.0)]
        assert [engines.starts[f"q:{number}"] for number in range(5)] == [
            [(0, 0)], [(1, 0)], [(0, 0)], [(1, 0)], [(0, 10)],
        ]  # fmt: skip
        found = await group.answer(question(7), 3, 0.7)
        assert (found.question_uid, found.sample) == ("q:7", 3)
        method, args = engines.ranks[0].log[-1]
        assert (method, args[1:3]) == ("answer", (3, 0.7))

    run_virtually(story())


def test_a_dead_engines_groups_run_again_on_the_other() -> None:
    async def story() -> None:
        engines = Engines(2, taking(run_group=10))
        group, tracer = make(engines)
        group.step = 3
        results, _ = await asyncio.gather(ask(group, 3), at(4, engines.die, 0))
        # Engine 1 has room for one of the two at once, the other follows when its own is done.
        assert results == [("whole", 14.0), ("whole", 10.0), ("whole", 20.0)]
        assert engines.starts["q:0"] == [(0, 0), (1, 4)]
        assert engines.starts["q:2"] == [(0, 0), (1, 10)]
        assert (group.living, group.capacity) == ((1,), 2)
        assert engines.ranks[0].killed, "nothing of it may be left half alive"
        figures = await group.metrics()
        assert figures["rollout/requeued_groups"] == 2
        assert (figures["rollout/engines"], figures["rollout/lost_groups"]) == (1, 0)
        assert "engine/0/version" not in figures
        spans = [span for span in tracer.drain() if span.args["question"] == "q:2"]
        assert [(span.lane, span.start_ns / 1e9, span.end_ns / 1e9) for span in spans] == [
            ("engine 0", 0, 4), ("engine 1", 10, 20),
        ]  # fmt: skip
        assert spans[0].args == {"step": 3, "question": "q:2", "error": "RankDied"}
        assert spans[1].args == {"step": 3, "question": "q:2", "attempt": 2}

    run_virtually(story())


def test_the_second_death_ends_a_group_and_the_last_one_the_run() -> None:
    async def story() -> None:
        engines = Engines(3, taking(run_group=10))
        group, _ = make(engines)
        lost = asyncio.ensure_future(group.run_group(question(0), 0))
        await at(1, engines.die, 0)
        await at(2, engines.die, 1)
        with pytest.raises(GroupLost, match=r"q:0 .*engines 0 and 1"):
            await lost
        assert (await group.metrics())["rollout/lost_groups"] == 1
        last = asyncio.ensure_future(group.run_group(question(1), 1))
        waiting = [asyncio.ensure_future(group.run_group(question(2 + number), 2 + number)) for number in range(3)]
        await at(3, engines.die, 2)
        for one in [last, *waiting]:
            with pytest.raises(NoEngineLeft, match=r"(?s)rank 2.*engine 2"):
                await one
        with pytest.raises(NoEngineLeft):
            await group.metrics()

    run_virtually(story())


def test_a_group_that_never_returns_is_lost_alone() -> None:
    async def story() -> None:
        engines = Engines(1, lambda method, args: NEVER if method == "run_group" and args[0].uid == "q:0" else 10)
        group, _ = make(engines)
        results = await ask(group, 2)
        # The ping is answered at once, the abort after 10 s.
        assert results == [("timeout", LIMIT_S + 10), ("whole", 10.0)]
        assert methods(engines, 0)[-2:] == ["metrics", "abort_group"]
        assert group.living == (0,)
        figures = await group.metrics()
        assert (figures["rollout/timed_out_groups"], figures["rollout/lost_groups"]) == (1, 1)

    run_virtually(story())


def test_an_engine_that_answers_nothing_is_dead() -> None:
    async def story() -> None:
        engines = Engines(2, taking(run_group=10))
        group, _ = make(engines)
        engines.ranks[0].silent = True
        assert await ask(group, 2) == [("whole", LIMIT_S + PING_TIMEOUT_S + 10), ("whole", 10.0)]
        assert group.living == (1,)
        assert engines.ranks[0].killed

    run_virtually(story())


def test_an_engine_that_is_given_up_keeps_nobody_waiting() -> None:
    """Its machine is unreachable: not even its end can be heard of."""

    async def story() -> None:
        engines = Engines(2, taking(run_group=10))
        group, _ = make(engines)
        engines.ranks[0].silent = engines.ranks[0].unreachable = True
        update = asyncio.ensure_future(group.begin_update(1))
        await ask(group, 1)
        await update
        assert now() == LIMIT_S + PING_TIMEOUT_S + 10

    run_virtually(story())


@pytest.mark.parametrize(("takes", "until"), [(3.0, 8.0), (NEVER, 5.0 + ABORT_TIMEOUT_S)])
def test_a_cancelled_group_is_aborted_on_its_engine_before_its_slot_is_free(takes: float, until: float) -> None:
    async def story() -> None:
        engines = Engines(1, taking(run_group=100, abort_group=takes))
        group, _ = make(engines, slots=SAMPLES)
        first = asyncio.ensure_future(group.run_group(question(0), 0))
        following = asyncio.ensure_future(group.run_group(question(1), 1))
        await at(5, first.cancel)
        with pytest.raises(asyncio.CancelledError):
            await first
        assert now() == until
        await following
        (_, run), (abort, aborted), *_ = engines.ranks[0].log
        assert (abort, aborted) == ("abort_group", (run[2],)), "the key of the group that was begun"
        assert engines.starts["q:1"] == [(0, until)]

    run_virtually(story())


def test_an_engine_takes_groups_again_as_soon_as_it_has_switched() -> None:
    async def story() -> None:
        engines = Engines(2, taking(run_group=10, finish_update=1))
        group, tracer = make(engines)
        first = asyncio.ensure_future(ask(group, 1))  # on engine 0, until 10
        await asyncio.sleep(5)
        await group.begin_update(7)
        await group.load_bucket("handle")
        switch = asyncio.ensure_future(group.finish_update(7, "digest"))
        later = asyncio.ensure_future(group.run_group(question(9), 9))
        await asyncio.gather(first, later)
        assert engines.starts["q:9"] == [(1, 6)], "engine 1 had nothing to wait for"
        await switch
        assert now() == 16
        assert engines.breaches == []
        for worker in engines.ranks:
            sync = [call for call in worker.log if call[0] not in ("run_group", "metrics")]
            assert sync == [
                ("begin_update", (7,)),
                ("load_bucket", ("handle",)),
                ("finish_update", (7, "digest")),
            ]
        versions = {str(span.args["question"]): span.args.get("version") for span in tracer.drain()}
        assert versions == {"q:0": None, "q:9": 7}

    run_virtually(story())


def test_a_death_during_a_transfer_costs_an_engine_and_not_the_run() -> None:
    async def story() -> None:
        engines = Engines(3, taking(run_group=50, load_bucket=10))
        group, _ = make(engines)
        await group.open_transport(["a", "b", "c"])
        assert [worker.log for worker in engines.ranks] == [
            [("open_transport", ("a",))],
            [("open_transport", ("b",))],
            [("open_transport", ("c",))],
        ]
        asked = asyncio.ensure_future(ask(group, 2))
        await asyncio.gather(group.load_bucket(1), at(5, engines.die, 1))
        assert group.living == (0, 2)
        assert now() == 10
        await group.finish_update(1, "")
        await group.open_transport(["d", "e"])
        assert engines.ranks[2].log[-1] == ("open_transport", ("e",))
        assert await asked == [("whole", 50.0), ("whole", 55.0)]

    run_virtually(story())


def test_an_error_of_a_worker_ends_the_update() -> None:
    async def story() -> None:
        refusal = RunError("The engine refused a weight update.")
        engines = Engines(2, taking(finish_update=1), failures={"finish_update": refusal})
        group, _ = make(engines)
        engines.ranks[1].silent = True
        with pytest.raises(RunError) as caught:
            await group.finish_update(1, "")
        assert caught.value is refusal
        assert now() == 1, "the other's answer is not waited for"
        assert group.living == (0, 1)
        await group.run_group(question(0), 0)
        assert engines.starts["q:0"] == [(0, 1)]

    run_virtually(story())


def test_rollouts_wait_for_what_no_engine_that_rolls_can_do_without() -> None:
    async def looks() -> list[str]:
        engines, seen = Engines(2), []
        group, _ = make(engines)
        for first, second in (({"search": 3}, {"search": 1}), ({"search": 3}, {"calculator": 1}), ({}, {})):
            engines.ranks[0].activity = EngineActivity(not first, first)
            engines.ranks[1].activity = EngineActivity(False, second)
            await group.look()
            seen.append(group.waits_for)
        return seen

    assert run_virtually(looks()) == ["search", "calculator and search", ""]
