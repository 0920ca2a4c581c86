"""Queries of many callers, batched, through the two stages of a retriever, in threads.

One thread prepares and up to `Retriever.parallel` threads find: while a batch is being found, the next one is
prepared. A batch keeps its place until a thread can find it, so at most one prepared batch waits, and a batch is
put together at the moment when preparing it can begin.

Invariant: an answer does not depend on what it was batched with. Queries with another `topk` are prepared and
found on their own, as an approximate index looks the further the more it is asked for; the rest is the retriever's
promise. A query that is in a batch twice is searched once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rlsys.search.batcher import Batcher
from rlsys.search.retriever import Hit, Retriever
from rlsys.search.server.limits import ServerLimits
from rlsys.search.server.metrics import Metrics

Ask = tuple[str, int]
"""A query and how many hits it wants."""
_PASSAGES_PER_ENTRY = 8


class _Group(NamedTuple):
    """Queries of a batch that want equally many hits."""

    topk: int
    queries: list[str]
    prepared: Any


class Retrieval:
    """Answers queries. Use within one event loop; `close` it at the end."""

    def __init__(self, retriever: Retriever, limits: ServerLimits, metrics: Metrics) -> None:
        self._retriever = retriever
        self._metrics = metrics
        self._prepare_thread = ThreadPoolExecutor(1, "prepare")
        self._find_threads = ThreadPoolExecutor(retriever.parallel, "find")
        self._may_find = asyncio.Semaphore(retriever.parallel)
        self._batcher: Batcher[Ask, list[Hit]] = Batcher(
            self._run,
            max_batch=limits.max_batch,
            max_wait_s=limits.max_wait_ms / 1000,
            max_running=1,
            max_pending=limits.max_pending,
        )
        self._cache = HitCache(limits.cache_entries)
        self.queries = 0
        self.cached = 0
        """Queries that needed no search."""

    @property
    def batches(self) -> int:
        """Batches started so far."""
        return self._batcher.batches

    @property
    def pending(self) -> int:
        """Queries that wait."""
        return self._batcher.pending

    async def find(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each query, in order. Raises what the retriever and `Batcher.submit` raise.

        Cancelling it drops the queries that no batch has taken yet.
        """
        found = {query: hits for query in queries if (hits := self._cache.get((query, topk))) is not None}
        missing = list(dict.fromkeys(query for query in queries if query not in found))
        futures = self._batcher.submit([(query, topk) for query in missing])
        self.queries += len(queries)
        self.cached += len(queries) - len(missing)
        # One query is the common request, and to gather costs more than to wait.
        answers = [await futures[0]] if len(futures) == 1 else await asyncio.gather(*futures)
        for query, hits in zip(missing, answers, strict=True):
            self._cache.put((query, topk), hits)
            found[query] = hits
        return [found[query] for query in queries]

    async def close(self) -> None:
        """Turn waiting callers away and end the threads; waits for the batches in them."""
        await self._batcher.close()
        for threads in (self._prepare_thread, self._find_threads):
            await asyncio.get_running_loop().run_in_executor(None, threads.shutdown)

    async def _run(self, asks: list[Ask]) -> list[list[Hit]]:
        loop = asyncio.get_running_loop()
        groups = await loop.run_in_executor(self._prepare_thread, self._prepare, asks)
        async with self._may_find:
            self._batcher.pass_on()
            return await loop.run_in_executor(self._find_threads, self._find, groups, asks)

    def _prepare(self, asks: list[Ask]) -> list[_Group]:
        self._metrics.batch(len(asks))
        by_topk: dict[int, dict[str, None]] = {}
        for query, topk in asks:
            by_topk.setdefault(topk, {})[query] = None
        with self._metrics.stage("prepare"):
            return [
                _Group(topk, list(queries), self._retriever.prepare(list(queries))) for topk, queries in by_topk.items()
            ]

    def _find(self, groups: list[_Group], asks: list[Ask]) -> list[list[Hit]]:
        found: dict[Ask, list[Hit]] = {}
        with self._metrics.stage("find"):
            for topk, queries, prepared in groups:
                lines = self._retriever.find(prepared, topk)
                found.update(zip(((query, topk) for query in queries), lines, strict=True))
        return [found[ask] for ask in asks]


class HitCache:
    """The hits of the queries asked last: of at most `entries`, and of eight passages an entry on average."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._hits: OrderedDict[Ask, list[Hit]] = OrderedDict()
        self._passages = 0

    def get(self, ask: Ask) -> list[Hit] | None:
        """The hits, if they are known."""
        hits = self._hits.get(ask)
        if hits is not None:
            self._hits.move_to_end(ask)
        return hits

    def put(self, ask: Ask, hits: list[Hit]) -> None:
        """Remember hits, and forget those that were not asked for the longest time."""
        self._passages += len(hits) - len(self._hits.pop(ask, ()))
        self._hits[ask] = hits
        while len(self._hits) > self._entries or self._passages > _PASSAGES_PER_ENTRY * self._entries:
            self._passages -= len(self._hits.popitem(last=False)[1])
