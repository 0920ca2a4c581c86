"""Runs an event loop in a separate thread, for synchronous callers and for code that may block or exit.

Invariant: a task that raises SystemExit ends alone. asyncio would end the loop, and with it every other task.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines submitted from any thread. `close` it at the end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        """Run `task` and return its result or raise its exception. Never call it from this loop."""
        return asyncio.run_coroutine_threadsafe(task, self._loop).result()

    async def result_of(self, task: Coroutine[Any, Any, T]) -> T:
        """Await `task` from another event loop; cancellation is passed on to `task`."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(task, self._loop))

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel all tasks, run `last` and stop the thread."""
        self.run(self._cancel_all())
        self.run(last)
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def abandon(self) -> None:
        """Cancel all tasks and stop the thread, without waiting."""
        self._loop.call_soon_threadsafe(self._stop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            while not self._stopped:
                with suppress(SystemExit, KeyboardInterrupt):  # The task keeps it for whoever awaits the task.
                    runner.get_loop().run_forever()

    def _stop(self) -> None:
        self._stopped = True
        self._loop.stop()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
