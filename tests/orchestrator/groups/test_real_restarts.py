"""Tests that real engines on Ray, one killed and one stopped, come back with verified weights, over two transports."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest

from rlsys.config.compose import load_config
from rlsys.data.question import Question
from rlsys.observe.faults import FaultLog, Restarts
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.engine_pool import EnginePool
from rlsys.orchestrator.membership import Members
from rlsys.orchestrator.supervisor import Supervisor
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.orchestrator.worker_groups import build_groups, restart_engine, started_groups
from tests.support.jsonl import read_rows
from tests.support.processes import descendants_with, is_gone, worker_of
from tests.support.runs import LIMIT_S, NO_INFERENCE, PATIENT, PLAIN_ENGINE

GROUPS = 8
SETTINGS = [
    *PATIENT,
    PLAIN_ENGINE,
    *NO_INFERENCE,
    "rollout.engine.stall_timeout_s=60",
    "rollout.max_episodes=16",
    "cluster.placement.rollout=2-3",
    "search.enabled=false",
    "algorithm.n_samples=4",
]

pytestmark = [pytest.mark.slow, pytest.mark.engine]


async def until_all_serve(pool: EnginePool, count: int) -> None:
    """Wait until `count` engines live that were not there at the start."""
    back = asyncio.Event()

    def look(members: Members) -> None:
        if len([one for one in members.living if one.life >= count]) == count:
            back.set()

    unsubscribe = pool.engines.subscribe(look)
    look(pool.engines.members)
    await asyncio.wait_for(back.wait(), LIMIT_S)
    unsubscribe()


@pytest.mark.parametrize("mode", ["tensor", "disk"])  # tests/live/test_engines_return.py has a run with broadcast.
async def test_killed_and_stopped_engines_come_back(mode: str, tmp_path: Path) -> None:
    config = load_config("searchr1_tiny_cpu", [*SETTINGS, f"cluster.sync_mode={mode}"])

    async def built(_: str) -> None: ...

    async with started_groups(config, tmp_path / "logs") as workers:
        await build_groups(config, workers, built)
        pool = EnginePool(workers["rollout"], config, Tracer("rollout"), [])
        sync = WeightSync(workers["actor"], [pool], config.cluster, tmp_path, Tracer("driver"))
        start = partial(restart_engine, workers["rollout"], config=config)
        faults = FaultLog(tmp_path / "faults.jsonl")
        watching = asyncio.ensure_future(
            Supervisor(pool, sync, start, faults, config, Restarts(config.cluster), {}).run(0.5)
        )
        await sync.send(3)
        killed, living = worker_of(psutil.Process(), 0), worker_of(psutil.Process(), 1)
        (stopped,) = descendants_with("-m", "rlsys.rollout.transformers_process", root=living)
        asked = [
            asyncio.ensure_future(pool.run_group(Question(uid=f"q:{n}", prompt="Who?", answers=("a",)), n))
            for n in range(GROUPS)
        ]
        await asyncio.sleep(0)
        stopped.send_signal(signal.SIGSTOP)
        killed.kill()
        found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), LIMIT_S)
        await until_all_serve(pool, 2)
        assert Counter(type(one) for one in found) == {list: GROUPS}
        assert [one.version for one in pool.engines.members.living] == [3, 3]
        figures = await pool.metrics()
        assert [(figures[f"engine/{n}/version"], figures[f"engine/{n}/updates"]) for n in (0, 1)] == [(3, 1)] * 2
        await sync.send(4)
        assert [one.version for one in pool.engines.members.living] == [4, 4]
        assert all(is_gone(one) for one in (killed, living, stopped)), "a replaced process is left"
        watching.cancel()
        await asyncio.wait({watching})
        await pool.stop(60)
    rows = read_rows(tmp_path / "faults.jsonl")
    assert {(row["part"], row["kind"]) for row in rows if row["event"] == "began"} == {
        ("engine 0", "died"),
        ("engine 1", "hung"),
    }
    assert Counter(row["event"] for row in rows) == {"began": 2, "recovered": 2}
