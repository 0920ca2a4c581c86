"""A pool whose engines join and leave, in virtual time and without Ray: the real pool, supervisor and requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlsys.apps.planner.virtual_time import now
from rlsys.observe.faults import FaultLog, Restarts
from rlsys.observe.requests import Inbox
from rlsys.orchestrator import elastic
from rlsys.orchestrator.elastic import Elastic
from rlsys.orchestrator.supervisor import Supervisor
from tests.orchestrator.groups.engines import Engines, make
from tests.orchestrator.groups.restarts import Copy, config_of
from tests.support.trajectories import question
from tests.support.waiting import let_tasks_run


class Devices:
    """Stand-in for `Seats`: engines up to `planned` have their own devices, and `free` further engines may join."""

    def __init__(self, planned: int, free: int) -> None:
        self.planned, self.free = planned, free
        self.lost: set[int] = set()
        """Engines whose machine is gone."""
        self.taken: set[int] = set()
        self.waiting: list[int] = []
        """Engines for which Ray has been asked, in order."""
        self.asked: list[list[int]] = []
        """Engines of each call of `find_all`."""

    unreserved = False

    def find(self, engine: int) -> bool:
        if engine in self.lost:
            return False
        if engine < self.planned:
            return True
        if engine not in self.asked_for:
            self.waiting.append(engine)
        self._place()
        return engine in self.taken

    def find_all(self, engines: list[int]) -> dict[int, bool]:
        self.asked.append(engines)
        return {engine: self.find(engine) for engine in engines}

    @property
    def asked_for(self) -> tuple[int, ...]:
        return *self.taken, *self.waiting

    def release(self, engine: int) -> None:
        self.taken.discard(engine)
        self.waiting = [one for one in self.waiting if one != engine]
        self._place()

    def _place(self) -> None:
        """Give free devices to the engines that wait, also if nobody asks for them any more."""
        while self.waiting and len(self.taken) < self.free:
            self.taken.add(self.waiting.pop(0))


async def ask_at_once(question: Callable[[], Any]) -> Any:
    """Stand-in for `runtime.answer`, which asks Ray in a thread."""
    return question()


class Sync(Copy):
    """A weight sync that has pushed version 5, and sends nothing meanwhile."""

    @asynccontextmanager
    async def between_transfers(self) -> AsyncIterator[None]:
        yield


class Elasticity:
    """A pool whose engines may join and leave."""

    def __init__(self, engines: Engines, tmp_path: Path, restarts: int = 0, free: int = 1) -> None:
        self.config = config_of(restarts)
        self.log = tmp_path / "faults"
        self.engines, self.faults = engines, FaultLog(self.log)
        self.pool, _ = make(engines)
        self.devices = Devices(len(engines.ranks), free)
        sync: Any = Sync()
        self.supervisor = Supervisor(
            self.pool, sync, engines.restart, self.faults, self.config, Restarts(self.config.cluster, now), {}, now
        )
        parts: Any = (self.devices, Inbox(tmp_path), self.faults, self.config)
        self.elastic = Elastic(self.pool, self.supervisor, *parts, clock=now)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Run the supervisor and `Elastic`, which asks no Ray."""
        with patch.object(elastic, "answer", ask_at_once):
            tasks = [asyncio.ensure_future(one) for one in (self.supervisor.run(1.0), self.elastic.run())]
            await let_tasks_run()
            try:
                yield
            finally:
                for one in tasks:
                    one.cancel()
                await asyncio.wait(tasks)

    @property
    def standings(self) -> dict[int, str]:
        return {engine: str(one.standing) for engine, one in self.pool.engines.members.of_engine.items()}

    def ask(self, number: int) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.pool.run_group(question(number), number))
