"""Running a coroutine to its end from the command line, interruptible at any time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlsys.errors import Interrupted

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; Ctrl-C, SIGTERM and the loss of the terminal cancel it; `Interrupted` is raised once it has closed all.

    The loss of the terminal is nothing where it is ignored already, as under nohup.
    """

    async def supervised() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            loop.add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        raise Interrupted("Interrupted; what was known is in the run's folder.") from None
