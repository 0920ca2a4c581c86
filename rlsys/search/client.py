"""The episodes' side of the search tool.

Contract: `search` never raises for a search that failed, it returns a result with a reason, so that one bad
request costs one observation and not a run. Searches that are asked within a few milliseconds travel as one
request. Cancelling one caller does not disturb the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, Self

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential_jitter,
)

from rlsys.errors import RunError, UserError
from rlsys.search.batcher import Batcher, BatcherClosed, QueueFull

_BUSY = (429, 502, 503, 504)
"""Answers of a server that may do better later."""
_MAX_PENDING = 1 << 20
_MAX_WAIT_S = 8.0
"""Longest wait between two tries."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage found."""

    id: str
    contents: str
    """`"title"\\ntext` by the corpus's convention."""
    score: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Passages, best first, or why there are none."""

    passages: tuple[Passage, ...] = ()
    error: str = ""
    """One sentence; empty for a search that worked."""


class _RejectedError(Exception):
    """The server says that the request is wrong; asking again changes nothing."""


class _BusyError(Exception):
    """The server says that it cannot answer now."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


BLANK = SearchResult(error="the query is empty")
"""What a query of white space alone finds; it is not sent."""


def as_sent(query: str) -> str:
    """`query` without white space around it, and without what UTF-8 cannot say."""
    return query.encode("utf-8", "replace").decode("utf-8").strip()


class SearchClient:
    """A client of one server, for one event loop.

    Args:
        url: of the server, e.g. http://127.0.0.1:8000. Proxies of the environment are not used.
        topk: passages a query.
        timeout_s: of one request.
        retries: further tries after a failed request, with growing, jittered waits.
        max_concurrent: requests in flight.
        coalesce_ms: how long a search waits for others to share its request.
        max_coalesced: most searches of one request; 1 sends each on its own.
    """

    def __init__(
        self,
        url: str,
        *,
        topk: int = 3,
        timeout_s: float = 30.0,
        retries: int = 3,
        max_concurrent: int = 64,
        coalesce_ms: float = 2.0,
        max_coalesced: int = 64,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"search url {url!r} is not an address: write it like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._topk = topk
        limits = httpx.Limits(max_connections=max_concurrent, max_keepalive_connections=max_concurrent)
        self._http = httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False)
        self._retries = retries
        self._batcher: Batcher[str, SearchResult] = Batcher(
            self._search_many,
            max_batch=max_coalesced,
            max_wait_s=coalesce_ms / 1000,
            max_running=max_concurrent,
            max_pending=_MAX_PENDING,
        )

    async def search(self, query: str) -> SearchResult:
        """Ask one query; a blank one is an error that is not sent."""
        query = as_sent(query)
        if not query:
            return BLANK
        try:
            (future,) = self._batcher.submit([query])
            return await future
        except BatcherClosed:
            return SearchResult(error="the search client is closed")
        except QueueFull:
            return SearchResult(error=f"{_MAX_PENDING} searches wait already")

    async def health(self) -> dict[str, Any]:
        """What the server says of itself. Raises RunError when it does not answer or is not well."""
        try:
            response = await self._http.get(f"{self.url}/health")
            response.raise_for_status()
            described = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RunError(f"the search server at {self.url} is not healthy: {_reason(error)}") from error
        if not isinstance(described, dict):
            raise RunError(f"the search server at {self.url} is not healthy: its answer is not an object")
        return described

    async def close(self) -> None:
        """End what is in flight, as an error result, and the connections."""
        await self._batcher.close()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _search_many(self, queries: list[str]) -> list[SearchResult]:
        """One result a query. Queries that were turned away together are asked one by one."""
        try:
            return [SearchResult(passages=found) for found in await self._post_with_retries(queries)]
        except _RejectedError as error:
            if len(queries) > 1:
                alone = await asyncio.gather(*(self._search_many([query]) for query in queries))
                return list(chain.from_iterable(alone))
            reason = str(error)
        except (httpx.HTTPError, _BusyError) as error:
            reason = f"no answer from {self.url} after {self._retries + 1} tries: {_reason(error)}"
        except _MalformedError as error:
            reason = f"{self.url} does not speak the retrieval contract: {error}"
        return [SearchResult(error=reason)] * len(queries)

    async def _post_with_retries(self, queries: Sequence[str]) -> list[tuple[Passage, ...]]:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._retries + 1),
            wait=_wait_s,
            retry=retry_if_exception_type((httpx.TransportError, _BusyError)),
            reraise=True,
        )
        return await retrying(self._post, queries)

    async def _post(self, queries: Sequence[str]) -> list[tuple[Passage, ...]]:
        body = {"queries": list(queries), "topk": self._topk, "return_scores": True}
        response = await self._http.post(f"{self.url}/retrieve", json=body)
        if response.status_code in _BUSY:
            raise _BusyError(_detail(response), _retry_after_s(response))
        if response.is_error:
            raise _RejectedError(_detail(response))
        return _parse(response, len(queries))


class _MalformedError(Exception):
    """The answer is not of the contract's shape."""


def _parse(response: httpx.Response, queries: int) -> list[tuple[Passage, ...]]:
    try:
        lines = response.json()["result"]
        found = [
            tuple(
                Passage(str(hit["document"]["id"]), str(hit["document"]["contents"]), float(hit["score"]))
                for hit in line
            )
            for line in lines
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise _MalformedError(f"{type(error).__name__}: {error}") from error
    if len(found) != queries:
        raise _MalformedError(f"{len(found)} results for {queries} queries")
    return found


def _wait_s(state: RetryCallState) -> float:
    """The back-off before the next try, and no less than the server asked for."""
    backoff_s = wait_exponential_jitter(multiplier=0.25, max=_MAX_WAIT_S, jitter=0.25)(state)
    error = state.outcome.exception() if state.outcome else None
    return max(backoff_s, error.retry_after_s) if isinstance(error, _BusyError) else backoff_s


def _retry_after_s(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "")
    return min(float(value), _MAX_WAIT_S) if value.isdigit() else 0.0


def _detail(response: httpx.Response) -> str:
    """The server's own sentence, where it gives one."""
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = response.text[:200]
    return f"status {response.status_code}: {detail}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
