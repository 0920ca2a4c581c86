"""Tests of engines that die or hang and are started again, in virtual time: the real pool, sync and supervisor."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.config.schema import Mode, RunConfig
from rlsys.errors import RunError
from rlsys.observe.faults import FaultLog
from rlsys.orchestrator import weight_sync
from rlsys.orchestrator.engine_pool import EnginePool
from rlsys.orchestrator.membership import NoEngineLeft
from rlsys.orchestrator.pipeline.rollout_pipeline import RolloutPipeline
from rlsys.orchestrator.run import Run, _pipeline
from rlsys.orchestrator.supervisor import Heartbeats, Supervisor
from rlsys.orchestrator.watchdog import stall_limit_s
from rlsys.rollout.agent.episode import EngineActivity
from tests.orchestrator.groups.engines import CALL_TIMEOUT_S, NEVER, Engines, make, taking
from tests.orchestrator.groups.restarts import STALL_S, Copy, World, config_of, supervisor_of
from tests.support.jsonl import read_rows
from tests.support.trajectories import question
from tests.support.virtual_time import virtually
from tests.support.waiting import let_tasks_run


def supervised(engines: Any, sync: Any, restarts: int, log: Path) -> tuple[EnginePool, Supervisor]:
    pool, _ = make(engines)
    return pool, supervisor_of(pool, sync, engines.restart, FaultLog(log), config_of(restarts))


@virtually
async def test_requests_wait_for_the_last_engine_to_come_back(tmp_path: Path) -> None:
    engines = Engines(1, taking(run_group=10, start=100))
    pool, supervisor = supervised(engines, Copy(), 1, tmp_path / "faults")
    pool.engines.change(pool.engines.members.raise_to(5).switched(pool.engines.members.living[0], 5))
    engines.published = 5
    engines.ranks[0].version = 5
    watching = asyncio.ensure_future(supervisor.run(1.0))
    asked = asyncio.ensure_future(pool.run_group(question(0), 0))
    await asyncio.sleep(5)
    engines.die(0)
    late = asyncio.ensure_future(pool.run_group(question(1), 1))
    await asyncio.gather(asked, late)
    assert now() == 5 + 100 + 10
    assert [one.version for one in pool.engines.members.living] == [5]
    assert (engines.breaches, len(engines.former)) == ([], 1)
    engines.die(0)
    with pytest.raises(NoEngineLeft, match="died"):
        await pool.run_group(question(2), 2)
    watching.cancel()
    await asyncio.wait({watching})
    assert [row["event"] for row in read_rows(tmp_path / "faults")] == ["began", "recovered", "began", "given_up"]


@virtually
async def test_engine_that_cannot_be_started_uses_up_the_restarts(tmp_path: Path) -> None:
    engines = Engines(2, taking(run_group=10, start=7), failures={"start": RunError("no model")})
    pool, supervisor = supervised(engines, Copy(), 3, tmp_path / "faults")
    watching = asyncio.ensure_future(supervisor.run(1.0))
    await let_tasks_run()
    engines.die(1)
    await pool.load_bucket(0)
    await asyncio.sleep(100)
    assert (tuple(pool.living), pool.engines.members.of_engine.keys()) == ((0,), {0})
    assert "no model" in pool.engines.last_error
    assert [row["event"] for row in read_rows(tmp_path / "faults")] == ["began", "given_up"]
    await pool.run_group(question(0), 0)
    watching.cancel()
    await asyncio.wait({watching})


@virtually
async def test_each_start_of_the_only_engine_has_the_time_of_a_start(tmp_path: Path) -> None:
    """The watchdog of the run does not end the run between two starts that fail late."""
    config = config_of(3)
    start_s = 0.9 * stall_limit_s(config)
    engines = Engines(1, taking(start=start_s), failures={"start": RunError("no model")})
    pool, supervisor = supervised(engines, Copy(), 3, tmp_path / "faults")
    groups = SimpleNamespace(engines=pool, inference=None, trained={})
    log = SimpleNamespace(faults=supervisor._faults)
    pipeline = SimpleNamespace(progress=())
    rewards = SimpleNamespace(finished=0)
    run: Any = SimpleNamespace(config=config, groups=groups, pipeline=pipeline, log=log, teacher=None, rewards=rewards)
    tasks = [asyncio.ensure_future(one) for one in (supervisor.run(1.0), Run.watch_progress(run))]
    engines.die(0)
    with pytest.raises(NoEngineLeft):
        await pool.run_group(question(0), 0)
    assert now() > 2.5 * start_s
    assert not any(one.done() for one in tasks)
    for one in tasks:
        one.cancel()
    await asyncio.wait(tasks)


@virtually
async def test_fault_of_a_colocated_engine_does_not_blame_the_restarts(tmp_path: Path) -> None:
    engines = Engines(2)
    pool, _ = make(engines)
    config = config_of(3)
    config.cluster.mode = Mode.colocated
    supervisor = supervisor_of(pool, Copy(), engines.restart, FaultLog(tmp_path / "faults"), config)
    engines.die(1)
    await supervisor.poll()
    await pool.load_bucket(0)
    assert pool.engines.members.of_engine.keys() == {0}
    _, ended = read_rows(tmp_path / "faults")
    assert ended["event"] == "given_up"
    assert "colocated" in ended["detail"]
    assert "left" not in ended["detail"]


@virtually
async def test_engine_that_does_not_settle_is_started_again(tmp_path: Path) -> None:
    engines = Engines(1, taking(settle=NEVER, start=7))
    pool, supervisor = supervised(engines, Copy(), 1, tmp_path / "faults")
    await pool.settle()
    assert now() < CALL_TIMEOUT_S
    assert engines.located_of == [0], "where it hangs is written down"
    assert not engines.breaches
    assert not pool.living
    watching = asyncio.ensure_future(supervisor.run(1.0))
    await asyncio.sleep(10)
    assert [one.version for one in pool.engines.members.living] == [Copy.version]
    assert [row.get("kind") for row in read_rows(tmp_path / "faults")] == ["hung", None]
    watching.cancel()
    await asyncio.wait({watching})


@pytest.mark.parametrize("answers", [True, False])
@virtually
async def test_engine_that_makes_no_progress_is_suspect_then_restarted(answers: bool, tmp_path: Path) -> None:
    engines = Engines(2, taking(run_group=400, start=20))
    pool, supervisor = supervised(engines, Copy(), 1, tmp_path / "faults")
    watching = asyncio.ensure_future(supervisor.run(1.0))
    waiting = asyncio.ensure_future(pool.run_group(question(0), 0))
    await let_tasks_run()
    assert engines.starts["q:0"] == [(0, 0.0)]
    engines.ranks[0].activity = EngineActivity(True, {}, 17.0)
    engines.ranks[0].silent = not answers
    await asyncio.sleep(STALL_S / 2 + 15)
    more = [asyncio.ensure_future(pool.run_group(question(number), number)) for number in (1, 2)]
    await let_tasks_run()
    assert {engines.starts[f"q:{number}"][0][0] for number in (1, 2)} == {1}, "a suspect engine gets no new groups"
    await asyncio.wait_for(asyncio.gather(waiting, *more), 1200)
    (first, began), (second, again) = engines.starts["q:0"]
    assert (first, began) == (0, 0.0)
    assert STALL_S <= again <= 400 + STALL_S, second
    assert len(engines.former) == 1
    assert 0 in engines.located_of, "where it hangs is written down before it is killed"
    assert not engines.breaches
    watching.cancel()
    await asyncio.wait({watching})
    assert [row.get("kind") for row in read_rows(tmp_path / "faults")] == ["hung", None]


@virtually
async def test_an_engine_that_comes_or_goes_wakes_the_pipeline_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, tracer = make(Engines(2))
    woken: list[int] = []
    monkeypatch.setattr(RolloutPipeline, "wake", lambda _: woken.append(len(pool.engines.members.living)))
    log, groups = SimpleNamespace(tracers={"driver": tracer}), SimpleNamespace(engines=pool, devices=None)
    parts: Any = (log, groups, None, SimpleNamespace(groups=()), SimpleNamespace(score=None), None, None)
    _pipeline(RunConfig(), *parts)
    pool.engines.lost(pool.engines.members.of_engine[1], RunError("it died"))
    assert woken == [1]


@pytest.mark.parametrize(("count", "polls"), [(50, 99), (448, 11)])
@virtually
async def test_many_engines_are_polled_less_often(count: int, polls: int, tmp_path: Path) -> None:
    engines = Engines(count)
    _, supervisor = supervised(engines, Copy(), 0, tmp_path / "faults")
    watching = asyncio.ensure_future(supervisor.run(1.0))
    await asyncio.sleep(99.5)
    assert {sum(method == "activity" for method, _ in one.log) for one in engines.ranks} == {polls}
    watching.cancel()
    await asyncio.wait({watching})


def test_engine_that_waits_for_a_search_or_generates_is_not_hung() -> None:
    beats = Heartbeats()
    for second in range(0, 1000, 10):
        assert beats.note(1, EngineActivity(False, {"search": 4}, 3.0), second) == 0
        assert beats.note(2, EngineActivity(True, {}, float(second)), second) == 0
        assert beats.note(3, EngineActivity(True, {}, None), second) == 0, "an engine that cannot tell"
    assert beats.note(1, EngineActivity(True, {}, 3.0), 1000) == 10, "since it was last idle"
    assert beats.note(2, None, 1000) == 10
    assert beats.note(2, EngineActivity(True, {}, 990.0), 1010) == 20, "an answer alone is no progress"
    assert beats.note(2, EngineActivity(True, {}, 991.0), 1020) == 0
    assert beats.note(1, EngineActivity(False, {}, 3.0), 1010) == 10, "its requests were cut off: it has done nothing"
    assert beats.note(1, EngineActivity(True, {}, 3.0), 1015) == 15
    assert beats.note(1, EngineActivity(False, {}, 4.0), 1020) == 0
    for second in range(1030, 2000, 10):
        silent = beats.note(1, None if second % 20 else EngineActivity(False, {}, 4.0), second)
        assert silent == (10 if second % 20 else 0), "answers of an idle engine that are lost do not add up"


def test_engines_that_return_serve_whole_and_current_versions_in_any_interleaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()

    async def one(seed: int) -> None:
        world = World(seed, tmp_path)
        monkeypatch.setattr(weight_sync, "Meeting", world.meeting)
        watching = asyncio.ensure_future(world.supervisor.run(1.0))
        asked = [asyncio.ensure_future(world.ask(number)) for number in range(6)]
        evaluating, hurting = asyncio.ensure_future(world.evaluate()), asyncio.ensure_future(world.hurt())
        try:
            await world.train(seen)
            world.weights = world.given[5] = "weights 5"
            await world.sync.send(5)  # Ends the waiting of engines that came back within a step.
            await asyncio.gather(evaluating, hurting)
            await asyncio.sleep(200)
            members = world.pool.engines.members
            assert all(one.lives and one.version == 5 for one in members.of_engine.values())
            assert len(members.of_engine) == len(world.ranks) or len(world.former) >= world.restarts
            for each in members.living:
                assert world.ranks[each.engine].version == 5
                assert world.ranks[each.engine].alive
            seen["whole"] += 1
            seen["returned"] += len(world.former)
        except NoEngineLeft:
            assert world.restarts <= len(world.former)
            assert not any(worker.alive for worker in world.ranks)
            seen["end"] += 1
        seen.update(await asyncio.gather(*asked))
        seen[await evaluating] += 1
        await hurting
        watching.cancel()
        await asyncio.wait({watching})
        await world.settle()
        assert world.breaches == []
        events = Counter(row["event"] for row in read_rows(world.log)) if world.log.exists() else Counter()
        seen.update(events)
        assert events["began"] >= events["recovered"] + events["given_up"]

    for seed in range(60):
        run_virtually(one(seed))
    assert min(seen[outcome] for outcome in ("whole", "end", "returned", "recovered", "given_up")) > 10, seen
