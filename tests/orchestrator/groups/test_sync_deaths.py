"""Tests of weight syncs during which engines die: the survivors get the whole version, whatever the moment of a death.

Most runs are simulated in virtual time, with the real `WeightSync` and `EnginePool`. In the others, real processes
exchange real buckets over gloo, and one of them kills itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rlsys.cluster.worker_group import RankDied
from rlsys.config.schema import ClusterConfig, Device, RunConfig, SyncMode
from rlsys.errors import PeerLost, RunError
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.engine_pool import EnginePool
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.trainer.export import WeightSender
from rlsys.weights import transport
from rlsys.weights.bucket import Bucket, digest, pack_into, unpack
from rlsys.weights.transport import BucketHandle, Receiver, TransportSpec
from tests.orchestrator.groups.simulated_sync import BUCKETS, check_syncs_while_engines_die
from tests.support.megatron_processes import Host, Shell, fresh
from tests.support.tensors import raw, some_tensors


def test_every_survivor_gets_every_version_whenever_engines_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_syncs_while_engines_die(tmp_path, monkeypatch)


@pytest.mark.parametrize("loses_peer", [True, False])
async def test_transfer_that_fails_although_nobody_died_is_not_repeated(loses_peer: bool, tmp_path: Path) -> None:
    calls: Counter[str] = Counter()

    class Group:
        name, driver_host = "actor", "127.0.0.1"
        ranks = (SimpleNamespace(name="one"),)
        living: ClassVar[Any] = {0: None}
        workers: Any = SimpleNamespace(name="rollout", ranks=ranks)

        async def call(self, method: str, *_args: Any, **_limits: Any) -> list[Any]:
            calls[method] += 1
            if method == "next_handle":
                raise PeerLost("a cable is loose") if loses_peer else RunError("no room")
            return [1.0]

        async def require_alive(self, _timeout_s: float | None = None) -> None: ...
        async def open_transport(self, _specs: Any) -> None: ...
        async def begin_update(self, _version: int) -> None: ...

    settings = ClusterConfig(device=Device.cpu, sync_mode=SyncMode.broadcast)
    sync = WeightSync(Group(), [Group()], settings, tmp_path, Tracer("driver"))  # type: ignore[arg-type, list-item]
    with pytest.raises(RunError, match="cable" if loses_peer else "room"):
        await sync.push(1)
    assert calls["next_handle"] == 1


BUCKET_BYTES = 8_000_000  # More than a socket takes at once, so a bucket is on its way for some time.


def tensors_of(version: int) -> list[list[tuple[str, Any]]]:
    return some_tensors(version, BUCKETS, 6_000_000)


class Exporter(WeightSender):
    """The actor: sends `tensors_of` the versions 1, 2, ... without a model."""

    coords: Any = SimpleNamespace(rank=0, in_stage=0)
    version = 0

    def to_send(self, version: int) -> None:
        self.version = version

    def export(self, _bucket_bytes: int, sender: Any, _again: bool) -> Any:
        checksums: dict[str, str] = {}
        buckets = iter(tensors_of(self.version))

        def following() -> BucketHandle | None:
            for tensors in buckets:
                handle: BucketHandle = sender.send(pack_into(sender.next_slot(), tensors))
                checksums.update({record.name: record.checksum for record in handle.records})
                running.digest = digest(checksums)
                return handle
            return None

        running = SimpleNamespace(next=following, digest="")
        return running


class Engine:
    """A receiver that keeps what arrives, and kills itself at `moment`."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.version, self.weights = 0, {}  # type: ignore[var-annotated]
        self.end: Receiver | None = None

    def open_transport(self, spec: TransportSpec) -> None:
        self._maybe_die("joining")
        if self.moment == "connecting":
            transport._open_group = lambda *_: self._maybe_die("connecting")
        if self.end is not None:
            self.end.close()
        self.end = transport.open_receiver(spec)

    def begin_update(self, _version: int) -> None:
        self._maybe_die("beginning")
        self.weights = {}

    def load_bucket(self, handle: BucketHandle) -> None:
        assert self.end is not None
        if handle.number == 2:
            self._maybe_die("between two buckets")
            if self.moment == "in a bucket":
                self._die_in(handle)
        for record, tensor in unpack(self.end.receive(handle)):
            assert record.name not in self.weights
            self.weights[record.name] = record.checksum, raw(tensor)

    def finish_update(self, version: int, expected: str) -> None:
        self._maybe_die("switching")
        assert digest({name: hashed for name, (hashed, _) in self.weights.items()}) == expected
        self.version = version

    def holds(self) -> tuple[int, bool]:
        """Return the version, and whether the tensors have its bits."""
        expected = {name: raw(tensor) for bucket in tensors_of(self.version) for name, tensor in bucket}
        return self.version, {name: bits for name, (_, bits) in self.weights.items()} == expected

    def _die_in(self, handle: BucketHandle) -> None:
        """Die as soon as the first bytes of a bucket have arrived."""
        end: Any = self.end
        room = Bucket(end._room(handle.nbytes), handle.records)
        room.flat.zero_()
        end._group.broadcast(room.flat)
        while not np.any(room.data[:4096]):
            pass
        self._maybe_die("in a bucket")

    def _maybe_die(self, moment: str) -> None:
        if self.moment == moment:
            os.kill(os.getpid(), signal.SIGKILL)


class Processes:
    """A WorkerGroup on forked processes; calls to one process run in order."""

    driver_host = "127.0.0.1"

    def __init__(self, name: str, hosts: list[Host], threads: ThreadPoolExecutor) -> None:
        self.name = name
        self.ranks = [SimpleNamespace(name=f"{name} rank {n}", number=n, host=host) for n, host in enumerate(hosts)]
        self._threads = threads
        self._locks = [asyncio.Lock() for _ in hosts]

    async def call(self, method: str, *args: Any, **_limits: Any) -> list[Any]:
        return await asyncio.gather(*(self.call_rank(rank.number, method, *args) for rank in self.ranks))

    async def call_rank(self, index: int, method: str, *args: Any, **_limits: Any) -> Any:
        def ask() -> Any:
            host = self.ranks[index].host
            try:
                host.begin(_call, method, *args)
                return host.answer()
            except (EOFError, OSError):
                return RankDied(f"{self.ranks[index].name} died", index)

        async with self._locks[index]:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def require_alive(self, _timeout_s: float | None = None) -> None:
        await self.call("__repr__")

    def kill_rank(self, index: int) -> None:
        self.ranks[index].host.kill()

    def log_tail(self, _index: int) -> str:
        return ""


def _call(shell: Shell, method: str, *args: Any) -> Any:
    """Call a method of the process's worker; return a RunError that it raises."""
    if method == "build":
        shell.worker = args[0](*args[1:])
        return None
    try:
        return getattr(shell.worker, method)(*args)
    except RunError as problem:
        return problem


MOMENTS = ["beginning", "joining", "connecting", "in a bucket", "between two buckets", "switching"]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_engine_killed_during_a_broadcast_is_left_out(moment: str, tmp_path: Path) -> None:
    """No wait ends by its time-out, which is an hour."""
    settings = ClusterConfig(
        device=Device.cpu, sync_mode=SyncMode.broadcast, sync_bucket_bytes=BUCKET_BYTES, call_timeout_s=3600.0
    )
    with ThreadPoolExecutor(4) as threads, fresh(4) as hosts:
        actor, engines = Processes("actor", hosts[:1], threads), Processes("rollout", hosts[1:], threads)
        await actor.call("build", Exporter)
        await asyncio.gather(*(engines.call_rank(n, "build", Engine, moment if n == 1 else "") for n in range(3)))
        pool = EnginePool(engines, RunConfig(), Tracer("rollout"), [])  # type: ignore[arg-type]
        sync = WeightSync(actor, [pool], settings, tmp_path, Tracer("driver"))  # type: ignore[arg-type]
        for version in (1, 2):
            await actor.call("to_send", version)
            await sync.send(version)
            assert tuple(pool.living) == (0, 2)
            assert [await engines.call_rank(n, "holds") for n in pool.living] == [(version, True)] * 2
