"""Lines of standard input as they come, without stopping the event loop that the engine runs in.

The descriptor stays blocking, since a terminal shares it with what is written to; it is read when it is said to hold
something. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

_MOST_BYTES = 1 << 16


async def lines_of(descriptor: int) -> AsyncIterator[str]:
    """Every line without its end, the last one too where it has none. What is not UTF-8 is replaced."""
    held = b""
    while more := await _read(descriptor):
        *whole, held = (held + more).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if held:
        yield held.decode("utf-8", "replace").rstrip("\r")


async def _read(descriptor: int) -> bytes:
    """What there is, once there is any; empty at the end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:  # A file, which always has something or its end.
        return os.read(descriptor, _MOST_BYTES)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, _MOST_BYTES)
