"""Provides the search server of a run: the server that the config names, a server started for the run, or none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rlsys.config.derived import needs_server
from rlsys.config.schema import SearchConfig
from rlsys.errors import RunError
from rlsys.rollout.tools.search_tool import open_client
from rlsys.search.address import TOKEN_VARIABLE
from rlsys.search.retrieval import Failure
from rlsys.search.server_process import SearchServer
from rlsys.search.web.loop import LoopThread

_RETRIES_AT_START = 1
"""Maximum number of retries in the check before a run starts: low, because a failure then loses no work."""


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

    async def require(self, setting: str = "search.url") -> None:
        """Check that the search server answers a query; no-op if the run needs none.

        Without this check, a run whose server has died would learn from failed searches. Raises RunError with the fix
        if no server answers, UserError if replicas serve different indexes. `setting` is the option by which the user
        names a server; the fix mentions it.
        """
        search = self.search
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


@contextmanager
def serving(search: SearchConfig, threads: int | None, log_dir: Path) -> Iterator[Serving]:
    """Start a server if one is needed and none is named; stop it on exit. It may be starting up when it is yielded."""
    if search.url is not None or not needs_server(search):
        yield Serving(search, None)
        return
    assert search.index is not None
    log = log_dir / "search.log"
    server = SearchServer(search.index, log, topk=search.topk, threads=threads, kind=search.index_kind)
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
