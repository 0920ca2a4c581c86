"""The search server of a run: one that the config names, one that is started for the run, or none at all."""

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
"""Few: a run that has begun loses its work with the server, one that has not can be started again."""


class Serving:
    """Where searches go. `search` is the config with the server's address in it."""

    def __init__(self, search: SearchConfig, server: SearchServer | None) -> None:
        """`server` is one that was started for the run."""
        self._server = server
        self.search = search
        if server is not None:
            # A server takes its token from the environment that it shares with this process, if there is one.
            token_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else None
            self.search = replace(search, url=server.url, token_env=token_env)

    @property
    def started(self) -> bool:
        """Whether the server was started here, and so may not answer yet."""
        return self._server is not None

    def wait_healthy(self) -> None:
        """Wait until a server that was started here answers. Raises RunError if it does not in time."""
        if self._server is not None:
            self._server.wait_healthy(self.search.start_timeout_s)

    async def require(self, setting: str = "search.url") -> None:
        """Raise RunError with what to do unless a server answers a query, where one is needed, UserError if two differ.

        `setting` is what the user names a server with. Without this a run whose server has died would go on, and learn
        from failed searches.
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
        """What to do about a server that fails so."""
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
    """Start a server if one is needed and none is named; end it on the way out. It may not answer yet."""
    if search.url is not None or not needs_server(search):
        yield Serving(search, None)
        return
    assert search.index is not None
    server = SearchServer(search.index, log_dir / "search.log", topk=search.topk, threads=threads)
    try:
        yield Serving(search, server)
    finally:
        server.close()


def require_named(search: SearchConfig) -> None:
    """Raise as `Serving.require` does unless the server that `search` names, if it does, answers now.

    For what is no coroutine, also where a loop runs already, as in a notebook. An interrupt does not wait for the answer.
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
    """Without the warnings of the logger `name`: what they are about is said in a sentence of its own."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
