"""Hybrid retrieval: fuses a dense and a BM25 ranking of one corpus by rank.

    dense/, bm25/:  an index of each kind, over the same corpus
    manifest.json:  checksum and rows of that corpus

Reciprocal-rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009): a passage's score is the sum of 1 / (k + rank) over
the rankings that contain it; the best rank is 1. The scores of the two rankings need no common scale.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.dense import BuildOptions, VectorRetriever, build
from rlsys.search.index.folder import (
    BM25,
    CORPUS_FILE,
    DENSE,
    HYBRID,
    OnProgress,
    claim_draft,
    link,
    read_manifest,
    read_values,
    silent,
)
from rlsys.search.index.lexical import LexicalOptions, LexicalRetriever, build_lexical
from rlsys.search.retrieval import Hit, Retriever

RANK_CONSTANT = 60
"""The constant k of the paper."""
CANDIDATES = 100
"""Hits that each side contributes to the fusion."""

Key = TypeVar("Key", bound=Hashable)


def fuse(rankings: Sequence[Sequence[Key]], topk: int) -> list[tuple[Key, float]]:
    """Return the best `topk` keys of all rankings with their scores, best first.

    Ties go to the better rank in the first ranking. A repeated key counts at its best rank.
    """
    places = [{key: place for place, key in reversed(list(enumerate(ranking, 1)))} for ranking in rankings]
    keys = dict.fromkeys(key for place in places for key in place)
    ranks = {key: tuple(place.get(key, math.inf) for place in places) for key in keys}
    scores = {key: math.fsum(1 / (RANK_CONSTANT + rank) for rank in ranks[key]) for key in keys}
    best = sorted(keys, key=lambda key: (-scores[key], ranks[key]))[:topk]
    return [(key, scores[key]) for key in best]


def build_hybrid(
    corpus: Corpus,
    encoder: EncoderSpec,
    out: str | Path,
    dense: BuildOptions | None = None,
    lexical: LexicalOptions | None = None,
    progress: OnProgress = silent,
) -> bool:
    """Build the index folder `out` with both parts on one corpus file; False if it exists with the same inputs.

    A part with the same inputs is reused from `out` or from the draft of a killed build.
    """
    out = Path(out).absolute()
    with claim_draft(out) as draft:
        names = {path.name for path in draft.folder.iterdir()}
        if names - {DENSE, BM25, *(f".{part}.building" for part in (DENSE, BM25))}:
            draft.clear()  # the draft is of another kind
            names.clear()
        # Reuse the parts of the hybrid at `out`; the rename makes each appear whole or not at all.
        for part in (DENSE, BM25) if not names and _manifest_at(out) else ():
            if _manifest_at(out / part):
                seed = draft.home / "seed"
                shutil.rmtree(seed, ignore_errors=True)
                shutil.copytree(out / part, seed, copy_function=lambda name, to: link(Path(name), Path(to)))
                seed.rename(draft.folder / part)
        build(corpus, encoder, draft.folder / DENSE, dense, progress)
        build_lexical(Corpus.open(draft.folder / DENSE / CORPUS_FILE), draft.folder / BM25, lexical, progress)
        if all(_manifest_at(out / part) == _manifest_at(draft.folder / part) for part in (DENSE, BM25)):
            draft.clear()
            return False
        draft.complete(HYBRID, {"corpus_sha256": corpus.checksum, "rows": len(corpus)})
    return True


def _manifest_at(folder: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(folder)
    except UserError:
        return None


class HybridRetriever:
    """Fuses the hits of two retrievers over one corpus, matched by `id` and text, and scored by `fuse`.

    Each side contributes `candidates` hits, or `topk` if that is larger.
    """

    def __init__(self, dense: Retriever, lexical: Retriever, *, candidates: int = CANDIDATES) -> None:
        self._sides = {DENSE: dense, BM25: lexical}
        self._candidates = candidates
        self._described = {name: side.describe() for name, side in self._sides.items()}
        self.parallel = min(dense.parallel, lexical.parallel)
        """Minimum of both sides."""
        first, second = (described.get("corpus_sha256") for described in self._described.values())
        if first is None or first != second:
            problem = (
                f"a hybrid needs two indexes of one corpus, but these have the corpus checksums {first} and {second}"
            )
            raise UserError(f"{problem}: build both from the same file.", code="mismatch", key="corpus_sha256")

    @classmethod
    def open(cls, folder: str | Path, *, threads: int | None = None, **dense: Any) -> HybridRetriever:
        """Open an index of `build_hybrid`, with options of `VectorRetriever.open`. Raises UserError on a mismatch.

        `threads` is that of `LexicalRetriever.open`.
        """
        folder = Path(folder)
        manifest = read_values(folder, [HYBRID], f"{HYBRID!r}: give a hybrid index")
        with ExitStack() as on_failure:
            vectors = on_failure.enter_context(closing(VectorRetriever.open(folder / DENSE, **dense)))
            words = on_failure.enter_context(closing(LexicalRetriever.open(folder / BM25, threads=threads)))
            opened = cls(vectors, words)
            if opened.describe()["corpus_sha256"] != manifest.get("corpus_sha256"):
                raise UserError(
                    f"the parts of {folder} are not of the manifest's corpus: build the index again.",
                    code="mismatch",
                    key=str(folder),
                )
            on_failure.pop_all()
        return opened

    def prepare(self, queries: Sequence[str]) -> list[Any]:
        """Return the prepared queries of each side."""
        return [side.prepare(queries) for side in self._sides.values()]

    def find(self, prepared: list[Any], topk: int) -> list[list[Hit]]:
        """Return up to `topk` hits per query, best first."""
        asked = max(topk, self._candidates)
        found = [side.find(ready, asked) for side, ready in zip(self._sides.values(), prepared, strict=True)]
        fused = []
        for sides in zip(*found, strict=True):
            # Several passages of a corpus may have the id of one document.
            keys = [[(hit.document["id"], hit.document["contents"]) for hit in hits] for hits in sides]
            documents = {
                key: hit.document
                for side, hits in zip(keys, sides, strict=True)
                for key, hit in zip(side, hits, strict=True)
            }
            best = fuse(keys, topk)
            fused.append([Hit(score, documents[key]) for key, score in best])
        return fused

    def describe(self) -> Mapping[str, Any]:
        """Return passages, corpus, fusion parameters and the description of each side."""
        dense = self._described[DENSE]
        corpus = {key: dense[key] for key in ("passages", "corpus_sha256")}
        fusion = {"candidates": self._candidates, "rank_constant": RANK_CONSTANT}
        return {"kind": HYBRID, **corpus, **fusion, **self._described}

    def close(self) -> None:
        """Close both sides."""
        for side in self._sides.values():
            side.close()
