"""Retrieval by vectors: queries are encoded, the nearest passages are found. The folder explains itself:

    index.faiss      vectors, inner product, row r = line r + 1 of the corpus
    corpus.jsonl     the corpus it was built from, linked or copied, so that the folder can be moved
    embeddings.npy   the vectors as they were encoded, unless they were not kept
    manifest.json    what the vectors were made with (`manifest.Manifest`)

Invariants: an index is never opened with another corpus or another number of rows than it was built from; queries are
encoded as the passages were: same weights, pooling, prefixes, normalisation and cut.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.spec import EncoderFacts, EncoderSpec, Floats, QueryEncoder
from rlsys.search.index.building import open_corpus
from rlsys.search.index.manifest import Manifest
from rlsys.search.index.vectors import FaissSettings, SearchOptions, Vectors
from rlsys.search.retrieval import Hit

INDEX_FILE = "index.faiss"
EMBEDDINGS_FILE = "embeddings.npy"
_TWO_ENCODERS = ("dpr",)
"""Families with a model of its own for queries."""
_log = logging.getLogger(__name__)


class DenseIndex(NamedTuple):
    """An open index folder."""

    manifest: Manifest
    corpus: Corpus
    vectors: Vectors

    @classmethod
    def open(cls, folder: str | Path, options: SearchOptions | None = None) -> DenseIndex:
        """Open what `build` wrote. Raises UserError when manifest, corpus and vectors do not fit together."""
        folder = Path(folder)
        manifest = Manifest.read(folder)
        corpus = open_corpus(folder, manifest.corpus_sha256)
        recorded = FaissSettings(manifest.nprobe, manifest.ef_search)
        vectors = Vectors.open(folder / INDEX_FILE, options, faiss_type=manifest.faiss_type, recorded=recorded)
        held = (vectors.rows, len(corpus), vectors.dimension)
        if held != (manifest.rows, manifest.rows, manifest.dimension):
            raise UserError(
                f"{folder} holds {vectors.rows} vectors of {vectors.dimension} for {len(corpus)} passages, its "
                f"manifest says {manifest.rows} of {manifest.dimension}: build the index again"
            )
        return cls(manifest, corpus, vectors)


class VectorRetriever:
    """Encodes queries and looks for the nearest passages."""

    parallel = 1
    """A search keeps all of FAISS's threads busy."""

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
    ) -> VectorRetriever:
        """Open an index and the encoder that made it, on `device` in `dtype` (see `EncoderSpec`).

        `encoder` says where its weights lie now, or is a spec, whose device and dtype then count. With `own_process`
        queries are encoded in another process, which ends with `close`. Raises UserError for other weights than the
        passages were encoded with (DPR alone has separate ones for queries), for a spec that contradicts the index, and
        for a folder that does not fit together.
        """
        made, corpus, vectors = DenseIndex.open(folder, options)
        spec = made.query_spec(encoder, device=device, dtype=dtype)
        loaded = spec.start() if own_process else spec.load()
        try:
            _require_fit(loaded.facts, made, folder, named=encoder is not None)
        except UserError:
            loaded.close()
            raise
        return cls(vectors, corpus, loaded, made.faiss_type)

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
        return {
            "kind": "dense",
            "passages": len(self._corpus),
            "corpus_sha256": self._corpus.checksum,
            "encoder": self._encoder.facts.name,
            "dimension": self._vectors.dimension,
            "faiss_type": self._faiss_type,
            **{key: value for key, value in asdict(self._vectors.settings).items() if value is not None},
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


def open_prebuilt(
    index_file: str | Path,
    corpus: str | Path,
    encoder: EncoderSpec,
    options: SearchOptions | None = None,
    *,
    own_process: bool = False,
) -> VectorRetriever:
    """Search the FAISS file `index_file`, as Search-R1 and others publish them, with queries from `encoder`.

    Its row r is line r + 1 of `corpus`. There is no manifest: what the file was encoded with cannot be verified; what
    queries are encoded with is logged. Raises UserError when rows, dimension or metric do not fit.
    """
    index_file = Path(index_file)
    if not index_file.is_file():
        raise UserError(f"FAISS index {index_file} is not a file: give the one that belongs to the corpus")
    passages = Corpus.open(corpus)
    vectors = Vectors.open(index_file, options)
    if vectors.rows != len(passages):
        raise UserError(
            f"{index_file} holds {vectors.rows} vectors, {corpus} has {len(passages)} passages: give the corpus that "
            "the index was built from, unchanged"
        )
    loaded = encoder.start() if own_process else encoder.load()
    facts = loaded.facts
    if facts.dimension != vectors.dimension:
        loaded.close()
        raise UserError(
            f"encoder {facts.name!r} gives vectors of {facts.dimension}, {index_file} holds vectors of "
            f"{vectors.dimension}: give the encoder that the index was built with"
        )
    _log.warning(
        "%s does not say what it was encoded with: queries are encoded by %s (%s, query prefix %r, at most %d tokens); "
        "if the passages were encoded otherwise, what is found is wrong without a sign of it",
        index_file,
        facts.name,
        facts.family,
        facts.family.query_prefix,
        facts.max_tokens,
    )
    return VectorRetriever(vectors, passages, loaded, vectors.faiss_type)
