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
from dataclasses import dataclass
from typing import Protocol

from rlsys.observe.spans import Tracer
from rlsys.orchestrator.pipeline.workers import Say, silent

Figures = Mapping[str, float]
"""What a switch cost, as arguments of its span: bytes, rss_before, rss_after, ..."""


class Member(Protocol):
    """A group that can leave its devices and come back. Calling either again does no harm."""

    async def release(self) -> Figures | None:
        """Leave the devices' memory."""

    async def acquire(self) -> Figures | None:
        """Take it again; the group can work when this returns."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A member made of a group's own calls, such as `offload` and `restore`, or `sleep` and `wake`."""

    leave: Callable[[], Awaitable[Figures | None]]
    enter: Callable[[], Awaitable[Figures | None]]

    async def release(self) -> Figures | None:
        """See `Member`."""
        return await self.leave()

    async def acquire(self) -> Figures | None:
        """See `Member`."""
        return await self.enter()


class Residence:
    """Moves members on and off the devices that they share."""

    def __init__(
        self, members: Mapping[str, Member], tracer: Tracer, say: Callable[[str], Say] = lambda _: silent
    ) -> None:
        """No member is built yet: once one is, `built` has it make room for the next.

        `say` gives each member a voice, "actor.devices" for the actor.
        """
        self.step = 0
        self._say = {name: say(f"{name}.devices") for name in members}
        self._members = dict(members)
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
            if name in self._members:
                self._holding.add(name)
                await self._release(name)

    async def need(self, *names: str) -> None:
        """Make the members `names` ready, in this order, after all others have released their memory.

        Raises what a member raises; the call can be repeated, or another made.
        """
        async with self._switching:
            for name in self._members:
                if name in self._holding and name not in names:
                    await self._release(name)
            for name in names:
                if name in self._members and name not in self._ready:
                    await self._acquire(name)

    async def _release(self, name: str) -> None:
        self._ready.discard(name)
        self._say[name]("leaves its devices")
        with self._tracer.span("switch.release", lane=name, step=self.step) as args:
            args.update(await self._members[name].release() or {})
        self._holding.discard(name)
        self._say[name]("waits for its devices")

    async def _acquire(self, name: str) -> None:
        self._holding.add(name)
        self._say[name]("takes its devices")
        with self._tracer.span("switch.acquire", lane=name, step=self.step) as args:
            args.update(await self._members[name].acquire() or {})
        self._say[name]("")
        self._ready.add(name)
