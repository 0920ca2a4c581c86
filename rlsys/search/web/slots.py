"""Slots of a stage that is shared by requests, and the order in which they are given."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """A semaphore of one event loop: a free slot goes to the lowest rank, within a rank to who came first.

    With the position of a page in its request as its rank, no request waits for the later pages of another.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def held(self, rank: int = 0) -> AsyncIterator[None]:
        """Waits for a slot, and gives it back."""
        await self._take(rank)
        try:
            yield
        finally:
            self._give()

    async def _take(self, rank: int) -> None:
        if self._free:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        waiting = (rank, next(self._arrivals), given)
        heapq.heappush(self._waiting, waiting)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it was given before the cancellation arrived
                self._give()
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
            raise

    def _give(self) -> None:
        while self._waiting:
            *_, given = heapq.heappop(self._waiting)
            if not given.cancelled():
                given.set_result(None)
                return
        self._free += 1
