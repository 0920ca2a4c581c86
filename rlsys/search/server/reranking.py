"""Documents in a reranker's order: pairs of many requests, scored together in one thread.

Invariant: a query is paired with its own documents only, and equal scores keep the documents' order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol

from rlsys.search.batcher import Batcher
from rlsys.search.server.limits import ServerLimits
from rlsys.search.server.metrics import Metrics

Pair = tuple[str, str]
"""A query and a text."""


class Scorer(Protocol):
    """What reranks, as far as a server needs it."""

    def scores(self, pairs: Sequence[Pair]) -> list[float]:
        """The higher, the better the text answers the query. Called by one thread at a time."""

    def describe(self) -> Mapping[str, Any]:
        """What it is, as JSON values."""


class Reranking:
    """Ranks documents. Use within one event loop; `close` it at the end."""

    def __init__(self, reranker: Scorer, limits: ServerLimits, metrics: Metrics) -> None:
        self._reranker = reranker
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, "rerank")
        self._batcher: Batcher[Pair, float] = Batcher(
            self._run,
            max_batch=limits.max_pair_batch,
            max_wait_s=limits.max_wait_ms / 1000,
            max_running=1,
            max_pending=limits.max_pending_pairs,
        )
        self.pairs = 0

    @property
    def pending(self) -> int:
        """Pairs that wait."""
        return self._batcher.pending

    def describe(self) -> Mapping[str, Any]:
        """What reranks."""
        return self._reranker.describe()

    async def rank(self, queries: Sequence[str], texts: Sequence[Sequence[str]]) -> list[list[tuple[int, float]]]:
        """For each query the places of its texts and their scores, best first.

        Raises what the reranker and `Batcher.submit` raise.
        """
        pairs = [(query, text) for query, own in zip(queries, texts, strict=True) for text in own]
        scores: Iterator[float] = iter(await asyncio.gather(*self._batcher.submit(pairs)))
        self.pairs += len(pairs)
        lines = [list(islice(scores, len(own))) for own in texts]
        return [sorted(enumerate(line), key=lambda ranked: -ranked[1]) for line in lines]

    async def close(self) -> None:
        """Turn waiting callers away and end the thread; waits for the batch in it."""
        await self._batcher.close()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _run(self, pairs: list[Pair]) -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, pairs)

    def _score(self, pairs: list[Pair]) -> list[float]:
        with self._metrics.stage("rerank"):
            return list(self._reranker.scores(pairs))
