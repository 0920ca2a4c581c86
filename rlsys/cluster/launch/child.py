"""A command of rlsys as a child process, awaited without blocking, and certainly ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from rlsys.cluster.tether import tethered
from rlsys.search.server_process import child_environment

PATIENCE_S = 60.0
"""For a command that is told to end: a run closes what it has opened."""


@asynccontextmanager
async def rlsys_command(arguments: Sequence[str]) -> AsyncIterator[Process]:
    """Run `rlsys` with `arguments`, its output where ours goes; on the way out it is ended, gently if it can be.

    It leads a process group, so that Ctrl-C reaches it through us alone, once, and is told to end if we are killed.
    """
    process = await asyncio.create_subprocess_exec(
        *tethered([sys.executable, "-m", "rlsys.apps.cli.main", *arguments]),
        stdin=DEVNULL,
        env=child_environment(),
        process_group=0,
    )
    try:
        yield process
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), PATIENCE_S)
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
