"""A search backend of one's own: cosine similarity of hashed word counts, in plain NumPy.

Copy this file into a folder of PYTHONPATH, and name the class when the index is built and when it is opened:

    rlsys search index corpus.jsonl data/mine --kind search_backend.HashedWords --set dimension=4096
    rlsys search serve data/mine --kind search_backend.HashedWords
    rlsys train -c searchr1_tiny_cpu search.index=data/mine search.index_kind=search_backend.HashedWords

The index records `dimension`. Without the name, the folder is refused: opening it would run code that it names.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from zlib import crc32

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from rlsys.search.corpus import Corpus


class HashedWords:
    """Ranks all passages by the cosine of word counts; words that share a bucket are not told apart."""

    def __init__(self, *, dimension: Annotated[int, Ge(1)] = 1024) -> None:
        self._dimension = dimension

    def build(self, corpus: Corpus, folder: Path) -> None:
        """Write the vectors [passages, dimension]."""
        rows = [self._vector(passage["contents"]) for chunk in corpus.chunks(1000) for passage in chunk]
        np.save(folder / "vectors.npy", np.stack(rows))

    def open(self, folder: Path) -> None:
        """Map the vectors."""
        self._vectors = np.load(folder / "vectors.npy", mmap_mode="r")

    def size(self) -> int:
        """Return the number of passages."""
        return len(self._vectors)

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        """Return the rows with the highest scores; ties are in row order."""
        scores = np.stack([self._vector(query) for query in queries]) @ self._vectors.T
        best = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
        return [[(int(row), float(line[row])) for row in rows] for line, rows in zip(scores, best, strict=True)]

    def _vector(self, text: str) -> NDArray[np.float64]:
        counts = np.zeros(self._dimension)
        for word in text.lower().split():
            counts[crc32(word.encode()) % self._dimension] += 1
        return counts / max(float(np.linalg.norm(counts)), 1e-9)
