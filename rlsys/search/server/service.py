"""What stands between HTTP and a retriever: limits, a cache, batching over clients, one worker thread.

Invariants: the retriever is called by one thread and never by the event loop's; a query that is asked
again, or twice in a batch, is searched once; a caller waits at most `request_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlsys.search.batcher import Batcher, BatcherClosed, QueueFull
from rlsys.search.retriever import Hit, Retriever

Ask = tuple[str, int]
"""A query and how many hits it wants."""


class Overloaded(Exception):
    """The server cannot answer now; the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server takes on."""

    max_topk: int = 100
    max_queries: int = 4096
    """Queries of one request: a whole training batch of an upstream client fits."""
    max_query_chars: int = 8192
    max_body_bytes: int = 64 * 1024 * 1024
    max_pending: int = 16384
    """Queries of all clients that may wait; more are turned away."""
    max_batch: int = 128
    """Queries encoded and searched together."""
    max_wait_ms: float = 2.0
    """How long a query waits for others while the worker is idle."""
    request_timeout_s: float = 120.0
    cache_entries: int = 16384
    """Queries whose hits are kept."""


class SearchService:
    """Answers queries of many callers at once. Use within one event loop; `close` it at the end."""

    def __init__(self, retriever: Retriever, limits: ServerLimits) -> None:
        self._retriever = retriever
        self._limits = limits
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retriever")
        self._batcher: Batcher[Ask, list[Hit]] = Batcher(
            self._search_in_thread,
            max_batch=limits.max_batch,
            max_wait_s=limits.max_wait_ms / 1000,
            max_running=1,
            max_pending=limits.max_pending,
        )
        self._cache = _HitCache(limits.cache_entries)
        self._queries = 0
        self._cached = 0

    async def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Hits of each query, in order. Raises Overloaded when the queue is full or the time is over."""
        found = {query: hits for query in queries if (hits := self._cache.get((query, topk))) is not None}
        missing = list(dict.fromkeys(query for query in queries if query not in found))
        self._queries += len(queries)
        self._cached += len(queries) - len(missing)
        try:
            futures = self._batcher.submit([(query, topk) for query in missing])
            async with asyncio.timeout(self._limits.request_timeout_s):
                answers = await asyncio.gather(*futures)
        except QueueFull:
            raise Overloaded(f"{self._batcher.pending} queries wait already: try again later") from None
        except BatcherClosed:
            raise Overloaded("the server is shutting down") from None
        except TimeoutError:
            raise Overloaded(f"no answer within {self._limits.request_timeout_s:g} s: try again") from None
        for query, hits in zip(missing, answers, strict=True):
            self._cache.put((query, topk), hits)
            found[query] = hits
        return [found[query] for query in queries]

    def health(self) -> dict[str, Any]:
        """What is served and how much has been asked so far."""
        described: Mapping[str, Any] = self._retriever.describe()
        return {
            "status": "ok",
            **described,
            "queries": self._queries,
            "cached": self._cached,
            "batches": self._batcher.batches,
            "pending": self._batcher.pending,
        }

    async def close(self) -> None:
        """Turn waiting callers away and end the worker; waits for the batch that runs."""
        await self._batcher.close()
        await asyncio.get_running_loop().run_in_executor(None, self._worker.shutdown)

    async def _search_in_thread(self, asks: list[Ask]) -> list[list[Hit]]:
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._search, asks)

    def _search(self, asks: list[Ask]) -> list[list[Hit]]:
        queries = list(dict.fromkeys(query for query, _ in asks))
        hits = self._retriever.find(self._retriever.prepare(queries), max(topk for _, topk in asks))
        by_query = dict(zip(queries, hits, strict=True))
        return [by_query[query][:topk] for query, topk in asks]


class _HitCache:
    """The hits of the queries asked last."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._hits: OrderedDict[Ask, list[Hit]] = OrderedDict()

    def get(self, ask: Ask) -> list[Hit] | None:
        hits = self._hits.get(ask)
        if hits is not None:
            self._hits.move_to_end(ask)
        return hits

    def put(self, ask: Ask, hits: list[Hit]) -> None:
        self._hits[ask] = hits
        if len(self._hits) > self._entries:
            self._hits.popitem(last=False)
