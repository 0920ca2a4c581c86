"""Which version of the weights every engine has, and which engines are set aside from rollouts.

All engines stage a new version as it comes. At the switch those that are set aside are passed over: they keep
the version that they have until they are put back.

Invariants:
- Engines that are set aside together have one version, and keep it.
- An engine that a switch has passed over gets no rollouts before it has that version or a later one. Once it
  is put back it takes what it has staged; if a newer version is being staged by then, it waits for that one.
- Nobody waits for ever for an engine that is behind: it catches up, waits for a switch that is on its way, or dies.
- Updates of one engine follow each other: the next one begins when a switch that is under way has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rlsys.errors import RunError
from rlsys.orchestrator.groups.engines import Engines
from rlsys.orchestrator.pipeline.routing import NoEngineLeft, Router


class Switching:
    """Belongs to the event loop in which it is made."""

    def __init__(self, engines: Engines, router: Router, advance: Callable[[], None]) -> None:
        """`advance` is called when engines take groups again."""
        self.versions: dict[int, int] = {}
        """By engine; none for one that has had no update."""
        self._engines, self._router, self._advance = engines, router, advance
        self._whole = asyncio.Lock()
        """Held while the group switches, and while engines are chosen: they are then all of one version."""
        self._own = [asyncio.Lock() for _ in engines.workers.ranks]
        """Held while an engine begins an update, or makes up for a switch."""
        self._staged: dict[int, tuple[int, str]] = {}
        """Engines that a switch has passed over -> its version and digest, until the next update begins."""
        self._behind: set[int] = set()
        """Engines that a switch has passed over, until one does not."""
        self._catching_up: set[asyncio.Task[None]] = set()

    async def begin_update(self, version: int) -> None:
        """Announce `version` to all engines; what they have staged is forgotten."""

        async def begin(engine: int) -> dict[int, Any]:
            async with self._own[engine]:
                self._staged.pop(engine, None)
                return await self._engines.tell(engine, "begin_update", version)

        await self._engines.each(begin)

    async def finish_update(self, version: int, digest: str) -> None:
        """Let every engine that is not set aside switch; each gets groups again as soon as it has."""
        async with self._whole:
            aside = self._router.aside
            self._behind |= aside
            self._staged = self._staged | dict.fromkeys(aside, (version, digest))
            switching = [engine for engine in self._engines.living if engine not in aside]
            for engine in switching:
                self._router.close(engine)
            try:
                await self._engines.each(lambda engine: self._switch(engine, version, digest), switching)
            finally:
                self._reopen(*switching)

    async def set_aside(self, count: int) -> tuple[int, ...]:
        """Take `count` engines out of rollouts, those with the fewest episodes; what runs on them goes on.

        Waits for a switch that is under way. Fewer are taken if fewer have the newest version, or if none would
        be left for rollouts; but at least one. Raises NoEngineLeft if none lives.
        """
        async with self._whole:
            living = self._engines.living
            if not living:
                raise NoEngineLeft(f"every rollout engine has died. The last one: {self._engines.last_words}")
            newest = max(self.versions.get(engine, -1) for engine in living)
            fit = [engine for engine in living if self.versions.get(engine, -1) == newest]
            taken = sorted(fit, key=self._router.load)[: min(count, max(1, len(living) - 1))]
            for engine in taken:
                self._router.set_aside(engine)
                self._router.reopen(engine)  # It may have been behind; for answers it is as good as any.
            return tuple(taken)

    async def put_back(self, engines: Sequence[int]) -> None:
        """End `set_aside`. Engines that are behind roll again once they have caught up, which this waits for.

        They catch up also where the caller is cancelled. One that refuses the version is given up for dead.
        """
        for engine in engines:
            if engine in self._behind:
                self._router.close(engine)
            self._router.put_back(engine)
        self._advance()
        tasks = [asyncio.ensure_future(self._catch_up(engine)) for engine in engines if engine in self._staged]
        self._catching_up |= set(tasks)
        for task in tasks:
            task.add_done_callback(self._catching_up.discard)
        await asyncio.shield(asyncio.gather(*tasks))

    async def _catch_up(self, engine: int) -> None:
        async with self._own[engine]:
            if engine not in self._staged:
                return
            try:
                await self._switch(engine, *self._staged.pop(engine))
            except RunError as refusal:
                self._engines.bury(engine, refusal)

    async def _switch(self, engine: int, version: int, digest: str) -> dict[int, Any]:
        answer = await self._engines.tell(engine, "finish_update", version, digest)
        self.versions |= dict.fromkeys(answer, version)
        self._behind.discard(engine)
        self._reopen(engine)
        return answer

    def _reopen(self, *engines: int) -> None:
        for engine in engines:
            self._router.reopen(engine)
        self._advance()
