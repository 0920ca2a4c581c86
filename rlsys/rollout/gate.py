"""A gate: calls go through side by side; whoever closes it waits until all have left.

Contract: belongs to one event loop. While the gate is closed nobody enters, and those inside go on. It
opens again however the closing ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Open from the start."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._open.set()
        self._empty.set()
        self._closing = asyncio.Lock()
        self._inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Enter, once the gate is open, and leave at the end."""
        while not self._open.is_set():  # It may close between the event and this task's turn.
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Let nobody in and wait until nobody is inside; one caller after the other."""
        async with self._closing:
            self._open.clear()
            try:
                await self._empty.wait()
                yield
            finally:
                self._open.set()
