"""Opens the search tool of a config: a client of the search servers, or a cassette that records or replays answers.

An episode whose search no server has answered would teach the policy that searching fails. `RequiredSearch` ends such an
episode, so that the driver can run its prompt group again once a server answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from rlsys.config.derived import needs_server
from rlsys.config.problems import token_of
from rlsys.config.schema import SearchConfig
from rlsys.errors import UserError
from rlsys.search.cassette import CassetteTool
from rlsys.search.client import SearchClient
from rlsys.search.retrieval import Failure, PageResult, SearchFailed, SearchResult

Result = TypeVar("Result", SearchResult, PageResult)
_OUTAGE = (Failure.unavailable, Failure.denied)
"""Failures for which no query is to blame."""


class RequiredSearch:
    """Search tool that raises SearchFailed where `tool` returns that no server answers."""

    def __init__(self, tool: SearchClient | CassetteTool) -> None:
        self._tool = tool

    async def search(self, query: str) -> SearchResult:
        """Search; failures for which the query is to blame are returned."""
        return _required(await self._tool.search(query))

    async def access(self, url: str) -> PageResult:
        """Return a page; failures for which the URL is to blame are returned. A cassette has no pages."""
        assert isinstance(self._tool, SearchClient)
        return _required(await self._tool.access(url))


def _required(result: Result) -> Result:
    """Return a result of the server. Raises SearchFailed if there is none, because no server answers."""
    if result.failure in _OUTAGE:
        raise SearchFailed(result.error)
    return result


def open_tool(search: SearchConfig) -> SearchClient | CassetteTool:
    """Open the search tool of one worker process.

    If several processes record to one cassette, all must open the tool before the first search. Raises UserError if a
    server is needed and `search.url` is null, if a cassette does not fit these settings, and if mode `record` finds an
    existing cassette.
    """
    cassette = search.cassette
    if cassette.path is None:
        return open_client(search, topk=search.topk)
    client = open_client(search, topk=search.topk) if needs_server(search) else None
    return CassetteTool(Path(cassette.path), cassette.mode, cassette.latency_scale, search.topk, client)


def for_run(tool: SearchClient | CassetteTool, search: SearchConfig) -> SearchClient | CassetteTool | RequiredSearch:
    """Return the tool with which the episodes of a run search. A replayed cassette may answer with recorded failures."""
    return RequiredSearch(tool) if needs_server(search) else tool


def search_metrics(tool: SearchClient | CassetteTool) -> dict[str, float]:
    """Return totals since the start: of the cassette if there is one, else of the client."""
    if isinstance(tool, CassetteTool):
        kept = tool.counts
        return {"search_hits": kept.hits, "search_misses": kept.misses, "search_recorded": kept.recorded}
    counts = tool.counts
    return {
        "search_requests": counts.requests,
        "search_retries": counts.retries,
        "search_failovers": counts.failovers,
        "search_hedges": counts.hedges,
        "search_hedges_won": counts.hedges_won,
        **{f"search_failed_{kind.value}": number for kind, number in counts.failures.items()},
    }


def open_client(search: SearchConfig, *, topk: int) -> SearchClient:
    """Return a client of the configured servers. Raises UserError if `search.url` or the token is missing."""
    if search.url is None:
        raise UserError(
            "search.url is null, so a rollout worker has no search server: start one and set search.url.",
            code="missing",
            key="search.url",
        )
    token = token_of("search.token_env", search.token_env)
    return SearchClient(
        [search.url, *search.replicas],
        topk=topk,
        timeout_s=search.timeout_s,
        retries=search.retries,
        max_concurrent=search.max_concurrent,
        hedge_after_s=search.hedge_after_s,
        token=token,
    )
