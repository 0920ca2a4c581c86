"""Waits for other processes, threads and tasks."""

import asyncio
import time
from collections.abc import Callable

HANG_S = 900.0
"""Time limit of a wait; it only ends a hang, also on a busy machine."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds. Raises TimeoutError after `HANG_S`."""
    until_s = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"the condition has not held for {HANG_S:g} s")
        time.sleep(0.02)


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop, and threads, run until `condition` holds. Raises TimeoutError after `HANG_S`."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.005)


async def let_tasks_run(turns: int = 100) -> None:
    """Let the event loop run for a number of turns, without time passing."""
    for _ in range(turns):
        await asyncio.sleep(0)
