"""Shares processor cores between the workers of a simulated run, for runs whose workers have no devices of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of the machine that all workers of a run share."""

    count: float
    used: Mapping[str, float]
    """Worker group -> cores that one of its workers keeps busy while it works alone."""


class SharedCores:
    """Slows all workers down equally while they want more cores than there are. Without `cores`, nothing is slowed."""

    def __init__(self, cores: Cores | None) -> None:
        self._cores = cores
        self._working: dict[Hashable, float] = {}
        """Worker -> cores that it wants."""
        self.slowdown = 1.0
        """Seconds in which a second's work is done."""
        self._changed = asyncio.Event()
        self.listeners: list[Callable[[], None]] = []
        """Called after the slowdown has changed."""

    def mark(self, worker: Hashable, group: str, works: bool) -> None:
        """Record whether a worker of `group` works; idempotent."""
        if self._cores is None or (worker in self._working) is works:
            return
        if works:
            self._working[worker] = self._cores.used.get(group, 1.0)
        else:
            del self._working[worker]
        slowdown = max(1.0, sum(self._working.values()) / self._cores.count)
        if slowdown != self.slowdown:
            self.slowdown = slowdown
            self._changed.set()
            self._changed = asyncio.Event()
            for listener in self.listeners:
                listener()

    async def work(self, worker: Hashable, group: str, seconds: float) -> None:
        """Wait until a worker of `group` has done work that takes it `seconds` alone."""
        if self._cores is None:
            await asyncio.sleep(seconds)
            return
        loop = asyncio.get_running_loop()
        self.mark(worker, group, True)
        try:
            while seconds > 0:
                begun, slowdown, changed = loop.time(), self.slowdown, self._changed
                try:
                    async with asyncio.timeout(seconds * slowdown):
                        await changed.wait()
                except TimeoutError:
                    return
                seconds -= (loop.time() - begun) / slowdown
        finally:
            self.mark(worker, group, False)
