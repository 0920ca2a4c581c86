"""A FAISS index over a corpus, as a folder that explains itself.

    index.faiss     vectors, inner product, row r = line r + 1 of the corpus
    corpus.jsonl    the corpus it was built from, copied, so that the folder can be moved
    manifest.json   what the vectors were made with (`Manifest`)

Invariants: a folder under its final name is complete, because it is built under another name and renamed;
an index is never served with another corpus or another number of rows than it was built from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.encoder import Encoder, Floats

INDEX_FILE = "index.faiss"
CORPUS_FILE = "corpus.jsonl"
MANIFEST_FILE = "manifest.json"
FAISS_TYPE = "Flat"
"""Exact search: the string that faiss.index_factory takes."""
_CHUNK_ROWS = 1024

OnProgress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an index was made from. Two builds with equal manifests give the same index."""

    corpus_sha256: str
    rows: int
    encoder: str
    encoder_sha256: str
    family: str
    query_prefix: str
    passage_prefix: str
    pooling: str
    normalize: bool
    max_tokens: int
    dimension: int
    faiss_type: str

    @classmethod
    def of(cls, corpus: Corpus, encoder: Encoder) -> Manifest:
        """The manifest of an index of `corpus` made with `encoder`."""
        return cls(
            corpus_sha256=corpus.checksum,
            rows=len(corpus),
            encoder=encoder.name,
            encoder_sha256=encoder.checksum,
            family=encoder.family_name,
            query_prefix=encoder.family.query_prefix,
            passage_prefix=encoder.family.passage_prefix,
            pooling=encoder.family.pooling.value,
            normalize=encoder.family.normalize,
            max_tokens=encoder.max_tokens,
            dimension=encoder.dimension,
            faiss_type=FAISS_TYPE,
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the folder's manifest. Raises UserError when there is none or its keys are not these."""
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise UserError(
                f"{folder} is not an index (no {MANIFEST_FILE}): make one with `rlsys search index`"
            )
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is not JSON ({error}): build the index again") from None
        keys = {item.name for item in fields(cls)}
        if not isinstance(values, dict) or set(values) != keys:
            raise UserError(f"{path} does not hold the keys {', '.join(sorted(keys))}: build the index again")
        return cls(**values)

    def write(self, folder: Path) -> None:
        """Write it to the folder."""
        (folder / MANIFEST_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Index:
    """An open index: its vectors, its passages and what made it."""

    folder: Path
    manifest: Manifest
    corpus: Corpus
    vectors: faiss.Index

    @classmethod
    def open(cls, folder: str | Path) -> Index:
        """Open what `build` wrote. Raises UserError when manifest, corpus and vectors do not fit together."""
        folder = Path(folder)
        manifest = Manifest.read(folder)
        corpus = Corpus.open(folder / CORPUS_FILE)
        if corpus.checksum != manifest.corpus_sha256:
            raise UserError(
                f"{corpus.path} has changed since {folder} was built: build the index again or restore the file"
            )
        path = folder / INDEX_FILE
        try:
            vectors = faiss.read_index(str(path))
        except RuntimeError:
            raise UserError(f"{path} is missing or damaged: build the index again") from None
        found = (vectors.ntotal, len(corpus), vectors.d)
        if found != (manifest.rows, manifest.rows, manifest.dimension):
            raise UserError(
                f"{folder} holds {vectors.ntotal} vectors of {vectors.d} for {len(corpus)} passages, its manifest "
                f"says {manifest.rows} of {manifest.dimension}: build the index again"
            )
        return cls(folder, manifest, corpus, vectors)

    def search(self, queries: Floats, topk: int) -> tuple[Floats, NDArray[np.int64]]:
        """The best rows of each query, best first, by inner product.

        Args:
            queries: [n, dimension] encoded queries.
            topk: rows a query; at most as many as there are passages come back.

        Returns:
            scores and rows, both [n, min(topk, rows)].
        """
        scores, rows = self.vectors.search(queries, min(topk, self.manifest.rows))
        return scores, rows


def build(corpus: Corpus, encoder: Encoder, out: str | Path, progress: OnProgress | None = None) -> bool:
    """Make the index folder `out`; True if it was made, False if it is there already with this manifest.

    An index of other inputs in `out` is replaced once the new one is complete; a folder that is no index is
    refused with UserError.
    """
    out = Path(out).absolute()
    manifest = Manifest.of(corpus, encoder)
    if (out / MANIFEST_FILE).is_file() and Manifest.read(out) == manifest:
        return False
    if out.exists() and not (out / MANIFEST_FILE).is_file() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} is there and is no index: give an empty or a new folder")
    draft = out.with_name(f".{out.name}.building-{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        shutil.copyfile(corpus.path, draft / CORPUS_FILE)
        faiss.write_index(_encode_all(corpus, encoder, progress), str(draft / INDEX_FILE))
        manifest.write(draft)
        if out.exists():
            shutil.rmtree(out)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _encode_all(corpus: Corpus, encoder: Encoder, progress: OnProgress | None) -> faiss.Index:
    vectors = faiss.index_factory(encoder.dimension, FAISS_TYPE, faiss.METRIC_INNER_PRODUCT)
    for passages in corpus.chunks(_CHUNK_ROWS):
        vectors.add(encoder.encode_passages([passage["contents"] for passage in passages]))
        if progress is not None:
            progress(vectors.ntotal, len(corpus))
    return vectors


def build_index(
    corpus: str | Path,
    out: str | Path,
    encoder: str = "minilm",
    *,
    family: str = "auto",
    max_tokens: int = 256,
    device: str = "cpu",
) -> bool:
    """`rlsys search index`: build `out` from the corpus file with a progress bar; False if it was there."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    passages = Corpus.open(corpus)
    loaded = Encoder.load(encoder, family, max_tokens=max_tokens, device=device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("passages", total=len(passages))
        return build(passages, loaded, out, lambda done, _: bar.update(task, completed=done))
