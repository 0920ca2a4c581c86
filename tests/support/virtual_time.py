"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, the same way each time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")

MOST_TURNS = 1_000_000
"""Turns of one loop; work that needs more does not come to an end."""


def _nothing() -> None:
    pass


class HangError(Exception):
    """Every task waits, and nothing is left that could wake one."""


class EndlessError(Exception):
    """Tasks wake each other without end."""


class _Clock(selectors.SelectSelector):
    """Instead of waiting for a timer, moves the time to it."""

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
    """Runs timers in order without waiting; `HangError` instead of waiting for ever."""

    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)
        self.failures: list[BaseException] = []
        """Errors of callbacks, which would only be logged."""
        self.set_exception_handler(self._note)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.clock.now

    def end_tasks(self) -> None:
        """Cancel what is left; what then still hangs is let go."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        self.clock.turns_left, self.clock.on_idle = MOST_TURNS, _nothing
        with suppress(HangError, EndlessError):
            self.run_until_complete(asyncio.wait(tasks))

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(context.get("exception") or RuntimeError(context["message"]))


def now() -> float:
    """The running loop's time."""
    return asyncio.get_running_loop().time()


def run_virtually(
    work: Coroutine[Any, Any, T], most_turns: int = MOST_TURNS, on_idle: Callable[[], None] = _nothing
) -> T:
    """Run `work` on a loop of its own; fails if it leaves a task behind.

    `on_idle` is called whenever all tasks wait and time moves on; what it raises ends the run.
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


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a loop of its own, in virtual time."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        run_virtually(test(*arguments, **fixtures))

    return run
