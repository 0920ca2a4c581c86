"""A bounded channel between two stages: first in, first out, with back-pressure.

Invariants: at most `capacity` items wait; `put` then waits for a reader; items come out once each, in
order; after `close` readers get what is left, then `ChannelClosed`. Runs on asyncio and nothing else,
so that it can be tested under any clock and interleaving.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ChannelClosed(Exception):
    """Nothing more will come."""


class Channel(Generic[T]):
    """A named queue of at most `capacity` items."""

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"channel {name} needs a capacity of at least 1, not {capacity}")
        self.name = name
        self.capacity = capacity
        self._items: deque[T] = deque()
        self._closed = False
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T) -> None:
        """Append `item`, waiting while the channel is full."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or len(self._items) < self.capacity)
            if self._closed:
                raise ChannelClosed(self.name)
            self._items.append(item)
            self._changed.notify_all()

    async def get_some(self, most: int) -> list[T]:
        """Wait for one item, then take what is there, at most `most`; `ChannelClosed` at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._items)
            if not self._items:
                raise ChannelClosed(self.name)
            taken = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            self._changed.notify_all()
            return taken

    async def close(self) -> None:
        """No more items; wakes every waiter."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
