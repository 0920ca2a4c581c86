"""Waiting on processes that may die: an answer, or an error that says they are gone. Never a hang.

SGLang's own watchdog signals the main thread, which in a Ray worker runs no Python: nobody would hear it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import psutil

from rlsys.errors import RunError

T = TypeVar("T")
POLL_S = 0.5


class EngineDied(RunError):
    """An engine is gone although the process that drives it may live: one sentence that says which."""


class Liveness:
    """Watches `processes` from construction to `stop`; belongs to one running event loop."""

    def __init__(self, name: str, processes: Sequence[psutil.Process]) -> None:
        self._name = name
        self._processes = processes
        self._death = asyncio.create_task(self._watch())

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`. Raises EngineDied, and cancels it, as soon as a process is gone."""
        task = asyncio.ensure_future(call)
        try:
            await self.first_of(task)
            return task.result()
        finally:
            task.cancel()

    async def first_of(self, task: asyncio.Task[Any]) -> None:
        """Wait until `task` has ended, in whatever way. Raises EngineDied if a process is gone before."""
        await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise EngineDied(f"{self._name} died: its process {self._death.result()} is gone.")

    def stop(self) -> None:
        """Watch no more."""
        self._death.cancel()

    async def _watch(self) -> int:
        """The id of the first process that is gone."""
        while True:
            for process in self._processes:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    return process.pid
            await asyncio.sleep(POLL_S)
