"""Simulates weight syncs in virtual time: engines and an actor exchange buckets over one broadcast after the other."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.config.schema import ClusterConfig, Device, SyncMode
from rlsys.errors import PeerLost
from rlsys.observe.spans import Tracer
from rlsys.orchestrator import weight_sync
from rlsys.orchestrator.membership import NoEngineLeft
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.weights.transport import BucketHandle
from tests.orchestrator.groups.engines import CALL_TIMEOUT_S, Engines, Worker, make

BUCKETS = 3


class Broadcast:
    """A transport that needs all its members, with a hand-written rule for what each member notices of a death."""

    def __init__(self, members: tuple[str, ...], noticed_by: Callable[[], bool]) -> None:
        self.members, self._noticed_by = members, noticed_by
        self.ended = False
        self._here: dict[int, set[str]] = {}
        self._waits: dict[asyncio.Future[None], tuple[str, int]] = {}

    def meet(self, name: str, number: int) -> asyncio.Future[None]:
        """Return a future that is done when all members have come to meeting `number`."""
        wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits[wait] = name, number
        here = self._here.setdefault(number, set())
        here.add(name)
        if self.ended:
            self.end()
        elif here == set(self.members):
            for one, (_, at) in list(self._waits.items()):
                if at == number:
                    del self._waits[one]
                    one.set_result(None)
        return wait

    def lose(self, name: str) -> None:
        """Take a dead member out. Some of the others notice it, as with gloo, or none, as NCCL may."""
        if name in self.members:
            self._fail(lambda member: member == name or self._noticed_by())

    def end(self) -> None:
        """See `Meeting`."""
        self.ended = True
        self._fail(lambda _: True)

    def _fail(self, whose: Callable[[str], bool]) -> None:
        for wait, (name, _) in list(self._waits.items()):
            if whose(name):
                del self._waits[wait]
                if not wait.done():
                    wait.set_exception(PeerLost(name))
                    wait.exception()


class Simulation(Engines):
    """Engines, and an actor of two ranks, that exchange buckets over one `Broadcast` after the other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        super().__init__(self.random.randint(1, 5), lambda *_: self.random.choice([0, self.random.uniform(0, 3)]))
        self.name = "rollout"
        self.quiet = self.random.random() < 0.5
        self.links: list[Broadcast] = []
        self._left_in: list[Broadcast] = []
        """Broadcasts in which the actor was waiting when the driver gave up."""
        self.staged: dict[int, list[int]] = {}
        self.weights = "digest"
        """Digest of the actor's current weights."""
        self.last_death = 0.0
        self._tasks: dict[Worker, asyncio.Future[None]] = {}
        self.actor = SimpleNamespace(
            name="actor",
            driver_host="",
            ranks=[SimpleNamespace(name="actor rank 0")],
            call=self._ask_actor,
            require_alive=self._lives,
        )
        self._sent = 0

    async def _lives(self, _timeout_s: float | None = None) -> None: ...

    def meeting(self, _host: str) -> Any:
        """Stand in for `Meeting`, whose members the first spec names."""
        link = Broadcast((), lambda: not self.quiet and self.random.random() < 0.5)
        link.address = "", len(self.links)  # type: ignore[attr-defined]
        self.links.append(link)
        return link

    def end(self, worker: Worker) -> None:
        if worker.alive:
            self.last_death = now()
        worker.end()
        for link in self.links:
            link.lose(worker.name)

    async def _meet_all(self, number: int) -> None:
        link = self.links[-1]
        try:
            await link.meet("actor rank 0", number)
        except asyncio.CancelledError:  # The driver no longer waits, but the actor's process does.
            self._left_in.append(link)
            raise

    async def _ask_actor(self, method: str, *args: Any, **_limits: Any) -> list[Any]:
        if not all(link.ended for link in self._left_in):
            self.breaches.append(f"the actor cannot {method}: it waits in a broadcast that nobody ends")
        await asyncio.sleep(self.random.uniform(0, 2))
        if method == "open_export":
            self.links[-1].members = args[0].members
            self._sent = 0
            await self._meet_all(0)
            return [1.0, None]
        if method == "begin_export":
            self._left = BUCKETS
        if method == "end_export":
            return [self.weights, "of others"]
        if method != "next_handle":
            return [None, None]
        if self._sent and self._left < BUCKETS:  # The last bucket must have arrived before the next is sent.
            await self._meet_all(self._sent)
        if not self._left:
            return [None, None]
        self._left -= 1
        self._sent += 1
        return [BucketHandle(self._sent, (), 100, None), None]

    def _open_transport(self, worker: Worker, call: asyncio.Future[Any], _: str, args: tuple[Any, ...]) -> None:
        assert not self._busy(worker), "the old transport is still in use"
        worker.link = self.links[-1]  # type: ignore[attr-defined]
        worker.link.members = args[0].members  # type: ignore[attr-defined]
        self._meet(worker, call, 0)

    def _begin_update(self, worker: Worker, call: asyncio.Future[Any], method: str, args: tuple[Any, ...]) -> None:
        assert not self._busy(worker), "a bucket of the last attempt is still on its way"
        self.staged[worker.number] = []
        super()._begin_update(worker, call, method, args)

    def _load_bucket(self, worker: Worker, call: asyncio.Future[Any], _: str, args: tuple[Any, ...]) -> None:
        self._meet(worker, call, args[0].number)

    def _meet(self, worker: Worker, call: asyncio.Future[Any], number: int) -> None:
        async def meet() -> None:
            await asyncio.sleep(self.random.uniform(0, 2))
            if not worker.alive:
                return
            try:
                await worker.link.meet(worker.name, number)  # type: ignore[attr-defined]
            except PeerLost as problem:
                worker.answer(call, problem)
                return
            if number and worker.alive:
                self.staged[worker.number].append(number)
            worker.answer(call, None)

        self._tasks[worker] = asyncio.ensure_future(meet())

    def _busy(self, worker: Worker) -> bool:
        return worker in self._tasks and not self._tasks[worker].done()

    async def settle(self) -> None:
        """Let the calls end that a dead engine, or a run that ended, has left behind."""
        for link in self.links:
            link.end()
        await asyncio.gather(*self._tasks.values())


def check_syncs_while_engines_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate weight syncs during which engines die: every survivor must get every version."""
    seen: Counter[str] = Counter()

    async def one(seed: int) -> None:
        world = Simulation(seed)
        monkeypatch.setattr(weight_sync, "Meeting", world.meeting)
        pool, _ = make(world)
        settings = ClusterConfig(device=Device.cpu, sync_mode=SyncMode.broadcast, call_timeout_s=CALL_TIMEOUT_S)
        sync = WeightSync(world.actor, [pool], settings, tmp_path, Tracer("driver"))  # type: ignore[arg-type]

        async def hurt() -> None:
            for worker in world.random.sample(world.ranks, world.random.randint(0, len(world.ranks))):
                await asyncio.sleep(world.random.choice([0, world.random.uniform(0, 20)]))
                world.end(worker)

        hurting = asyncio.ensure_future(hurt())
        try:
            for version in (1, 2, 3):
                attempts, began = len(world.links), now()
                await sync.send(version)
                attempts = len(world.links) - attempts
                seen["several attempts"] += attempts > 1
                assert attempts <= len(world.ranks)
                assert now() - max(began, world.last_death) < 60, "nobody waits for the dead"
                alive = [worker for worker in world.ranks if worker.alive]
                assert {worker.version for worker in alive} <= {version}
                for worker in alive:
                    assert len(world.staged[worker.number]) == BUCKETS, "each bucket once, none from a former attempt"
                    assert world.staged[worker.number] == sorted(world.staged[worker.number])
            seen["whole"] += 1
        except NoEngineLeft:
            assert not any(worker.alive for worker in world.ranks)
            seen["end"] += 1
        await hurting
        await world.settle()
        assert world.breaches == []

    for seed in range(150):
        run_virtually(one(seed))
    assert min(seen[outcome] for outcome in ("several attempts", "whole", "end")) > 10
