"""Exact dense retrieval over the tiny corpus in one process, with the search server's results but without HTTP.

The encoder is the bundled all-MiniLM-L6-v2, whose vectors have norm 1, so the inner product is the cosine. An exact
index over the same corpus gives the same results; rows with equal scores are in ascending order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.spec import BUNDLED


class DirectRetriever:
    """Finds the passages nearest to a query, and caches results by query.

    The folder `cache` keeps the corpus's vectors in a file named after the corpus's checksum.
    """

    def __init__(self, contents: Sequence[str], cache: Path, top_k: int = 3) -> None:
        self._contents = tuple(contents)
        self._top_k = top_k
        self._encoder = Encoder.load(BUNDLED)
        self._answers: dict[str, tuple[int, ...]] = {}
        digest = hashlib.sha256("\0".join(contents).encode()).hexdigest()[:16]
        path = cache / f"minilm-{digest}.npy"
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            np.save(path, self._encoder.encode_passages(contents))
        self._vectors: NDArray[np.float32] = np.load(path)

    def rows(self, queries: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the corpus rows of the `top_k` nearest passages of each query, best first."""
        new = sorted({query for query in queries if query not in self._answers})
        if new:
            scores = self._encoder.encode_queries(new) @ self._vectors.T
            nearest = np.argsort(-scores, axis=1, kind="stable")[:, : self._top_k]
            self._answers.update((q, tuple(map(int, row))) for q, row in zip(new, nearest, strict=True))
        return [self._answers[query] for query in queries]

    def passages(self, queries: Sequence[str]) -> list[list[str]]:
        """Return the `contents` of the `top_k` nearest passages of each query, best first."""
        return [[self._contents[row] for row in rows] for rows in self.rows(queries)]

    async def __call__(self, query: str) -> list[str]:
        """Return the passages of one query, as `Retrieve` of the oracle requires."""
        return self.passages([query])[0]
