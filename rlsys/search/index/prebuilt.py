"""A FAISS file and a corpus from elsewhere, as Search-R1 and others publish them: no manifest, no checksums."""

from __future__ import annotations

import logging
from pathlib import Path

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.dense import DenseRetriever
from rlsys.search.index.folder import SearchOptions

_log = logging.getLogger(__name__)


def open_prebuilt(
    index_file: str | Path,
    corpus: str | Path,
    encoder: EncoderSpec,
    options: SearchOptions | None = None,
    *,
    own_process: bool = False,
) -> DenseRetriever:
    """Search the FAISS file `index_file`, whose row r is line r + 1 of `corpus`, with queries from `encoder`.

    What the file was encoded with cannot be verified; what queries are encoded with is logged. Raises UserError
    when rows, dimension or metric do not fit.
    """
    index_file = Path(index_file)
    if not index_file.is_file():
        raise UserError(f"FAISS index {index_file} is not a file: give the one that belongs to the corpus")
    passages = Corpus.open(corpus)
    vectors = (options or SearchOptions()).open(index_file)
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
    family = facts.family
    _log.warning(
        "%s does not say what it was encoded with: queries are encoded by %s (%s pooling, %s, query prefix %r, at most "
        "%d tokens); if the passages were encoded otherwise, what is found is wrong without a sign of it",
        index_file,
        facts.name,
        family.pooling,
        "normalised" if family.normalize else "not normalised",
        family.query_prefix,
        facts.max_tokens,
    )
    return DenseRetriever(vectors, passages, loaded, vectors.faiss_type)
