"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, the same way each time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class HangError(Exception):
    """Every task waits, and nothing is left that could wake one."""


class _Clock(selectors.SelectSelector):
    """Instead of waiting for a timer, moves the time to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise HangError
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs timers in order without waiting; `HangError` instead of waiting for ever."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._clock.now


def now() -> float:
    """The running loop's time."""
    return asyncio.get_running_loop().time()


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a loop of its own; fails if it leaves a task behind."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(work)
        assert not asyncio.all_tasks(loop), "tasks were left running"
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
