"""Which groups' memory is on the devices, in a run whose groups share them. Pure asyncio.

Invariant: a member acquires only after everyone else who holds memory and is not needed has released it. A
member whose release or acquisition failed or was cut off counts as holding memory and as not ready, so the
next call finishes what was begun; members' calls must therefore bear being repeated.

Names that are not members are groups with devices of their own, always there: without members, as in a
disaggregated run, every call does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlsys.observe import status
from rlsys.observe.spans import Tracer

Switch = Callable[[], Awaitable[Mapping[str, Any] | None]]
"""Moves a group's memory; what it cost, as arguments of its span: bytes, rss_before, rss_after, ... May be repeated."""


class OffloadManager:
    """Moves groups that are colocated on and off the devices that they share."""

    def __init__(self, groups: Mapping[str, tuple[Switch, Switch]], tracer: Tracer) -> None:
        """`groups` are the offload and the restore of each. None is built yet: once one is, `built` has it make room."""
        self.step = 0
        self._groups = dict(groups)
        self._tracer = tracer
        self._holding: set[str] = set()
        self._ready: set[str] = set()
        self._switching = asyncio.Lock()

    @property
    def ready(self) -> frozenset[str]:
        """Members that are resident and can work."""
        return frozenset(self._ready)

    @property
    def holding(self) -> frozenset[str]:
        """Members that hold memory: those that are ready, and those whose last switch did not end."""
        return frozenset(self._holding)

    async def built(self, name: str) -> None:
        """Member `name` has just been built, and so is resident: release it."""
        async with self._switching:
            if name in self._groups:
                self._holding.add(name)
                await self._release(name)

    async def need(self, *names: str) -> None:
        """Make the members `names` ready, in this order, after all others have released their memory.

        Raises what a member raises; the call can be repeated, or another made.
        """
        async with self._switching:
            for name in self._groups:
                if name in self._holding and name not in names:
                    await self._release(name)
            for name in names:
                if name in self._groups and name not in self._ready:
                    await self._acquire(name)

    async def _release(self, name: str) -> None:
        self._ready.discard(name)
        await self._switch(name, 0, "leaves its devices", "switch.release")
        self._holding.discard(name)
        status.show("waits for its devices", f"{name}.devices")

    async def _acquire(self, name: str) -> None:
        self._holding.add(name)
        await self._switch(name, 1, "takes its devices", "switch.acquire")
        self._ready.add(name)

    async def _switch(self, name: str, which: int, text: str, span: str) -> None:
        timed = self._tracer.span(span, lane=name, step=self.step)
        with status.stage(text, f"{name}.devices", span=timed) as args:
            args.update(await self._groups[name][which]() or {})
