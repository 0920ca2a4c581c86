"""The search tool of a rollout worker, as its config says: a client of a server, or a cassette before it."""

from __future__ import annotations

from pathlib import Path

from rlsys.config.derived import needs_server
from rlsys.config.schema import SearchConfig
from rlsys.errors import UserError
from rlsys.search.cassette import CassetteTool
from rlsys.search.client import SearchClient


def open_tool(search: SearchConfig) -> SearchClient | CassetteTool:
    """The tool of one worker process.

    Raises UserError where a server is needed and `search.url` is null, for a cassette that cannot be played
    with these settings, and for one that `record` finds there already. So all processes that record together
    open their tools before the first search.
    """
    cassette = search.cassette
    if cassette.path is None:
        return _client(search)
    client = _client(search) if needs_server(search) else None
    return CassetteTool(Path(cassette.path), cassette.mode, cassette.latency_scale, search.topk, client)


def search_metrics(tool: SearchClient | CassetteTool) -> dict[str, float]:
    """What a cassette was good for since the start; nothing for a client alone."""
    if isinstance(tool, SearchClient):
        return {}
    counts = tool.counts
    return {
        "search_hits": counts.hits,
        "search_misses": counts.misses,
        "search_recorded": counts.recorded,
    }


def _client(search: SearchConfig) -> SearchClient:
    if search.url is None:
        raise UserError("search.url is null, so a rollout worker has no server; start one and name it.")
    return SearchClient(
        search.url,
        topk=search.topk,
        timeout_s=search.timeout_s,
        retries=search.retries,
        max_concurrent=search.max_concurrent,
    )
