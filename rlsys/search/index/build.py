"""Building a dense index: a corpus is encoded, FAISS is trained and filled, the folder gets its name.

Invariants: memory holds one chunk a worker, one block of vectors, the training sample and the FAISS index
itself, whatever the corpus; a build that was ended at any moment continues with the first chunk that is not on
disk, and ends with the same vectors; what is at `out` is whole at any time (`draft`). What can be refused is
refused before the first passage is encoded. Training and filling begin anew after a kill, the encoding does not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import faiss

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.parallel import EncoderPool
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.assemble import add_corpus, link, refuse_foreign
from rlsys.search.index.draft import Draft, claim_draft
from rlsys.search.index.embeddings import CHUNK_ROWS, DTYPES, ChunkWriter, Embeddings
from rlsys.search.index.folder import CORPUS_FILE, EMBEDDINGS_FILE, INDEX_FILE
from rlsys.search.index.manifest import Manifest
from rlsys.search.index.progress import OnProgress
from rlsys.search.index.vectors import (
    FLAT,
    Settings,
    least_train_rows,
    new_index,
    reserve,
    settle,
    train_rows,
)

_RECIPE = "recipe.json"
_FLAGS = "done"
_SEED = 0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a dense index is built, beside what is in it."""

    faiss_type: str = FLAT
    """Any string of faiss.index_factory."""
    nprobe: int | None = None
    """Recorded as the index's own; by default sqrt(nlist), 8 at least."""
    ef_search: int | None = None
    """Recorded as the index's own; 128 by default."""
    embeddings_dtype: str = "float32"
    keep_embeddings: bool = True
    """Leave them in the folder, so that another FAISS type needs no encoding."""
    max_train_rows: int = 1_000_000
    """Most vectors, drawn at random with a fixed seed, that FAISS learns from; they are held in memory."""
    workers: int = 1
    """Processes that encode."""

    def __post_init__(self) -> None:
        if self.embeddings_dtype not in DTYPES:
            raise UserError(f"embeddings dtype {self.embeddings_dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
        if self.workers < 1:
            raise UserError(f"workers {self.workers} is out of range: give 1 or more")


def build(
    corpus: Corpus,
    encoder: EncoderSpec,
    out: str | Path,
    options: BuildOptions | None = None,
    progress: OnProgress | None = None,
) -> bool:
    """Make the index folder `out`; True if it was made, False if it is there already with this manifest.

    An index of other inputs in `out` is replaced once the new one is complete; where it differs in FAISS type
    or settings alone, its embeddings are used again. Raises UserError for a folder that is no index, a FAISS
    type that does not fit the passages, and a bad line of the corpus, all before anything is encoded; RunError when
    the disk takes no more, where what is encoded stays.
    """
    out = Path(out).absolute()
    options = options or BuildOptions()
    progress = progress or _silent
    refuse_foreign(out)
    planned = _plan(corpus, encoder, options)
    if _manifest_at(out) == planned:
        return False
    with claim_draft(out) as draft:
        there = _manifest_at(out)
        if there == planned:
            return False
        same_vectors = there is not None and there.with_settings_of(planned) == planned
        same_embeddings = there is not None and there.embeddings() == planned.embeddings()
        if same_vectors or (same_embeddings and (out / EMBEDDINGS_FILE).is_file()):
            _carry_over(out, draft, INDEX_FILE if same_vectors else None)
        else:
            _encode(corpus, encoder, planned, options, draft, progress)
        if not same_vectors:
            embeddings = _open_embeddings(draft.folder / EMBEDDINGS_FILE, planned)
            index = _filled(planned, embeddings, options, progress)
            # By Python: FAISS itself does not tell of the end of a file that the disk did not take.
            with (draft.folder / INDEX_FILE).open("wb") as file:
                faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]
        add_corpus(corpus, draft.folder / CORPUS_FILE)
        planned.write(draft.folder)
        draft.publish()
    if not options.keep_embeddings:
        (out / EMBEDDINGS_FILE).unlink(missing_ok=True)
    return True


def _plan(corpus: Corpus, spec: EncoderSpec, options: BuildOptions) -> Manifest:
    """The manifest of what is to be built. Raises UserError where it cannot be."""
    facts = spec.load().facts
    index = new_index(options.faiss_type, facts.dimension)
    least, most = least_train_rows(index), min(len(corpus), options.max_train_rows)
    if most < least:
        raise UserError(
            f"FAISS type {options.faiss_type!r} learns from {least} vectors at least, here are {most} "
            f"(passages: {len(corpus)}, max_train_rows: {options.max_train_rows}): give a smaller type, such as Flat"
        )
    settings = settle(index, Settings(options.nprobe, options.ef_search), faiss_type=options.faiss_type)
    return Manifest.of(
        corpus,
        facts,
        embeddings_dtype=options.embeddings_dtype,
        faiss_type=options.faiss_type,
        nprobe=settings.nprobe,
        ef_search=settings.ef_search,
    )


def _manifest_at(folder: Path) -> Manifest | None:
    """The manifest of a dense index that this version has built; None for anything else."""
    try:
        return Manifest.read(folder)
    except UserError:
        return None


def _carry_over(out: Path, draft: Draft, index_file: str | None) -> None:
    """Put what the index at `out` has in common with the planned one into the draft."""
    draft.clear()
    for name in (EMBEDDINGS_FILE, index_file):
        if name is not None and (out / name).is_file():
            link(out / name, draft.folder / name)
    _log.info("%s: the passages are encoded already", out)


def _encode(
    corpus: Corpus,
    spec: EncoderSpec,
    planned: Manifest,
    options: BuildOptions,
    draft: Draft,
    progress: OnProgress,
) -> None:
    """Complete the embeddings in the draft, whatever of them was there before."""
    path = draft.folder / EMBEDDINGS_FILE
    recipe = json.dumps(planned.embeddings() | {"chunk_rows": CHUNK_ROWS, "dtype": spec.dtype}, indent=2)
    noted = draft.home / _RECIPE
    if not (noted.is_file() and noted.read_text(encoding="utf-8") == recipe):
        if noted.is_file():
            _log.warning("%s holds the beginning of an index of other inputs: it is thrown away", draft.home)
        for _ in corpus.chunks(CHUNK_ROWS):
            # Parsing refuses a bad line now; found after hours, it would cost all that was encoded.
            pass
        draft.clear()
        Embeddings.create(path, planned.rows, planned.dimension, planned.embeddings_dtype)
        noted.write_text(recipe, encoding="utf-8")
    with closing(ChunkWriter(_open_embeddings(path, planned), draft.home / _FLAGS)) as writer:
        done, missing = writer.done_rows(), writer.missing()
        progress("encode", done, planned.rows)
        if not missing:
            return
        if done:
            _log.info("continuing in %s: %d of %d passages are encoded", draft.home, done, planned.rows)
        with EncoderPool(spec, min(options.workers, len(missing))) as pool:
            for chunk, vectors in pool.map(_texts(corpus, writer, missing)):
                writer.put(chunk, vectors)
                done += len(vectors)
                progress("encode", done, planned.rows)


def _texts(corpus: Corpus, writer: ChunkWriter, chunks: list[int]) -> Iterator[tuple[int, list[str]]]:
    for chunk in chunks:
        yield chunk, [passage["contents"] for passage in corpus.fetch(writer.rows_of(chunk))]


def _filled(planned: Manifest, embeddings: Embeddings, options: BuildOptions, progress: OnProgress) -> faiss.Index:
    """The FAISS index with all vectors of the embeddings in it."""
    index = new_index(planned.faiss_type, planned.dimension)
    if not index.is_trained:
        count = min(planned.rows, options.max_train_rows, train_rows(index))
        progress("train", 0, count)
        try:
            index.train(embeddings.sample(count, _SEED))
        except RuntimeError as error:
            raise UserError(
                f"FAISS cannot train {planned.faiss_type!r} on {count} vectors ({error}): build again with another "
                "type; what is encoded stays"
            ) from None
        progress("train", count, count)
    progress("add", 0, planned.rows)
    reserve(index, planned.rows)
    for block in embeddings.blocks():
        index.add(block)
        progress("add", index.ntotal, planned.rows)
    return index


def _open_embeddings(path: Path, planned: Manifest) -> Embeddings:
    return Embeddings.open(path, planned.rows, planned.dimension, planned.embeddings_dtype)


def _silent(stage: str, done: int, total: int) -> None:
    del stage, done, total
