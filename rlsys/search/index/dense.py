"""Retrieval by vectors: queries are encoded, the nearest passages are found.

Invariant: queries are encoded as the passages were: same weights, pooling, prefixes, normalisation and cut.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.spec import EncoderFacts, EncoderSpec, Floats, QueryEncoder
from rlsys.search.index.folder import Index, SearchOptions
from rlsys.search.index.manifest import Manifest
from rlsys.search.index.vectors import Vectors
from rlsys.search.retrieval import Hit

_TWO_ENCODERS = ("dpr",)
"""Families with a model of its own for queries."""
_log = logging.getLogger(__name__)


class DenseRetriever:
    """Encodes queries and looks for the nearest passages."""

    def __init__(self, vectors: Vectors, corpus: Corpus, encoder: QueryEncoder, faiss_type: str) -> None:
        self._vectors = vectors
        self._corpus = corpus
        self._encoder = encoder
        self._faiss_type = faiss_type

    @classmethod
    def open(
        cls,
        folder: str | Path,
        encoder: str | EncoderSpec | None = None,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        options: SearchOptions | None = None,
        own_process: bool = False,
    ) -> DenseRetriever:
        """Open an index and the encoder that made it, on `device` in `dtype` (see `Encoder.load`).

        `encoder` says where its weights lie now, or is a spec, whose device and dtype then count. With
        `own_process` queries are encoded in another process, which ends with `close`. Raises
        UserError for other weights than the passages were encoded with (DPR alone has separate ones for
        queries), for a spec that contradicts the index, and for a folder that does not fit together.
        """
        index = Index.open(folder, options)
        made = index.manifest
        spec = made.query_spec(encoder, device=device, dtype=dtype)
        loaded = spec.start() if own_process else spec.load()
        try:
            _require_fit(loaded.facts, made, folder, named=encoder is not None)
        except UserError:
            loaded.close()
            raise
        return cls(index.vectors, index.corpus, loaded, made.faiss_type)

    @property
    def parallel(self) -> int:
        """One: a search keeps all of FAISS's threads busy."""
        return 1

    def prepare(self, queries: Sequence[str]) -> Floats:
        """[n, dimension], the vectors of the queries."""
        return self._encoder.encode_queries(queries)

    def find(self, prepared: Floats, topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each vector, best first."""
        scores, rows = self._vectors.search(prepared, topk)
        # Fetched together, so that reads from a disk overlap; a row of -1 stands for nothing found.
        passages = iter(self._corpus.fetch(rows[rows >= 0].tolist()))
        return [
            [Hit(score, next(passages)) for score, row in zip(line_scores, line_rows, strict=True) if row >= 0]
            for line_scores, line_rows in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    def close(self) -> None:
        """End the encoder's process, if it has one; what is mapped goes with the last reference to it."""
        self._encoder.close()

    def describe(self) -> Mapping[str, Any]:
        """Passages, corpus, encoder, dimension, FAISS type, and nprobe and ef_search where it has them."""
        settings = {"nprobe": self._vectors.settings.nprobe, "ef_search": self._vectors.settings.ef_search}
        return {
            "kind": "dense",
            "passages": len(self._corpus),
            "corpus_sha256": self._corpus.checksum,
            "encoder": self._encoder.facts.name,
            "dimension": self._vectors.dimension,
            "faiss_type": self._faiss_type,
            **{key: value for key, value in settings.items() if value is not None},
        }


def _require_fit(facts: EncoderFacts, made: Manifest, folder: str | Path, *, named: bool) -> None:
    """Raise UserError unless the encoder is the index's own, or one for queries that the user has `named`."""
    if facts.dimension != made.dimension:
        raise UserError(
            f"encoder {facts.name!r} gives vectors of {facts.dimension}, {folder} holds vectors of "
            f"{made.dimension}: give the encoder that belongs to the index"
        )
    if facts.checksum != made.encoder_sha256:
        if not named or made.family not in _TWO_ENCODERS:
            raise UserError(
                f"the weights of encoder {facts.name!r} are not those that {folder} was built with: give the "
                f"encoder that belongs to it, or build the index again"
            )
        _log.info("queries are encoded by %s, passages were by %s", facts.name, made.encoder)
