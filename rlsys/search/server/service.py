"""What a server does for a request, whatever the protocol: retrieve, rerank, fetch pages, within limits and time.

Invariants: nothing that computes or reads runs on the event loop; a caller waits at most `request_timeout_s`; what
goes wrong is a `Refused` (the request's fault), a `Busy` (too much at once) or an `Unavailable` (no answer now).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from rlsys.errors import RunError, UserError
from rlsys.search.batcher import BatcherClosed, QueueFull
from rlsys.search.page_store import PageSource
from rlsys.search.retriever import Hit, Retriever
from rlsys.search.server.contract import (
    AccessRequest,
    Document,
    Refused,
    RerankRequest,
    RetrieveRequest,
    bare,
    text_of,
)
from rlsys.search.server.limits import ServerLimits
from rlsys.search.server.metrics import Metrics
from rlsys.search.server.reranking import Reranking, Scorer
from rlsys.search.server.retrieval import Retrieval

NO_RERANKER = "this server has no reranker: start it with one (--reranker MODEL)"
NO_PAGES = "this server has no pages: start it with a file of them (--pages FILE)"
_log = logging.getLogger("uvicorn.error")
Answer = TypeVar("Answer")


class Unavailable(Exception):
    """The server cannot answer now; the same request may succeed later."""


class Busy(Exception):
    """Too much is asked at once; the same request may succeed a little later."""


class SearchService:
    """Answers requests of many callers at once. Use within one event loop; `close` it at the end."""

    def __init__(
        self,
        retriever: Retriever,
        topk: int,
        limits: ServerLimits,
        metrics: Metrics,
        *,
        reranker: Scorer | None = None,
        pages: PageSource | None = None,
    ) -> None:
        self._retriever = retriever
        self._topk = topk
        self._limits = limits
        self._metrics = metrics
        self._retrieval = Retrieval(retriever, limits, metrics)
        self._reranking = None if reranker is None else Reranking(reranker, limits, metrics)
        self._pages = pages
        self._began = time.monotonic()
        metrics.watch(self.tallies)

    async def retrieve(self, asked: RetrieveRequest) -> list[list[Any]]:
        """Passages of each query: documents, or documents with scores."""
        topk = asked.topk or self._topk
        if len(asked.queries) * topk > self._limits.max_passages:
            raise Refused(
                422,
                f"queries: {len(asked.queries)} with topk {topk} are too many passages; "
                f"send fewer, for at most {self._limits.max_passages}",
            )
        if not asked.rerank:
            found = await self._answer(self._retrieval.find(asked.queries, topk))
        elif self._reranking is None:
            raise Refused(422, "rerank: this server has no reranker; leave it out, or start the server with one")
        else:
            found = await self._answer(self._retrieve_reranked(self._reranking, asked.queries, topk))
        if asked.return_scores:
            return [[{"document": hit.document, "score": hit.score} for hit in line] for line in found]
        return [[hit.document for hit in line] for line in found]

    async def rerank(self, asked: RerankRequest) -> list[list[Any]]:
        """The best documents of each query: alone, or with scores."""
        if self._reranking is None:
            raise Refused(404, NO_RERANKER)
        if len(asked.documents) != len(asked.queries):
            raise Refused(
                422,
                f"documents: {len(asked.documents)} lists for {len(asked.queries)} queries; send one for each",
            )
        texts = [[text_of(document) or "" for document in own] for own in asked.documents]
        self._check_pairs(sum(map(len, texts)))
        ranked = await self._answer(self._reranking.rank(asked.queries, texts))
        topk = asked.rerank_topk or self._topk
        best = [
            [(_unwrapped(own[place]), score) for place, score in line[:topk]]
            for own, line in zip(asked.documents, ranked, strict=True)
        ]
        if asked.return_scores:
            return [[{"document": document, "score": score} for document, score in line] for line in best]
        return [[document for document, _ in line] for line in best]

    async def access(self, asked: AccessRequest) -> list[Mapping[str, Any] | None]:
        """The page of each URL, or None."""
        if self._pages is None:
            raise Refused(404, NO_PAGES)
        return await self._answer(self._fetch(self._pages, asked.urls))

    def health(self) -> dict[str, Any]:
        """What is served and how much has been asked so far."""
        return {
            "status": "ok",
            **self._retriever.describe(),
            "topk": self._topk,
            "reranker": None if self._reranking is None else dict(self._reranking.describe()),
            "pages": self._pages is not None,
            "uptime_s": round(time.monotonic() - self._began, 1),
            **self.tallies(),
        }

    def tallies(self) -> dict[str, int]:
        """How much has been asked, and how much waits."""
        return {
            "queries": self._retrieval.queries,
            "cached": self._retrieval.cached,
            "batches": self._retrieval.batches,
            "pending": self._retrieval.pending,
            "pairs": 0 if self._reranking is None else self._reranking.pairs,
            "pending_pairs": 0 if self._reranking is None else self._reranking.pending,
        }

    async def close(self) -> None:
        """Turn waiting callers away and end the threads; waits for what runs in them."""
        await self._retrieval.close()
        if self._reranking is not None:
            await self._reranking.close()

    async def _retrieve_reranked(self, reranking: Reranking, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        candidates = max(topk, self._limits.rerank_candidates)
        self._check_pairs(len(queries) * candidates)
        found = await self._retrieval.find(queries, candidates)
        texts = [[str(hit.document.get("contents", "")) for hit in line] for line in found]
        ranked = await reranking.rank(queries, texts)
        return [
            [Hit(score, line[place].document) for place, score in order[:topk]]
            for line, order in zip(found, ranked, strict=True)
        ]

    def _check_pairs(self, pairs: int) -> None:
        if pairs > self._limits.max_pending_pairs:
            raise Refused(
                422,
                f"queries: {pairs} pairs to rerank are too many; send fewer, for at most "
                f"{self._limits.max_pending_pairs}",
            )

    async def _fetch(self, pages: PageSource, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        with self._metrics.stage("pages"):
            found = await pages.fetch(urls)
        if len(found) != len(urls):
            raise ValueError(f"{len(urls)} URLs gave {len(found)} pages")
        return found

    async def _answer(self, work: Awaitable[Answer]) -> Answer:
        """The result of `work`, or the reason why there is none."""
        try:
            async with asyncio.timeout(self._limits.request_timeout_s) as time_limit:
                return await work
        except Refused:
            raise
        except QueueFull:
            waiting = ", ".join(f"{key}: {self.tallies()[key]}" for key in ("pending", "pending_pairs"))
            raise Busy(f"too much waits already ({waiting}): try again later") from None
        except BatcherClosed:
            raise Unavailable("the server is shutting down") from None
        except (UserError, RunError) as error:
            raise Unavailable(f"the search failed: {error}") from None
        except Exception as error:  # noqa: BLE001  a fault of what was loaded must not end as a bare 500
            if time_limit.expired():
                raise Unavailable(f"no answer within {self._limits.request_timeout_s:g} s: try again") from None
            _log.exception("a search failed")
            raise Unavailable(f"the search failed ({type(error).__name__}): see the server's log") from None


def _unwrapped(document: Document) -> Document:
    return document if isinstance(document, str) else bare(document)
