"""A server over a provider of web search as a child process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlsys.search.address import DEFAULT_HOST
from rlsys.search.server_process import SearchServer, child_environment


class WebServer(SearchServer):
    """A handle of `rlsys search web` over `provider`, under the contract of `SearchServer`.

    It answers with `topk` results and writes to `log`; `options` are its further flags.
    """

    def __init__(self, provider: str, log: str | Path, *, topk: int, options: Sequence[str] = ()) -> None:
        words = ["rlsys.apps.cli.main", "search", "web", provider, "--topk", str(topk), *options]
        self._start(words, log, DEFAULT_HOST, 0, child_environment())
