"""Running a coroutine to its end from the command line, interruptible at any time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlsys.errors import Interrupted

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; Ctrl-C and SIGTERM cancel it, so that what it opened is closed, then `Interrupted` is raised."""

    async def supervised() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        raise Interrupted("Interrupted; what was known is in the run's folder.") from None
