"""Retrieval by vectors: queries are encoded, the nearest passages are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsys.errors import UserError
from rlsys.search.encoders.encoder import Encoder, Floats
from rlsys.search.index.folder import Index
from rlsys.search.retriever import Hit


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

    @property
    def parallel(self) -> int:
        """One: a search keeps all of FAISS's threads busy."""
        return 1

    def prepare(self, queries: Sequence[str]) -> Floats:
        """[n, dimension], the vectors of the queries."""
        return self._encoder.encode_queries(queries)

    def find(self, prepared: Floats, topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each vector, best first."""
        scores, rows = self._index.search(prepared, topk)
        return [
            list(map(Hit, line, self._index.corpus.fetch(found)))
            for line, found in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Nothing to give back: the mapped corpus goes with the last reference to it."""

    def describe(self) -> Mapping[str, Any]:
        """Passages, corpus, encoder, dimension and FAISS type."""
        made = self._index.manifest
        return {
            "passages": made.rows,
            "corpus_sha256": made.corpus_sha256,
            "encoder": self._encoder.name,
            "dimension": made.dimension,
            "faiss_type": made.faiss_type,
        }
