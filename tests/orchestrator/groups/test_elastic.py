"""Tests of engines that join and leave during a run, in virtual time: the real pool, sync, supervisor and requests."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import now
from rlsys.config.schema import Mode
from rlsys.errors import RunError
from rlsys.observe.faults import FaultKind
from rlsys.observe.requests import REQUESTS, Request
from rlsys.orchestrator.elastic import DEVICES_TIMEOUT_S, Elastic
from tests.orchestrator.groups.elasticity import Elasticity
from tests.orchestrator.groups.engines import Engines, taking
from tests.support.jsonl import read_rows
from tests.support.refusals import refused
from tests.support.trajectories import question
from tests.support.virtual_time import virtually
from tests.support.waiting import let_tasks_run


@virtually
async def test_an_engine_leaves_when_its_groups_have_ended(tmp_path: Path) -> None:
    engines = Engines(2, taking(run_group=100))
    run = Elasticity(engines, tmp_path)
    async with run.watched():
        asked = [run.ask(number) for number in range(4)]  # Two for each engine.
        await let_tasks_run()
        said: list[str] = []
        leaving = asyncio.ensure_future(run.elastic.leave(0, None, said.append))
        await asyncio.sleep(10)
        assert run.standings == {0: "leaving", 1: "serving"}
        assert run.pool.capacity == 2 + 2, "room on engine 1, and the two groups that still run on engine 0"
        asked += [run.ask(number) for number in range(4, 8)]
        await asyncio.gather(leaving, run.elastic.leave(0, None))
        assert 100 <= now() <= 101
        assert run.standings == {1: "serving"}
        assert run.pool.capacity == 2
        await asyncio.gather(*asked)
    assert {question: len(starts) for question, starts in engines.starts.items()} == {f"q:{n}": 1 for n in range(8)}
    assert {engine for n in range(4, 8) for engine, _ in engines.starts[f"q:{n}"]} == {1}
    assert engines.ranks[0].killed
    assert not engines.ranks[1].killed
    assert any("2 prompt groups" in text for text in said)
    assert [(row["event"], row["part"]) for row in read_rows(run.log)] == [("left", "engine 0")]
    assert (await run.pool.metrics())["rollout/requeued_groups"] == 0


@pytest.mark.parametrize("limit_s", [0.0, 30.0])
@virtually
async def test_groups_that_do_not_end_within_the_limit_run_again_and_are_never_lost(
    limit_s: float, tmp_path: Path
) -> None:
    engines = Engines(3, taking(run_group=100))
    run = Elasticity(engines, tmp_path)
    async with run.watched():
        asked = run.ask(0)
        await let_tasks_run()
        text = await run.elastic.leave(0, limit_s)
        assert now() == limit_s
        assert "1 prompt group" in text
        await asyncio.sleep(10)
        await run.elastic.leave(1, 0.0)
        await asyncio.sleep(10)
        begun = now()
        await asked
        assert now() == begun - 10 + 100, "the third engine, because leaving is no death"
    assert [engine for engine, _ in engines.starts["q:0"]] == [0, 1, 2]


@virtually
async def test_an_engine_joins_and_gets_no_group_before_it_has_the_weights(tmp_path: Path) -> None:
    engines = Engines(1, taking(run_group=100, start=40, finish_update=5))
    run = Elasticity(engines, tmp_path)
    run.pool.engines.change(run.pool.engines.members.raise_to(5).switched(run.pool.engines.members.living[0], 5))
    engines.published = engines.ranks[0].version = 5
    async with run.watched():
        asked = [run.ask(number) for number in range(4)]
        text = await run.elastic.join(None)
        assert now() == 45
        assert "version 5" in text
        assert run.standings == {0: "serving", 1: "serving"}
        assert run.pool.capacity == 4
        await asyncio.gather(*asked)
        assert now() == 145
    assert engines.breaches == []
    assert [(row["event"], row["part"]) for row in read_rows(run.log)] == [("joined", "engine 1")]


@virtually
async def test_an_engine_that_has_left_may_join_again(tmp_path: Path) -> None:
    engines = Engines(2, taking(start=3))
    run = Elasticity(engines, tmp_path, free=0)
    async with run.watched():
        await run.elastic.leave(0, None)
        await run.elastic.join(None)
        assert run.standings == {0: "serving", 1: "serving"}
        with refused("no_room", "cluster.placement.rollout"):
            await run.elastic.join(None)
        assert now() >= DEVICES_TIMEOUT_S
        run.devices.free = 1
        await asyncio.gather(run.elastic.join(None), run.elastic.leave(1, None))
        assert run.standings == {0: "serving", 2: "serving"}


@virtually
async def test_an_engine_that_cannot_start_is_no_fault_and_no_restart(tmp_path: Path) -> None:
    engines = Engines(1, taking(start=3), failures={"start": RunError("no model")})
    run = Elasticity(engines, tmp_path, restarts=3)
    async with run.watched():
        with pytest.raises(RunError, match="no model"):
            await run.elastic.join(None)
        assert (run.standings, run.devices.taken) == ({0: "serving"}, set())
        assert read_rows(run.log) == []
        engines._failures.clear()
        await run.elastic.join(None)
        assert run.standings == {0: "serving", 1: "serving"}


def test_an_engine_for_which_a_machine_has_no_memory_is_refused() -> None:
    Elastic._require_memory(2**30, 2**30)
    with refused("no_room", "ENGINE"):
        Elastic._require_memory(2**30, 2**30 - 1)


@virtually
async def test_requests_that_cannot_be_carried_out_change_nothing(tmp_path: Path) -> None:
    run = Elasticity(Engines(2, taking(run_group=50, start=20)), tmp_path)
    async with run.watched():
        for engine, code in ((7, "unknown"), (-1, "unknown")):
            with refused(code, "ENGINE"):  # type: ignore[arg-type]
                await run.elastic.leave(engine, None)
        for engine, code in ((0, "exists"), (3, "out_of_range"), (-1, "out_of_range")):
            with refused(code, "ENGINE"):  # type: ignore[arg-type]
                await run.elastic.join(engine)
        asked = [run.ask(number) for number in range(2)]
        await let_tasks_run()
        leaving = asyncio.ensure_future(run.elastic.leave(0, None))
        await let_tasks_run()
        for engine in (None, 1):
            with refused("conflict", "ENGINE"):
                await run.elastic.leave(engine, None)
        await leaving
        with refused("conflict", "ENGINE"):
            await run.elastic.leave(1, None)
        run.config.cluster.mode = Mode.colocated
        with refused("unsupported", "cluster.mode"):
            await run.elastic.join(None)
        assert run.standings == {1: "serving"}
        await asyncio.gather(*asked)


@pytest.mark.parametrize("restarts", [0, 1])
@virtually
async def test_a_leaving_engine_stays_if_no_other_one_serves_any_more(restarts: int, tmp_path: Path) -> None:
    """Also if another one is being started again, because that may fail."""
    engines = Engines(2, taking(run_group=50, start=70))
    run = Elasticity(engines, tmp_path, restarts)
    async with run.watched():
        asked = [run.ask(number) for number in range(2)]
        await let_tasks_run()
        leaving = asyncio.ensure_future(run.elastic.leave(0, None))
        await asyncio.sleep(10)
        engines.die(1)
        with pytest.raises(RunError, match="stays"):
            await leaving
        assert run.standings == {0: "serving"} | ({1: "starting"} if restarts else {})
        with refused("conflict", "ENGINE"):
            await run.elastic.leave(0, None)
        await asyncio.gather(*asked)


@pytest.mark.parametrize("kind", [FaultKind.died, FaultKind.displaced])
@virtually
async def test_a_leaving_engine_that_is_lost_is_not_started_again(kind: FaultKind, tmp_path: Path) -> None:
    engines = Engines(1, taking(run_group=50, start=5))
    run = Elasticity(engines, tmp_path, restarts=3)
    run.config.cluster.address = "10.0.0.1:6379"
    async with run.watched():
        await run.elastic.join(None)
        asked = [run.ask(number) for number in range(2)]
        await let_tasks_run()
        leaving = asyncio.ensure_future(run.elastic.leave(1, None))
        await asyncio.sleep(10)
        if kind is FaultKind.died:
            engines.die(1)
        else:
            run.devices.lost = {1}
        with pytest.raises(RunError):
            await leaving
        assert run.devices.taken == set()
        run.devices.lost = set()
        await asyncio.gather(*asked)
        await asyncio.sleep(100)
        assert run.standings == {0: "serving"}
    recorded = [(row["event"], row.get("kind")) for row in read_rows(run.log)]
    assert recorded == [("joined", None), ("began", kind), ("given_up", None)]


@virtually
async def test_an_engine_that_evaluates_leaves_after_its_evaluation(tmp_path: Path) -> None:
    engines = Engines(2, taking(answer=30))
    run = Elasticity(engines, tmp_path)
    async with run.watched():
        async with run.pool.reserve(1) as reserved:
            (aside,) = run.pool.engines.members.aside
            leaving = asyncio.ensure_future(run.elastic.leave(aside, None))
            await let_tasks_run()
            for number in range(3):
                assert (await reserved.answer(question(number))).question_uid == f"q:{number}"
            assert not leaving.done()
            with refused("conflict", "ENGINE"):
                await run.elastic.leave(None, None)
        await leaving
        assert run.standings == {1 - aside: "serving"}
        assert now() < 3 * 30 + 2


@virtually
async def test_requests_begin_anew_if_the_run_goes_back(tmp_path: Path) -> None:
    run = Elasticity(Engines(2, taking(run_group=50, start=20)), tmp_path)
    folder = tmp_path / REQUESTS

    def send(*requests: Request) -> None:
        for request in requests:
            (folder / f"{request.name}.json").write_text(json.dumps(asdict(request)))

    def answers() -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(folder.glob("*.answer"))]

    async with run.watched():
        asked = [run.ask(number) for number in range(2)]
        await let_tasks_run()
        send(Request("join"), Request("leave", 0), Request("leave", 9), Request("list"))
        await asyncio.sleep(5)
        assert [one["ended"] for one in answers()] == [False, False, True, True]
        assert [one["code"] for one in answers()] == [None, None, "unknown", None]
        listed = {row["engine"]: row["state"] for row in answers()[3]["rows"]}
        assert listed == {0: "leaving", 1: "serving", 2: "starting"}
    assert run.standings == {0: "leaving", 1: "serving"}, "the engine that was starting is removed"
    run.pool.engines.change(run.pool.engines.members.anew())
    assert run.standings == {0: "serving", 1: "serving"}
    async with run.watched():
        await asyncio.sleep(60)
        assert run.standings == {1: "serving", 2: "serving"}
        assert [one["ended"] for one in answers()] == [True] * 4
        await asyncio.gather(*asked)
