"""The search server of a run: one that the config names, one that is started for the run, or none at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rlsys.config.derived import needs_server
from rlsys.config.schema import SearchConfig
from rlsys.errors import RunError
from rlsys.search.address import TOKEN_VARIABLE
from rlsys.search.launch import SearchServer
from rlsys.search.tool import open_client


class Serving:
    """Where searches go. `search` is the config with the server's address in it."""

    def __init__(self, search: SearchConfig, server: SearchServer | None) -> None:
        self._own = server
        self.search = search
        if server is not None:
            # A server takes its token from the environment that it shares with this process, if there is one.
            token_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else None
            self.search = replace(search, url=server.url, token_env=token_env)

    def wait_healthy(self) -> None:
        """Wait until a server that was started here answers. Raises RunError if it does not in time."""
        if self._own is not None:
            self._own.wait_healthy(self.search.start_timeout_s)

    async def require(self) -> None:
        """Raise RunError unless a server answers a query, where one is needed, UserError if two differ.

        Without this a run whose server has died would go on, and learn from failed searches.
        """
        search = self.search
        if not needs_server(search):
            return
        async with open_client(search, topk=1) as client:
            result = await client.search("Is anybody there?")
            if result.error:
                raise RunError(
                    f"the search server at search.url={search.url} does not answer: {result.error}"
                )
            if search.replicas:
                await client.health()

    @property
    def started(self) -> bool:
        """Whether the server was started here, and so may not answer yet."""
        return self._own is not None


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
