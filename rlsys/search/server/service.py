"""Serves search requests independently of the protocol: retrieves, reranks and fetches pages, within limits.

Pipeline: one thread runs `Retriever.prepare`, and up to `Retriever.parallel` threads run `Retriever.find`, so one batch
is prepared while others are searched. A prepared batch waits for a free find thread, and no other batch is
prepared meanwhile, so at most one waits. A batch is assembled when its preparation starts.

Invariants:

- Computation and blocking reads never run on the event loop.
- A caller waits at most `request_timeout_s`.
- Every failure is a `RequestRefused`: 4xx for invalid requests, 429 for full queues, 503 for temporary faults.
- A response does not depend on its batch. Queries are grouped by `topk`, because the search depth of an approximate
  index depends on `topk`.
- A query that occurs twice in a batch is searched once.
- Reranking scores a query only against its own documents; ties keep their order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlsys.errors import RunError, UserError
from rlsys.search.dynamic_batching import Batcher, BatcherClosed, QueueFull
from rlsys.search.retrieval import Hit, PageSource, Retriever
from rlsys.search.server.contract import (
    AccessRequest,
    RequestRefused,
    RerankRequest,
    RetrieveRequest,
    ServerLimits,
    bare,
    text_of,
)

if TYPE_CHECKING:
    from rlsys.search.encoders.encoder import Reranker

NO_RERANKER = "this server has no reranker: start it with one (--reranker MODEL)"
NO_PAGES = "this server has no pages: start it with a file of them (--pages FILE)"
TALLIES = {
    "queries": "Queries received, cached ones included.",
    "cached": "Queries answered from the cache.",
    "batches": "Batches of queries searched.",
    "pairs": "Pairs of query and document scored.",
}  # counters in `SearchService.tallies`, with their help text
LEVELS = {"pending": "Queries waiting to be searched.", "pending_pairs": "Pairs waiting to be scored."}
"""Gauges in `SearchService.tallies`, with their help text."""
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_PASSAGES_PER_ENTRY = 8
_log = logging.getLogger("uvicorn.error")
Answer = TypeVar("Answer")
Ask = tuple[str, int]  # query and its topk
Pair = tuple[str, str]  # query and text
Ranked = list[list[tuple[float, Any]]]  # (score, document) pairs of each query, best first


class Metrics(Collector):
    """Prometheus metrics of one application, in a separate registry, so that two applications can share a process."""

    def __init__(self) -> None:
        self.tallies: Callable[[], Mapping[str, int]] = dict
        """Returns the current `TALLIES` and `LEVELS`; called at each scrape."""
        self._registry = registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=registry)
        registry.register(self)
        self._requests = Counter(
            "rlsys_search_requests", "Requests that have ended.", ["path", "status"], registry=registry
        )
        seconds: dict[str, Any] = {"buckets": _SECONDS, "registry": registry}
        about = "Time from a request's headers to the end of its answer."
        self._request_seconds = Histogram("rlsys_search_request_seconds", about, ["path"], **seconds)
        about = "Time of a batch in a stage: prepare (queries are encoded), find, rerank, pages."
        self._stage_seconds = Histogram("rlsys_search_stage_seconds", about, ["stage"], **seconds)
        about = "Number of queries in a batch."
        self.batch_queries = Histogram("rlsys_search_batch_queries", about, buckets=_SIZES, registry=registry)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a completed request."""
        self._requests.labels(path, str(status)).inc()
        self._request_seconds.labels(path).observe(seconds)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of a batch; thread-safe."""
        with self._stage_seconds.labels(name).time():
            yield

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the tallies as metric families; called by the registry."""
        numbers = self.tallies()
        for family, described in ((CounterMetricFamily, TALLIES), (GaugeMetricFamily, LEVELS)):
            for name in described.keys() & numbers:
                yield family(f"rlsys_search_{name}", described[name], value=numbers[name])


@dataclass(eq=False)
class SearchService:
    """Handles concurrent requests. For one event loop; `close` it at the end."""

    retriever: Retriever
    topk: int
    limits: ServerLimits
    metrics: Metrics
    reranker: Reranker | None = None
    pages: PageSource | None = None

    def __post_init__(self) -> None:
        self._retrieval = _Retrieval(self.retriever, self.limits, self.metrics)
        self._reranking = None if self.reranker is None else _Reranking(self.reranker, self.limits, self.metrics)
        self._began = time.monotonic()
        self.metrics.tallies = self.tallies

    async def retrieve(self, asked: RetrieveRequest) -> list[list[Any]]:
        """Return the passages of each query, with scores if requested. Raises RequestRefused."""
        topk, queries, most = asked.topk or self.topk, asked.queries, self.limits.max_passages
        if len(queries) * topk > most:
            reason = f"queries: {len(queries)} with topk {topk} are too many passages; send fewer, for at most {most}"
            raise RequestRefused(422, reason)
        found: Sequence[Sequence[tuple[float, Any]]]
        if not asked.rerank:
            found = await self._answer(self._retrieval.find(queries, topk))
        elif self._reranking is None:
            raise RequestRefused(422, "rerank: this server has no reranker; leave it out, or start the server with one")
        else:
            found = await self._answer(self._retrieve_reranked(self._reranking, queries, topk))
        return _lines(found, asked.return_scores)

    async def rerank(self, asked: RerankRequest) -> list[list[Any]]:
        """Return the best documents of each query, with scores if requested. Raises RequestRefused."""
        if self._reranking is None:
            raise RequestRefused(404, NO_RERANKER)
        if len(asked.documents) != len(asked.queries):
            reason = f"documents: {len(asked.documents)} lists for {len(asked.queries)} queries; send one for each"
            raise RequestRefused(422, reason)
        texts = [[text_of(document) or "" for document in line] for line in asked.documents]
        self._check_pairs(sum(map(len, texts)))
        ranked = await self._answer(self._reranking.rank(asked.queries, texts))
        documents = [[doc if isinstance(doc, str) else bare(doc) for doc in line] for line in asked.documents]
        return _lines(_in_order(documents, ranked, asked.rerank_topk or self.topk), asked.return_scores)

    async def access(self, asked: AccessRequest) -> list[Mapping[str, Any] | None]:
        """Return the page of each URL, or None. Raises RequestRefused."""
        if self.pages is None:
            raise RequestRefused(404, NO_PAGES)
        return await self._answer(self._fetch(self.pages, asked.urls))

    def health(self) -> dict[str, Any]:
        """Return the body of /health: the retriever's description, settings and counters."""
        return {
            "status": "ok",
            **self.retriever.describe(),
            "topk": self.topk,
            "reranker": None if self.reranker is None else dict(self.reranker.describe()),
            "pages": self.pages is not None,
            "uptime_s": round(time.monotonic() - self._began, 1),
            **self.tallies(),
        }

    def tallies(self) -> dict[str, int]:
        """Return the values of `TALLIES` and `LEVELS`."""
        found, ranked = self._retrieval, self._reranking
        queries = {"queries": found.queries, "cached": found.cached, "batches": found.batcher.batches}
        pairs = (0, 0) if ranked is None else (ranked.pairs, ranked.batcher.pending)
        return queries | {"pending": found.batcher.pending, "pairs": pairs[0], "pending_pairs": pairs[1]}

    async def close(self) -> None:
        """Reject waiting callers, wait for the current batches, and stop the threads."""
        await self._retrieval.close()
        if self._reranking is not None:
            await self._reranking.close()

    async def _retrieve_reranked(self, reranking: _Reranking, queries: Sequence[str], topk: int) -> Ranked:
        candidates = max(topk, self.limits.rerank_candidates)
        self._check_pairs(len(queries) * candidates)
        found = await self._retrieval.find(queries, candidates)
        texts = [[str(hit.document.get("contents", "")) for hit in line] for line in found]
        ranked = await reranking.rank(queries, texts)
        return _in_order([[hit.document for hit in line] for line in found], ranked, topk)

    def _check_pairs(self, pairs: int) -> None:
        most = self.limits.max_pending_pairs
        if pairs > most:
            raise RequestRefused(422, f"queries: {pairs} pairs to rerank are too many; send fewer, for at most {most}")

    async def _fetch(self, pages: PageSource, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        with self.metrics.stage("pages"):
            found = await pages.fetch(urls)
        if len(found) != len(urls):
            raise ValueError(f"{len(urls)} URLs gave {len(found)} pages")
        return found

    async def _answer(self, work: Awaitable[Answer]) -> Answer:
        """Return the result of `work` within `request_timeout_s`. Converts every failure to RequestRefused."""
        try:
            async with asyncio.timeout(self.limits.request_timeout_s) as time_limit:
                return await work
        except RequestRefused:
            raise
        except QueueFull:
            waiting = ", ".join(f"{key}: {self.tallies()[key]}" for key in LEVELS)
            raise RequestRefused(429, f"the queue is full ({waiting}): try again later") from None
        except BatcherClosed:
            raise RequestRefused(503, "the server is shutting down") from None
        except (UserError, RunError) as error:
            raise RequestRefused(503, f"the search failed: {error}") from None
        except Exception as error:  # noqa: BLE001  a bug in a retriever must not end as a bare 500
            if time_limit.expired():
                raise RequestRefused(503, f"no answer within {self.limits.request_timeout_s:g} s: try again") from None
            _log.exception("a search failed")
            raise RequestRefused(503, f"the search failed ({type(error).__name__}): see the server's log") from None


def _lines(found: Sequence[Sequence[tuple[float, Any]]], with_scores: bool) -> list[list[Any]]:
    """Format (score, document) pairs as lists of a response."""
    if with_scores:
        return [[{"document": document, "score": score} for score, document in line] for line in found]
    return [[document for _, document in line] for line in found]


def _in_order(documents: Sequence[Sequence[Any]], ranked: list[list[tuple[int, float]]], topk: int) -> Ranked:
    """Return (score, document) of the `topk` best documents of each query, in the order of `ranked`."""
    return [
        [(score, line[place]) for place, score in order[:topk]] for line, order in zip(documents, ranked, strict=True)
    ]


class _Retrieval:
    """Batches queries through the two stages of a retriever."""

    def __init__(self, retriever: Retriever, limits: ServerLimits, metrics: Metrics) -> None:
        self._retriever, self._metrics = retriever, metrics
        self._prepare_thread = ThreadPoolExecutor(1, "prepare")
        self._find_threads = ThreadPoolExecutor(retriever.parallel, "find")
        self._may_find = asyncio.Semaphore(retriever.parallel)
        self.batcher: Batcher[Ask, list[Hit]] = Batcher(
            self._run, limits.max_batch, limits.max_wait_ms / 1000, max_running=1, max_pending=limits.max_pending
        )
        self._cache = HitCache(limits.cache_entries)
        self.queries = self.cached = 0  # queries received, and those answered from the cache or as duplicates

    async def find(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return up to `topk` hits per query. Cancellation drops the queries that have not started."""
        found = {query: hits for query in queries if (hits := self._cache.get((query, topk))) is not None}
        missing = list(dict.fromkeys(query for query in queries if query not in found))
        futures = self.batcher.submit([(query, topk) for query in missing])
        self.queries += len(queries)
        self.cached += len(queries) - len(missing)
        # Most requests have a single query, for which a plain await is cheaper than gather.
        answers = [await futures[0]] if len(futures) == 1 else await asyncio.gather(*futures)
        for query, hits in zip(missing, answers, strict=True):
            self._cache.put((query, topk), hits)
            found[query] = hits
        return [found[query] for query in queries]

    async def close(self) -> None:
        await self.batcher.close()
        for threads in (self._prepare_thread, self._find_threads):
            await asyncio.get_running_loop().run_in_executor(None, threads.shutdown)

    async def _run(self, asks: list[Ask]) -> list[list[Hit]]:
        loop = asyncio.get_running_loop()
        groups = await loop.run_in_executor(self._prepare_thread, self._prepare, asks)
        async with self._may_find:
            self.batcher.pass_on()
            return await loop.run_in_executor(self._find_threads, self._find, groups, asks)

    def _prepare(self, asks: list[Ask]) -> list[tuple[int, list[str], Any]]:
        """Group the queries by topk; return (topk, queries, prepared queries) of each group."""
        self._metrics.batch_queries.observe(len(asks))
        by_topk: dict[int, dict[str, None]] = {}
        for query, topk in asks:
            by_topk.setdefault(topk, {})[query] = None
        with self._metrics.stage("prepare"):
            return [(topk, list(asked), self._retriever.prepare(list(asked))) for topk, asked in by_topk.items()]

    def _find(self, groups: list[tuple[int, list[str], Any]], asks: list[Ask]) -> list[list[Hit]]:
        found: dict[Ask, list[Hit]] = {}
        with self._metrics.stage("find"):
            for topk, queries, prepared in groups:
                lines = self._retriever.find(prepared, topk)
                found.update(zip(((query, topk) for query in queries), lines, strict=True))
        return [found[ask] for ask in asks]


class _Reranking:
    """Batches (query, document) pairs of many requests and scores them in one thread."""

    def __init__(self, reranker: Reranker, limits: ServerLimits, metrics: Metrics) -> None:
        self._reranker, self._metrics = reranker, metrics
        self._thread = ThreadPoolExecutor(1, "rerank")
        wait_s, most = limits.max_wait_ms / 1000, limits.max_pending_pairs
        self.batcher: Batcher[Pair, float] = Batcher(
            self._run, limits.max_pair_batch, wait_s, max_running=1, max_pending=most
        )
        self.pairs = 0

    async def rank(self, queries: Sequence[str], texts: Sequence[Sequence[str]]) -> list[list[tuple[int, float]]]:
        """Return (index of the text, score) of each query's texts, best first; ties keep their order."""
        pairs = [(query, text) for query, line in zip(queries, texts, strict=True) for text in line]
        scores: Iterator[float] = iter(await asyncio.gather(*self.batcher.submit(pairs)))
        self.pairs += len(pairs)
        lines = [list(islice(scores, len(line))) for line in texts]
        return [sorted(enumerate(line), key=lambda ranked: -ranked[1]) for line in lines]

    async def close(self) -> None:
        await self.batcher.close()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _run(self, pairs: list[Pair]) -> list[float]:
        def score() -> list[float]:
            with self._metrics.stage("rerank"):
                return list(self._reranker.scores(pairs))

        return await asyncio.get_running_loop().run_in_executor(self._thread, score)


class HitCache:
    """LRU cache of hits, limited to `entries` queries and to eight passages per entry on average."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._hits: OrderedDict[Ask, list[Hit]] = OrderedDict()
        self._passages = 0

    def get(self, ask: Ask) -> list[Hit] | None:
        if (hits := self._hits.get(ask)) is not None:
            self._hits.move_to_end(ask)
        return hits

    def put(self, ask: Ask, hits: list[Hit]) -> None:
        """Store hits and evict the least recently used ones beyond the limits."""
        self._passages += len(hits) - len(self._hits.pop(ask, ()))
        self._hits[ask] = hits
        while len(self._hits) > self._entries or self._passages > _PASSAGES_PER_ENTRY * self._entries:
            self._passages -= len(self._hits.popitem(last=False)[1])
