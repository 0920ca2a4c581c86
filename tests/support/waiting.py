"""Waits until a condition holds. There is no time limit: pytest's own, of an hour, ends a hang and shows where it is."""

import asyncio
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop, and threads, run until `condition` holds."""
    while not condition():
        await asyncio.sleep(0.005)


async def let_tasks_run(turns: int = 100) -> None:
    """Let the event loop run for a number of turns, independent of the clock."""
    for _ in range(turns):
        await asyncio.sleep(0)
