"""What a server needs of a way to retrieve, and the dense one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlsys.errors import UserError
from rlsys.search.encoders import Encoder
from rlsys.search.index import Index


class Hit(NamedTuple):
    """One passage found for a query."""

    score: float
    document: Mapping[str, Any]
    """The corpus row: `id`, `contents` and whatever else it holds."""


class Retriever(Protocol):
    """Finds passages. Its answers never change while it lives, so they may be cached.

    Called by one thread at a time.
    """

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each query, best first."""

    def describe(self) -> Mapping[str, Any]:
        """What it is, as JSON values; `passages` among them."""


class DenseRetriever:
    """Encodes queries and looks for the nearest passages."""

    def __init__(self, index: Index, encoder: Encoder) -> None:
        self._index = index
        self._encoder = encoder

    @classmethod
    def open(cls, folder: str | Path, encoder: str | None = None, *, device: str = "cpu") -> DenseRetriever:
        """Open an index and the encoder that made it.

        `encoder` names another one for queries where a model has a separate one (DPR); without it, weights
        that are not those of the index are refused with UserError.
        """
        index = Index.open(folder)
        made = index.manifest
        loaded = Encoder.load(encoder or made.encoder, made.family, max_tokens=made.max_tokens, device=device)
        if encoder is None and loaded.checksum != made.encoder_sha256:
            raise UserError(
                f"the weights of encoder {made.encoder!r} have changed since {folder} was built: "
                "build the index again"
            )
        if loaded.dimension != made.dimension:
            raise UserError(
                f"encoder {loaded.name!r} gives vectors of {loaded.dimension}, {folder} holds vectors of "
                f"{made.dimension}: give the query encoder that belongs to the index"
            )
        return cls(index, loaded)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each query, best first."""
        scores, rows = self._index.search(self._encoder.encode_queries(queries), topk)
        return [
            list(map(Hit, line, self._index.corpus.fetch(found)))
            for line, found in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    def describe(self) -> Mapping[str, Any]:
        """Passages, encoder, dimension and FAISS type."""
        made = self._index.manifest
        return {
            "passages": made.rows,
            "encoder": self._encoder.name,
            "dimension": made.dimension,
            "faiss_type": made.faiss_type,
        }
