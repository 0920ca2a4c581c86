"""Tests of engines that come and go with the machines of a cluster, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlsys.errors import RunError
from rlsys.orchestrator.elastic import MACHINES_POLL_S
from tests.orchestrator.groups.elasticity import Elasticity
from tests.orchestrator.groups.engines import Engines, taking
from tests.support.jsonl import read_rows
from tests.support.refusals import refused
from tests.support.virtual_time import virtually
from tests.support.waiting import let_tasks_run


@virtually
async def test_engines_of_a_lost_machine_leave_and_return_on_another_one(tmp_path: Path) -> None:
    engines = Engines(3, taking(run_group=20, start=7))
    run = Elasticity(engines, tmp_path, restarts=1, free=9)
    run.config.cluster.address = "10.0.0.1:6379"
    async with run.watched():
        asked = [run.ask(number) for number in range(3)]
        await let_tasks_run()
        engines.die(1)  # Noticed before the loss of its machine: its start hangs, and no restart is used up.
        engines._seconds = taking(run_group=20, start=1e6)
        run.devices.lost = {1, 2}
        await asyncio.gather(*asked)
        await asyncio.sleep(30)
        assert run.standings == {0: "serving"}
        assert [row["state"] for row in run.elastic.listed()] == [
            "serving",
            "waits for a machine",
            "waits for a machine",
        ]
        engines._seconds = taking(run_group=20, start=12)
        for lost, after in (({2}, {0: "serving", 1: "starting"}), ({1, 2}, {0: "serving"})):
            run.devices.lost = lost  # Its other machine leaves too, before it has started there.
            await asyncio.sleep(MACHINES_POLL_S + 1)
            assert run.standings == after
        run.devices.lost = {2}
        await asyncio.sleep(20)
        assert run.standings == {0: "serving", 1: "serving"}
        assert await run.elastic.leave(2, None)
        run.devices.lost = set()
        engines.die(0)
        await run.ask(3)
        await asyncio.sleep(30)
        assert run.standings == {0: "serving", 1: "serving"}, "the restart was not used up before"
    kinds = {row["part"]: row["kind"] for row in read_rows(run.log)[:2]}
    assert kinds == {"engine 1": "died", "engine 2": "displaced"}
    ends = Counter(row["event"] for row in read_rows(run.log))
    assert ends == {"began": 3, "recovered": 2, "given_up": 1}


@pytest.mark.parametrize(("asked", "serving"), [(None, [0, 1, 2, 3]), (2, [0, 1, 2])])
@virtually
async def test_an_engine_that_joins_does_not_take_the_number_of_one_that_returns(
    asked: int | None, serving: list[int], tmp_path: Path
) -> None:
    run = Elasticity(Engines(3, taking(start=7)), tmp_path, free=9)
    run.config.cluster.address = "10.0.0.1:6379"
    async with run.watched():
        run.devices.lost = {2}
        await asyncio.sleep(1.5 * MACHINES_POLL_S)
        joining = asyncio.ensure_future(run.elastic.join(asked))
        await asyncio.sleep(0.5 * MACHINES_POLL_S - 0.1)  # The machines are looked at before the join looks again.
        run.devices.lost = set()
        with nullcontext() if asked is None else refused("exists", "ENGINE"):
            await joining
        await asyncio.sleep(10)
        assert run.standings == dict.fromkeys(serving, "serving")
    assert run.devices.asked[:2] == [[0, 1, 2]] * 2, "one question for all, also for one without a machine"


def grow(run: Elasticity, most: int) -> None:
    """Let engines join by themselves, up to `most`."""
    run.config.cluster.address, run.config.cluster.max_engines = "10.0.0.1:6379", most


MOST = ("out_of_range", "cluster.max_engines")


@virtually
async def test_more_engines_join_by_themselves_up_to_a_number_while_the_cluster_has_devices(tmp_path: Path) -> None:
    run = Elasticity(Engines(2, taking(start=7)), tmp_path, free=0)
    grow(run, 5)
    async with run.watched():
        await asyncio.sleep(100)
        assert run.standings == {0: "serving", 1: "serving"}
        run.devices.free = 2  # A machine joins.
        await asyncio.sleep(2 * MACHINES_POLL_S + 8)
        assert run.standings == dict.fromkeys(range(4), "serving")
        await run.elastic.leave(3, None)
        run.devices.free = 9
        await asyncio.sleep(100)
        assert run.standings == dict.fromkeys(range(3), "serving"), "neither it nor another one takes its place"
        await run.elastic.join(None)
        await asyncio.sleep(100)
        assert run.standings == dict.fromkeys(range(5), "serving")
        for number, (code, key) in {
            None: MOST,
            5: MOST,
            4: ("exists", "ENGINE"),
            6: ("out_of_range", "ENGINE"),
        }.items():
            with refused(code, key):
                await run.elastic.join(number)
    events = [(row["event"], row["part"][-1]) for row in read_rows(run.log)]
    assert events == [("joined", "2"), ("joined", "3"), ("left", "3"), ("joined", "3"), ("joined", "4")]


@virtually
async def test_devices_of_an_engine_that_leaves_do_not_stay_with_one_that_would_have_joined(tmp_path: Path) -> None:
    run = Elasticity(Engines(2, taking(start=7)), tmp_path, free=1)
    grow(run, 5)
    async with run.watched():
        await asyncio.sleep(3 * MACHINES_POLL_S)
        assert run.devices.asked_for == (2, 3), "Ray has no devices for engine 3 yet"
        await run.elastic.leave(2, None)
        await asyncio.sleep(2 * MACHINES_POLL_S)
        assert run.devices.asked_for == ()
        await run.elastic.join(None)
        assert run.standings == dict.fromkeys(range(3), "serving")


@virtually
async def test_an_additional_engine_that_leaves_while_it_starts_is_no_fault(tmp_path: Path) -> None:
    run = Elasticity(Engines(1, taking(start=100)), tmp_path, free=1)
    grow(run, 2)
    async with run.watched():
        await asyncio.sleep(MACHINES_POLL_S + 1)
        assert await run.elastic.leave(1, None)
        await asyncio.sleep(200)
        assert run.standings == {0: "serving"}
    assert [row["event"] for row in read_rows(run.log)] == ["left"]


@virtually
async def test_no_more_engines_join_by_themselves_once_one_cannot_start(tmp_path: Path) -> None:
    """The second one begins before the first one has failed."""
    engines = Engines(1, taking(start=7), failures={"start": RunError("no model")})
    run = Elasticity(engines, tmp_path, restarts=3, free=9)
    grow(run, 9)
    async with run.watched():
        await asyncio.sleep(100)
        assert (run.standings, run.devices.taken) == ({0: "serving"}, set())
    assert Counter(row["event"] for row in read_rows(run.log)) == {"began": 2, "given_up": 2}


@virtually
async def test_an_additional_engine_whose_start_a_run_that_goes_back_cuts_off_starts_again(tmp_path: Path) -> None:
    run = Elasticity(Engines(1, taking(start=7)), tmp_path, free=1)
    grow(run, 2)
    async with run.watched():
        await asyncio.sleep(MACHINES_POLL_S + 1)
        assert run.standings == {0: "serving", 1: "starting"}
    run.pool.engines.change(run.pool.engines.members.anew())
    async with run.watched():
        await asyncio.sleep(20)
        assert run.standings == {0: "serving", 1: "serving"}
