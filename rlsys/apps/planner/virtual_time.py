"""Event loop with a virtual clock that jumps to the next timer: fast, and the same every time. For simulations and tests."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

MOST_TURNS = 1_000_000
"""Largest number of turns of a loop; work that needs more counts as endless."""


def _nothing() -> None:
    pass


class HangError(Exception):
    """Raised if all tasks wait and nothing can wake one of them."""


class EndlessError(Exception):
    """Raised if tasks keep waking each other."""


class _Clock(selectors.SelectSelector):
    """Selector that advances the virtual time to the next timer instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns_left = MOST_TURNS
        self.on_idle: Callable[[], None] = _nothing

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns_left -= 1
        if self.turns_left < 0:
            raise EndlessError
        if timeout is None:
            raise HangError
        if timeout > 0:
            self.on_idle()
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that runs timers in order without waiting. Raises HangError instead of waiting forever."""

    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)
        self.failures: list[BaseException] = []
        """Errors of callbacks, which asyncio would only log."""
        self.set_exception_handler(self._note)

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self.clock.now

    def end_tasks(self) -> None:
        """Cancel all tasks, and abandon those that still do not end."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        self.clock.turns_left, self.clock.on_idle = MOST_TURNS, _nothing
        with suppress(HangError, EndlessError):
            self.run_until_complete(asyncio.wait(tasks))

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(context.get("exception") or RuntimeError(context["message"]))


def now() -> float:
    """Time of the running loop in seconds."""
    return asyncio.get_running_loop().time()


def run_virtually(
    work: Coroutine[Any, Any, T], most_turns: int = MOST_TURNS, on_idle: Callable[[], None] = _nothing
) -> T:
    """Run `work` on a new loop. Raises AssertionError if it leaves a task behind.

    `on_idle` is called whenever all tasks wait and the time advances; an exception from it ends the run.
    """
    loop = VirtualLoop()
    loop.clock.turns_left, loop.clock.on_idle = most_turns, on_idle
    try:
        result = loop.run_until_complete(work)
        assert not asyncio.all_tasks(loop), "tasks were left running"
        for failure in loop.failures:
            raise failure
        return result
    finally:
        if asyncio.all_tasks(loop):
            loop.end_tasks()
        loop.close()
