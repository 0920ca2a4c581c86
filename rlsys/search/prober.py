"""Asks replicas for their health: all of them at the start, and those that failed until they are well again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rlsys.errors import RunError, UserError
from rlsys.search.replicas import Replica, Replicas, State, differences, listed, served
from rlsys.search.wire import NoReplyError, Wire, health_of

_TIMEOUT_S = 3.0
_log = logging.getLogger(__name__)


class Prober:
    """Background probes of one event loop. Of a single server nothing is probed: it is asked in any case."""

    def __init__(self, replicas: Replicas, wire: Wire) -> None:
        self._replicas = replicas
        self._wire = wire
        self._look: asyncio.Task[None] | None = None
        self._probing: dict[Replica, asyncio.Task[None]] = {}

    async def looked(self) -> None:
        """Wait until each replica was probed once, so that none is searched that serves something else."""
        if len(self._replicas.all) > 1:
            self._look = self._look or asyncio.create_task(self._look_around())
            await asyncio.shield(self._look)

    def watch(self, replica: Replica) -> None:
        """See that `replica` is probed until it is healthy, if it is not."""
        if replica.state is State.healthy or replica in self._probing or len(self._replicas.all) == 1:
            return
        task = asyncio.create_task(self._probe_until_healthy(replica))
        self._probing[replica] = task
        task.add_done_callback(lambda done: self._ended(replica, done))

    async def health(self, timeout_s: float) -> dict[str, Any]:
        """What the first server that answers says of itself; those that do not are warned of.

        Raises RunError when none answers or is well, UserError when two serve different things.
        """
        urls = [replica.url for replica in self._replicas.all]
        asked = await asyncio.gather(*(self._health(url, timeout_s) for url in urls), return_exceptions=True)
        well: dict[str, dict[str, Any]] = {}
        for url, health in zip(urls, asked, strict=True):
            if isinstance(health, dict):
                well[url] = health
            elif isinstance(health, RunError):
                _log.warning("%s", health)
            else:
                raise health
        if not well:
            raise RunError("; ".join(map(str, asked)))
        (first_url, first), *others = well.items()
        for url, health in others:
            keys = differences(served(first), served(health))
            if keys:
                here, there = (listed({key: one[key] for key in keys}) for one in (first, health))
                raise UserError(
                    f"the search servers serve different things, {first_url} {here} and {url} {there}: give only "
                    "urls of replicas of one index"
                )
        return first

    async def close(self) -> None:
        """End all probes."""
        tasks = [*self._probing.values(), *filter(None, [self._look])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_around(self) -> None:
        healths = await asyncio.gather(*map(self._probe, self._replicas.all))
        for replica, health in zip(self._replicas.all, healths, strict=True):
            self._replicas.probed(replica, health)
            self.watch(replica)

    async def _probe_until_healthy(self, replica: Replica) -> None:
        while replica.state is not State.healthy:
            await asyncio.sleep(self._replicas.probe_after_s(replica))
            self._replicas.probed(replica, await self._probe(replica))

    async def _probe(self, replica: Replica) -> dict[str, Any] | None:
        """The health of `replica`; None where it does not answer or is not well."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return health_of(await self._wire.get(f"{replica.url}/health"))
        except (TimeoutError, NoReplyError):
            return None

    async def _health(self, url: str, timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._wire.get(f"{url}/health")
        except (TimeoutError, NoReplyError) as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise RunError(f"the search server at {url} is not healthy: {reason}") from error
        health = health_of(reply)
        if not health:
            raise RunError(f"the search server at {url} is not healthy: status {reply.status}, or not an object")
        return health

    def _ended(self, replica: Replica, task: asyncio.Task[None]) -> None:
        del self._probing[replica]
        if not task.cancelled() and task.exception() is not None:
            _log.error("the probes of %s ended", replica.url, exc_info=task.exception())
