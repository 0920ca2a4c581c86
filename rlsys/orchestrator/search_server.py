"""Provides the search server of a run: the server that the config names, a server started for the run, or none.

`SearchOutages` lets a run outlast a server that dies, hangs or cannot be reached: the run pauses until a server answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.config.derived import needs_server
from rlsys.config.schema import SearchConfig
from rlsys.errors import RunError, UserError
from rlsys.observe import status
from rlsys.observe.faults import FaultKind, FaultLog, Outcome, Restarts
from rlsys.rollout.tools.search_tool import open_client
from rlsys.search.address import TOKEN_VARIABLE
from rlsys.search.retrieval import Failure
from rlsys.search.server_process import SearchServer
from rlsys.search.web.loop import LoopThread

_RETRIES_AT_START = 1
"""Maximum number of retries in the check before a run starts: low, because a failure then loses no work."""
WATCH_S = 1.0
"""Interval of checks whether the process of the run's own server lives."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
"""Pause between two questions to a named server that does not answer; it doubles from the first to the last."""
PART = "search server"
"""Name in the records of faults."""
_log = logging.getLogger(__name__)


class Serving:
    """Search server of a run. `search` is the search config with the server's address filled in."""

    def __init__(self, search: SearchConfig, server: SearchServer | None) -> None:
        """`server` is the server started for the run, None if there is none."""
        self._server = server
        self.search = search
        if server is not None:
            # The server inherits the environment of this process, including the token.
            token_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else None
            self.search = replace(search, url=server.url, token_env=token_env)

    @property
    def started(self) -> bool:
        """True if the server was started for the run, so it may still be starting up."""
        return self._server is not None

    def wait_healthy(self) -> None:
        """Block until a server started for the run answers; no-op otherwise. Raises RunError on time-out."""
        if self._server is not None:
            self._server.wait_healthy(self.search.start_timeout_s)

    async def is_healthy(self, timeout_s: float) -> bool:
        """Return True if the server started for the run answers. Raises RunError if its process has ended."""
        return self._server is None or await asyncio.to_thread(self._server.is_healthy, timeout_s)

    async def restart(self) -> None:
        """Restart the server started for the run, at the same address; it may still be starting up on return."""
        if self._server is not None:
            await asyncio.to_thread(self._server.restart)

    async def require(self, setting: str = "search.url", retries: int | None = None) -> None:
        """Check that the search server answers a query; no-op if the run needs none.

        Raises RunError with the fix if no server answers, UserError if replicas serve different indexes. `setting` is the
        option by which the user names a server; the fix mentions it. `retries` replaces `search.retries`.
        """
        search = self.search if retries is None else replace(self.search, retries=retries)
        if not needs_server(search):
            return
        async with open_client(search, topk=1) as client:
            result = await client.search("Is anybody there?")
            if result.error:
                raise RunError(
                    f"the search server at search.url={search.url} does not answer: {result.error.rstrip('.')}; "
                    f"{self._remedy(result.failure, setting)}."
                )
            if search.replicas:
                await client.health()

    def _remedy(self, failure: Failure | None, setting: str) -> str:
        """Return the fix to suggest for `failure`."""
        if self._server is not None:
            return f"its log {self._server.log} may say why"
        if failure is Failure.unavailable:
            return f"start it with `rlsys search serve`, or name another with {setting}"
        if failure is Failure.denied:
            variable = self.search.token_env or TOKEN_VARIABLE
            return f"export the server's token as {variable}, and give search.token_env that name"
        return f"name another with {setting}"


class SearchOutages:
    """Pauses a run while its search server does not answer. Bound to the event loop that calls it.

    During an outage, `available`, `failed` and `check` block until a server answers, and the run says what it waits for. A
    server that the run started is restarted at its address; a named one is asked again with growing pauses. If the outage
    lasts longer than `search.outage_s`, or the server has failed too often, all of them raise the same RunError.
    """

    def __init__(self, serving: Serving, restarts: Restarts, faults: FaultLog) -> None:
        self.count = 0
        """Outages since the start."""
        self._serving, self._restarts, self._faults = serving, restarts, faults
        self._limit_s = serving.search.outage_s
        self._recovery: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """Block until the server that the run started answers for the first time. Raises RunError on time-out."""
        await asyncio.to_thread(self._serving.wait_healthy)

    async def available(self) -> None:
        """Block while there is an outage."""
        if self._recovery is not None:
            await asyncio.shield(self._recovery)

    async def check(self) -> None:
        """Ask the server, and block until it answers."""
        await self.available()
        try:
            await self._serving.require()
        except RunError as problem:
            await self._outlast(await self._kind(), problem)

    async def failed(self, cause: str) -> bool:
        """Block until the server answers, after a search failed because of `cause`.

        Return False if it answers at once.
        """
        if self._recovery is not None and not self._recovery.done():
            await self.available()
            return True
        try:
            await self._serving.require(retries=0)
        except RunError as problem:
            _log.info("a search failed: %s", cause)
            await self._outlast(await self._kind(), problem)
            return True
        return False

    async def watch(self) -> None:
        """Restart the server that the run started soon after it dies or hangs, until cancelled; no-op for a named server.

        It hangs if it does not answer /health twice in a row, each time within `search.timeout_s`.
        """
        silent = 0
        while self._serving.started:
            await asyncio.sleep(WATCH_S)
            await self.available()
            timeout_s = self._serving.search.timeout_s
            try:
                healthy = await self._serving.is_healthy(timeout_s)
            except RunError as death:
                await self._outlast(FaultKind.died, death)
                continue
            silent = 0 if healthy else silent + 1
            if silent == 2:
                await self._outlast(FaultKind.hung, _silent(timeout_s))
                silent = 0

    async def close(self) -> None:
        """End a recovery that is running; idempotent."""
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)

    async def _kind(self) -> FaultKind:
        """Return the kind of failure of a server that does not answer a query."""
        if not self._serving.started:
            return FaultKind.unreachable
        try:
            await self._serving.is_healthy(WATCH_S)
        except RunError:
            return FaultKind.died
        return FaultKind.hung

    async def _outlast(self, kind: FaultKind, cause: RunError) -> None:
        """Block until the server answers again; the first caller starts the recovery."""
        if self._recovery is None or (self._recovery.done() and self._recovery.exception() is None):
            self.count += 1
            self._recovery = asyncio.create_task(self._recover(kind, cause))
        await self.available()

    async def _recover(self, kind: FaultKind, cause: RunError) -> None:
        why = str(cause).partition("\n")[0].rstrip(".:")
        pauses = "; the run pauses until it answers again" if self._limit_s else ""
        fault = self._faults.begin(PART, kind, f"{why}{pauses}.")
        try:
            if self._limit_s == 0:
                raise cause
            status.show(f"waits until it answers again (at most {self._limit_s:g} s)", "search")
            async with asyncio.timeout(self._limit_s):
                how = await (self._restarted(cause) if self._serving.started else self._returned())
        except TimeoutError:
            self._faults.end(fault, Outcome.given_up, f"no answer within {self._limit_s:g} s")
            raise RunError(f"{why}; search.outage_s={self._limit_s:g} s have passed since then.") from cause
        except (RunError, UserError) as end:
            self._faults.end(fault, Outcome.given_up, str(end).partition("\n")[0])
            raise
        finally:
            status.show("", "search")
        self._faults.end(fault, Outcome.recovered, how)

    async def _returned(self) -> str:
        """Ask the named server until it answers."""
        pause_s = FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            with suppress(RunError):
                await self._serving.require(retries=0)
                return "answers again"

    async def _restarted(self, cause: RunError) -> str:
        """Restart the run's own server until it answers. Raises RunError with `cause` after too many restarts."""
        while self._restarts.take():
            await self._serving.restart()
            with suppress(RunError, TimeoutError):
                async with asyncio.timeout(self._serving.search.start_timeout_s):
                    while not await self._serving.is_healthy(WATCH_S):
                        await asyncio.sleep(WATCH_S)
                    await self._serving.require(retries=_RETRIES_AT_START)
                    return "was restarted"
        times = f"cluster.restarts={self._restarts.limit} times within cluster.restart_window_s"
        raise RunError(f"the search server has failed more than {times}: {cause}") from cause


def _silent(timeout_s: float) -> RunError:
    return RunError(f"the search server does not answer /health within search.timeout_s={timeout_s:g} s")


@contextmanager
def serving(search: SearchConfig, threads: int | None, log_dir: Path) -> Iterator[Serving]:
    """Start a server if one is needed and none is named; stop it on exit. It may be starting up when it is yielded."""
    if search.url is not None or not needs_server(search):
        yield Serving(search, None)
        return
    assert search.index is not None
    log = log_dir / "search.log"
    how: dict[str, Any] = {"topk": search.topk, "threads": threads, "kind": search.index_kind, "pages": search.pages}
    server = SearchServer(search.index, log, **how)
    try:
        yield Serving(search, server)
    finally:
        server.close()


def require_named(search: SearchConfig) -> None:
    """Check the server at `search.url` with few retries, raising as `Serving.require` does; no-op without a URL.

    Synchronous, and safe inside a running event loop (a notebook). An interrupt does not wait for the response.
    """
    if search.url is None:
        return
    serving = Serving(replace(search, retries=min(search.retries, _RETRIES_AT_START)), None)
    loop = LoopThread("search-check")
    try:
        loop.run(serving.require())
    finally:
        loop.abandon()


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Suppress warnings of the logger `name` for the body, which reports the same problem as an error."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
