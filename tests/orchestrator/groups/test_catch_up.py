"""Tests of engines that get the last weights alone, in virtual time: the real pool, sync and supervisor."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.cluster.worker_group import RankDied, RankLost, RankSilent
from rlsys.config.schema import SyncMode
from rlsys.observe.faults import FaultLog
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.engine_pool import EnginePool, Newcomer
from rlsys.orchestrator.membership import Standing
from rlsys.orchestrator.run import lost_worker
from rlsys.orchestrator.supervisor import Supervisor
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.weights.transport import BucketHandle
from tests.orchestrator.groups.engines import CALL_TIMEOUT_S, Engines, make, taking
from tests.orchestrator.groups.restarts import config_of, supervisor_of
from tests.orchestrator.groups.simulated_sync import BUCKETS
from tests.support.jsonl import read_rows
from tests.support.virtual_time import virtually
from tests.support.waiting import let_tasks_run


class Sender:
    """Actor that sends weights at once, or fails when it sends them again."""

    driver_host = ""

    def __init__(self, digest: str, fails: Exception | None = None) -> None:
        """`digest` is that of its current weights."""
        self.name, self.digest, self.fails = "actor", digest, fails
        self.ranks = (SimpleNamespace(name="actor rank 0"),)
        self._sent = ""
        self.sent: list[str] = []
        """Digest of each transfer."""

    async def call(self, method: str, *args: Any, **_limits: Any) -> list[Any]:
        if method == "begin_export":
            (again,) = args
            if again and self.fails:
                raise self.fails
            self._sent = self._sent if again else self.digest
            self.sent.append(self._sent)
        return [{"open_export": 1.0, "end_export": self._sent}.get(method)]


def synced(engines: Engines, actor: Any, tmp_path: Path) -> tuple[EnginePool, WeightSync, Supervisor]:
    """Return a pool, a weight sync from `actor` to it, and a supervisor with one restart."""
    pool, _ = make(engines)
    config = config_of(1)
    cluster = replace(config.cluster, sync_mode=SyncMode.tensor)
    sync = WeightSync(actor, [pool], cluster, tmp_path, Tracer("driver"))
    return pool, sync, supervisor_of(pool, sync, engines.restart, FaultLog(tmp_path / "faults"), config)


@virtually
async def test_newcomer_gets_the_version_of_the_others_in_the_middle_of_a_step(tmp_path: Path) -> None:
    actor, engines = Sender("weights 1"), Engines(2, taking(start=7))
    pool, sync, supervisor = synced(engines, actor, tmp_path)
    await sync.send(1)
    watching = asyncio.ensure_future(supervisor.run(1.0))
    await let_tasks_run()
    actor.digest = "within step 2"
    engines.die(1)
    await pool.load_bucket(0)
    assert tuple(pool.living) == (0,)
    await asyncio.sleep(10)
    assert [one.version for one in pool.engines.members.living] == [1, 1]
    actor.digest = "weights 2"
    await sync.send(2)
    assert [one.version for one in pool.engines.members.living] == [2, 2]
    assert actor.sent == ["weights 1", "weights 1", "weights 2"]
    watching.cancel()
    await asyncio.wait({watching})
    assert [row["event"] for row in read_rows(tmp_path / "faults")] == ["began", "recovered"]
    assert (len(engines.former), engines.breaches) == (1, [])


@virtually
async def test_newcomer_waits_for_the_first_push(tmp_path: Path) -> None:
    engines = Engines(2, taking(start=7))
    pool, sync, supervisor = synced(engines, Sender("weights 1"), tmp_path)
    watching = asyncio.ensure_future(supervisor.run(100.0))
    await let_tasks_run()
    engines.die(1)
    await pool.load_bucket(0)
    await asyncio.sleep(10)
    await sync.push(1)
    await asyncio.sleep(1)
    assert pool.engines.members.of_engine[1].version == 1
    watching.cancel()
    await asyncio.wait({watching})


@pytest.mark.parametrize("loss", [RankDied, RankSilent])
@virtually
async def test_loss_of_the_sender_is_not_charged_to_the_newcomer(loss: type[RankLost], tmp_path: Path) -> None:
    lost = loss("actor rank 0 did not finish begin_export.", 0, "actor rank 0")
    engines = Engines(2, taking(start=7))
    pool, sync, supervisor = synced(engines, Sender("weights 1", lost), tmp_path)
    await sync.send(1)
    watching = asyncio.ensure_future(supervisor.run(1.0))
    await let_tasks_run()
    engines.die(1)
    with pytest.raises(ExceptionGroup) as ended:
        await watching
    assert lost_worker(ended.value) is lost, "the run goes back to its checkpoint"
    assert pool.engines.members.of_engine[1].standing is Standing.joining
    assert [row["event"] for row in read_rows(tmp_path / "faults")] == ["began"]


@virtually
async def test_newcomer_that_leaves_before_it_is_connected_is_no_error_of_the_program() -> None:
    pool, _ = make(Engines(2))
    one = pool.engines.members.of_engine[1]
    newcomer = Newcomer(pool.engines, one, CALL_TIMEOUT_S)
    pool.engines.remove(one, "it has left the run")
    with pytest.raises(RankDied):
        await newcomer.open_transport(dict.fromkeys(newcomer.living, "spec"))


SYNC_S = 1.0
"""Time limit of a call of the sync (`cluster.stage_timeout_s.sync`)."""


class Limited(Engines):
    """Engines to which a call of the sync may take `SYNC_S`, unless the caller gives it another limit."""

    async def call_rank(self, index: int, method: str, *args: Any, timeout_s: float | None = None, **more: Any) -> Any:
        return await super().call_rank(
            index, method, *args, timeout_s=SYNC_S if timeout_s is None else timeout_s, **more
        )


class Actor(Sender):
    """An actor that runs its calls in order, as its process does, and sends weights in several buckets.

    A call of the sync may take `SYNC_S`, the wait for its turn included, unless the caller gives it another limit.
    """

    def __init__(self) -> None:
        super().__init__("weights 0")
        self.trains = False
        self._turn, self._left = asyncio.Lock(), 0

    async def train(self, seconds: float) -> None:
        async with self._turn:
            self.trains = True
            await asyncio.sleep(seconds)
            self.trains = False

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        try:
            return await asyncio.wait_for(self._answer(method, *args), SYNC_S if timeout_s is None else timeout_s)
        except TimeoutError:
            raise RankSilent("it is late", 0, self.ranks[0].name) from None

    async def _answer(self, method: str, *args: Any) -> list[Any]:
        async with self._turn:
            if method == "begin_export":
                self._left = BUCKETS
            if method != "next_handle":
                return await super().call(method, *args)
            if not self._left:
                return [None]
            await asyncio.sleep(0.5)
            self._left -= 1
            return [BucketHandle(BUCKETS - self._left, (), 100, None)]


@pytest.mark.parametrize("calls", [1, 2, 4 * BUCKETS])
@virtually
async def test_waiting_for_a_call_of_a_step_makes_neither_the_actor_nor_the_newcomer_late(
    calls: int, tmp_path: Path
) -> None:
    """However many calls the step has: each call of the sync waits for one."""

    def seconds(method: str, _: tuple[Any, ...]) -> float:
        connects = method == "open_transport"  # Which takes both, as with a broadcast.
        return 18.0 if method == "start" else 2.0 if connects and actor.trains else 0.0

    actor, engines = Actor(), Limited(2, seconds)
    pool, sync, supervisor = synced(engines, actor, tmp_path)
    await sync.send(0)
    watching = asyncio.ensure_future(supervisor.run(100.0))
    await let_tasks_run()
    engines.die(1)
    await pool.load_bucket(0)
    for call in range(10 * calls):
        actor.digest = f"within step 1, after {call} calls"
        await actor.train(20 / calls)
    assert [one.version for one in pool.engines.members.living] == [0, 0]
    actor.digest = "weights 1"
    await sync.send(1)
    assert [one.version for one in pool.engines.members.living] == [1, 1]
    watching.cancel()
    await asyncio.wait({watching})
    assert [row["event"] for row in read_rows(tmp_path / "faults")] == ["began", "recovered"]
