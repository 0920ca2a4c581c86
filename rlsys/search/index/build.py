"""Building a dense index: a corpus is encoded, FAISS is trained and filled, the folder gets its name.

Invariants: memory holds one chunk a worker, one block of vectors, the training sample and the FAISS index itself,
whatever the corpus; a build that was ended at any moment continues with the first chunk that is not on disk, and ends
with the same vectors; what is at `out` is whole at any time (`building`). A chunk is marked as done only after its
vectors have reached the disk, and is the same rows in every run. What can be refused is refused before the first
passage is encoded. Training and filling begin anew after a kill, the encoding does not.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from rlsys.errors import RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.process import EncoderPool
from rlsys.search.encoders.spec import EncoderSpec, Floats
from rlsys.search.index.building import (
    IndexDraft,
    OnProgress,
    add_corpus,
    claim_draft,
    link,
    new_array,
    refuse_foreign,
    silent,
)
from rlsys.search.index.dense import EMBEDDINGS_FILE, INDEX_FILE
from rlsys.search.index.manifest import DENSE, Manifest, write_manifest
from rlsys.search.index.vectors import FLAT, FaissSettings, least_train_rows, new_index, reserve, settle, train_rows

DTYPES = ("float32", "float16")
CHUNK_ROWS = 1024
BLOCK_BYTES = 1 << 26
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
    progress: OnProgress = silent,
) -> bool:
    """Make the index folder `out`; True if it was made, False if it is there already with this manifest.

    An index of other inputs in `out` is replaced once the new one is complete; where it differs in FAISS type or
    settings alone, its embeddings are used again. Raises UserError for a folder that is no index, a FAISS type that
    does not fit the passages, and a bad line of the corpus, all before anything is encoded; RunError when the disk
    takes no more, where what is encoded stays.
    """
    out = Path(out).absolute()
    options = options or BuildOptions()
    refuse_foreign(out)
    planned = _plan(corpus, encoder, options)
    if _manifest_at(out) == planned:
        return False
    with claim_draft(out) as draft:
        there = _manifest_at(out)
        if there == planned:
            return False
        same_vectors = (
            there is not None and replace(there, nprobe=planned.nprobe, ef_search=planned.ef_search) == planned
        )
        same_embeddings = there is not None and there.embeddings() == planned.embeddings()
        if same_vectors or (same_embeddings and (out / EMBEDDINGS_FILE).is_file()):
            draft.clear()
            for name in (EMBEDDINGS_FILE, INDEX_FILE) if same_vectors else (EMBEDDINGS_FILE,):
                if (out / name).is_file():
                    link(out / name, draft.folder / name)
            _log.info("%s: the passages are encoded already", out)
        else:
            _encode(corpus, encoder, planned, options, draft, progress)
        if not same_vectors:
            index = _filled(planned, _open_embeddings(draft, planned), options, progress)
            # By Python: FAISS itself does not tell of the end of a file that the disk did not take.
            with (draft.folder / INDEX_FILE).open("wb") as file:
                faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]
        add_corpus(corpus, draft.folder)
        write_manifest(draft.folder, DENSE, asdict(planned))
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
    settings = settle(index, FaissSettings(options.nprobe, options.ef_search), faiss_type=options.faiss_type)
    return Manifest(
        corpus_sha256=corpus.checksum,
        rows=len(corpus),
        encoder=facts.name,
        encoder_sha256=facts.checksum,
        family=facts.family_name,
        **(asdict(facts.family) | {"pooling": facts.family.pooling.value}),
        max_tokens=facts.max_tokens,
        dimension=facts.dimension,
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


def _encode(
    corpus: Corpus, spec: EncoderSpec, planned: Manifest, options: BuildOptions, draft: IndexDraft, progress: OnProgress
) -> None:
    """Complete the embeddings in the draft, whatever of them was there before."""
    recipe = json.dumps(planned.embeddings() | {"chunk_rows": CHUNK_ROWS, "dtype": spec.dtype}, indent=2)
    noted = draft.home / _RECIPE
    if not (noted.is_file() and noted.read_text(encoding="utf-8") == recipe):
        if noted.is_file():
            _log.warning("%s holds the beginning of an index of other inputs: it is thrown away", draft.home)
        for _ in corpus.chunks(CHUNK_ROWS):
            # Parsing refuses a bad line now; found after hours, it would cost all that was encoded.
            pass
        draft.clear()
        shape, dtype = (planned.rows, planned.dimension), np.dtype(planned.embeddings_dtype)
        new_array(draft.folder / EMBEDDINGS_FILE, shape, dtype).flush()
        noted.write_text(recipe, encoding="utf-8")
    with closing(ChunkWriter(_open_embeddings(draft, planned), draft.home / _FLAGS)) as writer:
        done, missing = writer.done_rows(), writer.missing()
        progress("encode", done, planned.rows)
        if not missing:
            return
        if done:
            _log.info("continuing in %s: %d of %d passages are encoded", draft.home, done, planned.rows)
        texts = ((chunk, [row["contents"] for row in corpus.fetch(writer.rows_of(chunk))]) for chunk in missing)
        with EncoderPool(spec, min(options.workers, len(missing))) as pool:
            for chunk, vectors in pool.map(texts):
                writer.put(chunk, vectors)
                done += len(vectors)
                progress("encode", done, planned.rows)


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


def _open_embeddings(draft: IndexDraft, planned: Manifest) -> Embeddings:
    return Embeddings.open(draft.folder / EMBEDDINGS_FILE, planned.rows, planned.dimension, planned.embeddings_dtype)


class Embeddings:
    """A complete or growing .npy file of `rows` vectors."""

    def __init__(self, path: Path, rows: int, dimension: int, dtype: np.dtype, offset: int) -> None:
        self.path = path
        self.rows = rows
        self.dimension = dimension
        self.dtype = dtype
        self.offset = offset
        """Bytes before the first vector."""

    @classmethod
    def open(cls, path: Path, rows: int, dimension: int, dtype: str) -> Embeddings:
        """Open the file. Raises UserError if it is not one of [rows, dimension] in `dtype`."""
        try:
            mapped = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): remove it and build again") from None
        if (mapped.shape, mapped.dtype) != ((rows, dimension), np.dtype(dtype)):
            raise UserError(
                f"{path} holds {list(mapped.shape)} of {mapped.dtype}, not {[rows, dimension]} of {dtype}: remove "
                "it and build again"
            )
        return cls(path, rows, dimension, mapped.dtype, int(mapped.offset))

    def blocks(self) -> Iterator[Floats]:
        """All vectors in order, as [some, dimension] float32 of at most BLOCK_BYTES."""
        step = max(1, BLOCK_BYTES // (4 * self.dimension))
        # Read, not mapped: pages of a mapped file count as the process's memory.
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for first in range(0, self.rows, step):
                count = min(step, self.rows - first)
                flat = np.fromfile(file, self.dtype, count * self.dimension)
                yield flat.reshape(count, self.dimension).astype(np.float32, copy=False)

    def sample(self, count: int, seed: int) -> Floats:
        """[min(count, rows), dimension] float32, drawn without repetition, in the order of the rows."""
        if count >= self.rows:
            return np.concatenate(list(self.blocks()))
        chosen = np.sort(np.random.default_rng(seed).choice(self.rows, count, replace=False, shuffle=False))
        sample = np.empty((count, self.dimension), dtype=np.float32)
        first = 0
        for block in self.blocks():
            low, high = np.searchsorted(chosen, (first, first + len(block)))
            sample[low:high] = block[chosen[low:high] - first]
            first += len(block)
        return sample


class ChunkWriter:
    """Fills `embeddings`, and notes in `flags`, one byte a chunk, what is done."""

    def __init__(self, embeddings: Embeddings, flags: Path) -> None:
        self._embeddings = embeddings
        chunks = -(-embeddings.rows // CHUNK_ROWS)
        if not flags.exists():
            flags.write_bytes(bytes(chunks))
        self._done = np.frombuffer(flags.read_bytes().ljust(chunks, b"\0")[:chunks], dtype=np.uint8).astype(bool)
        self._vectors = embeddings.path.open("r+b")
        self._flags = flags.open("r+b")

    def close(self) -> None:
        """Close both files."""
        self._vectors.close()
        self._flags.close()

    def missing(self) -> list[int]:
        """Numbers of the chunks that are still to be written, in order."""
        return list(map(int, np.flatnonzero(~self._done)))

    def rows_of(self, chunk: int) -> range:
        """The rows of a chunk."""
        return range(chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, self._embeddings.rows))

    def done_rows(self) -> int:
        """Rows whose vectors are there."""
        return sum(len(self.rows_of(int(chunk))) for chunk in np.flatnonzero(self._done))

    def put(self, chunk: int, vectors: Floats) -> None:
        """Write the vectors of a chunk, [its rows, dimension]. Raises RunError for what is not a number."""
        with np.errstate(over="ignore"):  # told apart below, with the line
            stored: NDArray[np.floating] = vectors.astype(self._embeddings.dtype)
        rows = self.rows_of(chunk)
        if stored.shape != (len(rows), self._embeddings.dimension):
            raise ValueError(f"chunk {chunk} needs {len(rows)} vectors, got {list(stored.shape)}")
        if not np.isfinite(stored).all():
            bad = rows[int(np.flatnonzero(~np.isfinite(stored).all(axis=1))[0])]
            raise RunError(
                f"the vector of line {bad + 1} of the corpus is not finite in {stored.dtype}: encode in float32, "
                "or store float32"
            )
        self._vectors.seek(self._embeddings.offset + rows.start * stored[0].nbytes)
        self._flags.seek(chunk)
        for file, content in ((self._vectors, stored.tobytes()), (self._flags, b"\1")):
            file.write(content)
            file.flush()
            os.fdatasync(file.fileno())
        self._done[chunk] = True
