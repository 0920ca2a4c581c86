"""Calls to the rollout engines, and which of them live.

Contract: an engine is dead once its process is, or once it answers not even a question for its metrics. It is
killed, struck off once, and asked nothing more; whoever waits for its answer is told at once. The death of an
engine is no error to those who tell all of them something, while one lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from rlsys.cluster.worker_group import RankDied, RankSilent, WorkerGroup
from rlsys.errors import RunError
from rlsys.orchestrator.pipeline.routing import NoEngineLeft, Router
from rlsys.rollout.liveness import EngineDied

PING_TIMEOUT_S = 30.0
"""For an engine that has kept a call too long to answer anything at all."""

_log = logging.getLogger(__name__)


class Engines:
    """The workers of all engines. Belongs to the event loop in which it is made."""

    def __init__(self, workers: WorkerGroup, router: Router, on_death: Callable[[Mapping[str, str]], None]) -> None:
        """`on_death` is told of the groups that are lost with an engine, by key: why."""
        self.workers = workers
        self.last_words = ""
        """Why the engine that died last did, and what it last wrote."""
        self._router = router
        self._on_death = on_death
        loop = asyncio.get_running_loop()
        self._gone: tuple[asyncio.Future[str], ...] = tuple(loop.create_future() for _ in workers.ranks)
        """Done when an engine is dead: why."""

    @property
    def living(self) -> tuple[int, ...]:
        """Engines that are not known to be dead, by their rank in the group."""
        return self._router.living

    def bury(self, engine: int, death: RunError) -> None:
        """Strike a dead engine off, once; all who wait for its answers learn of it, and move on."""
        if engine not in self.living:
            return
        why = str(death).partition("\n")[0]
        self.last_words = f"{why}\n{self.workers.log_tail(engine)}"
        self.workers.kill_rank(engine)
        orphans = self._router.died(engine)
        _log.warning(
            "rollout engine %d is dead, %d live: %d of its groups run again, %d are lost. %s",
            engine, len(self.living), len(orphans.again), len(orphans.lost), why,
        )  # fmt: skip
        self._gone[engine].set_result(why)
        self._on_death(orphans.lost)

    async def tell_all(self, method: str, *args: Any) -> dict[int, Any]:
        """Call `method` on all living engines at once; the answers of those that still live then."""
        return await self.each(lambda engine: self.tell(engine, method, *args))

    async def each(
        self, do: Callable[[int], Coroutine[Any, Any, dict[int, Any]]], engines: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """`do` for all living engines, or for `engines`, at once; what it returns, joined. Raises the first failure.

        Raises NoEngineLeft if none lives afterwards.
        """
        asked = self.living if engines is None else engines
        tasks = [asyncio.ensure_future(do(engine)) for engine in asked]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            await _end(*tasks)
        if not self.living:
            raise NoEngineLeft(f"every rollout engine has died. The last one: {self.last_words}")
        return {engine: answer for found in answers for engine, answer in found.items()}

    async def tell(self, engine: int, method: str, *args: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """The engine and its answer; nothing if it has died, which is not an error while others live."""
        try:
            return {engine: await self.ask(engine, method, *args, timeout_s=timeout_s)}
        except (RankDied, EngineDied) as death:
            self.bury(engine, death)
            return {}

    async def ask(self, engine: int, method: str, *args: Any, timeout_s: float | None) -> Any:
        """What the engine answers. Raises RankSilent if it is late but alive, else EngineDied or RankDied."""
        try:
            return await self.answer(engine, method, *args, timeout_s=timeout_s)
        except RankSilent as late:
            try:
                await self.answer(engine, "metrics", timeout_s=PING_TIMEOUT_S)
            except RankSilent:
                raise EngineDied(f"engine {engine} answers nothing any more: {late}") from late
            raise

    async def answer(self, engine: int, method: str, *args: Any, timeout_s: float | None) -> Any:
        """What the engine answers. Raises EngineDied as soon as it is known to be dead, RankSilent if it is late."""
        gone = self._gone[engine]

        def require() -> None:
            if gone.done():
                raise EngineDied(gone.result())

        async def call() -> Any:
            require()  # It may have died in the turn of the loop in which this task was made.
            return await self.workers.call_rank(engine, method, *args, timeout_s=timeout_s)

        require()
        calling = asyncio.ensure_future(call())
        try:
            await asyncio.wait({calling, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                require()
            return calling.result()
        finally:
            await _end(calling)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what is not done, and wait until it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
