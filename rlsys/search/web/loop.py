"""An event loop on a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any number of threads. `close` it at the end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        """The result of `task`, or its exception. Must not be called from a coroutine of this loop."""
        return asyncio.run_coroutine_threadsafe(task, self._loop).result()

    async def result_of(self, task: Coroutine[Any, Any, T]) -> T:
        """The same as `run`, for a coroutine of another loop; cancelling it cancels `task`."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(task, self._loop))

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, run `last`, and end the thread."""
        self.run(self._cancel_all())
        self.run(last)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def abandon(self) -> None:
        """Cancel what runs and end the thread, without waiting for either."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
