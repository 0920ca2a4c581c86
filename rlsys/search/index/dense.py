"""Builds, opens and searches dense (FAISS) indexes. An index folder is self-contained:

    index.faiss:     vectors, inner product, row r = line r + 1 of the corpus
    corpus.jsonl:    the indexed corpus, linked or copied, so that the folder can be moved
    embeddings.npy:  the encoded vectors, if kept
    manifest.json:   inputs of the index (`Manifest`)

Invariants of a build:

- Memory holds one chunk per worker, one block of vectors, the training sample and the FAISS index, for any corpus size.
- A killed build continues with the chunks that are missing on disk, and ends with the same vectors. A chunk has the
  same rows in every build, and is marked as done once it is on disk. Training and filling the FAISS index start over.
- An index at `out` is always complete (see `folder`).
- Invalid inputs are rejected before the first passage is encoded.

Invariants of a search:

- An index is opened only with the corpus and the number of rows that it was built from.
- Queries are encoded like the passages: same weights, pooling, prefixes, normalisation and truncation.
- The ranking of a query does not depend on `topk`, as long as `topk` is at most `depth`.

The FAISS type is any string of faiss.index_factory, such as Flat, SQ8, HNSW64, "IVF1024,Flat" or
"OPQ48_192,IVF4096,PQ48x4fs"; the metric is always the inner product. PCA types rank by inner products of mean-centred
vectors.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray

from rlsys.errors import RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.process import EncoderPool, open_encoder
from rlsys.search.encoders.spec import EncoderFacts, EncoderSpec, Floats, QueryEncoder
from rlsys.search.index.folder import (
    DENSE,
    IndexDraft,
    OnProgress,
    add_corpus,
    claim_draft,
    link,
    new_array,
    open_corpus,
    read_values,
    refuse_foreign,
    silent,
    typed,
)
from rlsys.search.retrieval import Hit

INDEX_FILE = "index.faiss"
EMBEDDINGS_FILE = "embeddings.npy"
DTYPES = ("float32", "float16")
CHUNK_ROWS = 1024
BLOCK_BYTES = 1 << 26
_RECIPE = "recipe.json"
_FLAGS = "done"
_SEED = 0
_TWO_ENCODERS = ("dpr",)
"""Families with separate encoders for queries and passages."""
FLAT = "Flat"
DEPTH = 128
"""Minimum number of hits requested from FAISS; exceeds the server's default max_topk."""
EF_SEARCH = 128
EF_CONSTRUCTION = 100
"""HNSW efConstruction; FAISS's default of 40 loses recall."""
_MIN_NPROBE = 8
_MATRIX_QUERIES = 3
"""Batch size from which matrix products beat one scan per query, for any number of vectors."""
_NEVER = 2**31 - 1
_CENTROIDS = 256
"""Number of centroids that a code distinguishes; FAISS's codes have 8 bits by default."""
_UNSUPPORTED = ("IndexIDMap", "IndexIDMap2", "IndexNSG", "IndexNSGFlat", "IndexNSGPQ", "IndexNSGSQ", "IndexNNDescent")
"""FAISS classes that assign row ids themselves or cannot be filled block by block."""
_GPU = ("IndexFlat", "IndexFlatIP", "IndexIVFFlat", "IndexIVFPQ", "IndexIVFScalarQuantizer", "IndexPreTransform")
_INNER = ("index", "base_index", "refine_index", "quantizer", "storage")
"""FAISS attributes that hold a nested index."""
_MMAP: int = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP)
"""Flag that maps the whole index; before FAISS 1.11, a flag that maps only inverted lists."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Inputs of a dense index. Equal manifests mean equal indexes."""

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
    embeddings_dtype: str
    """Dtype of the stored embeddings: float32 or float16."""
    faiss_type: str
    """String of faiss.index_factory."""
    nprobe: int | None
    """Default number of lists that a query visits; null without lists."""
    ef_search: int | None
    """Default breadth of a graph search; null without a graph."""

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Read the folder's manifest. Raises UserError if it is missing or not of a dense index."""
        return typed(cls, read_values(folder, [DENSE], f"{DENSE!r}: give a dense index"), folder)

    def embeddings(self) -> dict[str, Any]:
        """Return the keys that the embeddings depend on; if these are equal, the embeddings can be reused."""
        return {k: v for k, v in asdict(self).items() if k not in ("faiss_type", "nprobe", "ef_search")}

    def query_spec(self, encoder: str | None, device: str, dtype: str | None) -> EncoderSpec:
        """Return the spec that encodes queries like the passages; `encoder` overrides the recorded name or folder."""
        shared = ("family", "max_tokens", "pooling", "query_prefix", "passage_prefix", "normalize")
        made = {name: getattr(self, name) for name in shared}
        return EncoderSpec(encoder or self.encoder, device=device, dtype=dtype, **made)


class DenseIndex(NamedTuple):
    """An open index folder."""

    manifest: Manifest
    corpus: Corpus
    vectors: Vectors

    @classmethod
    def open(cls, folder: str | Path, options: SearchOptions | None = None) -> DenseIndex:
        """Open an index that `build` wrote. Raises UserError if manifest, corpus and vectors do not match."""
        folder = Path(folder)
        manifest = Manifest.read(folder)
        corpus = open_corpus(folder, manifest.corpus_sha256)
        recorded = FaissSettings(manifest.nprobe, manifest.ef_search)
        vectors = Vectors.open(folder / INDEX_FILE, options, faiss_type=manifest.faiss_type, recorded=recorded)
        held = (vectors.rows, len(corpus), vectors.dimension)
        if held != (manifest.rows, manifest.rows, manifest.dimension):
            raise UserError(
                f"{folder} holds {vectors.rows} vectors of {vectors.dimension} dimensions for {len(corpus)} passages, but "
                f"its manifest says {manifest.rows} of {manifest.dimension}: build the index again.",
                code="mismatch",
                key=str(folder),
            )
        return cls(manifest, corpus, vectors)


class VectorRetriever:
    """Encodes queries and finds the passages with the nearest vectors."""

    parallel = 1
    """1, because a single search uses all FAISS threads."""

    def __init__(self, vectors: Vectors, corpus: Corpus, encoder: QueryEncoder, faiss_type: str) -> None:
        self._vectors, self._corpus, self._encoder, self._faiss_type = vectors, corpus, encoder, faiss_type

    @classmethod
    def open(
        cls,
        folder: str | Path,
        encoder: str | None = None,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        options: SearchOptions | None = None,
        own_process: bool = False,
    ) -> VectorRetriever:
        """Open an index with its encoder, on `device` in `dtype` (see `EncoderSpec`).

        `encoder` overrides the recorded name or folder of the weights. With `own_process`, a subprocess encodes the
        queries until `close`. Raises UserError for an inconsistent folder, and for weights other than those that
        encoded the passages. Exception: for DPR, `encoder` may be the separate query encoder.
        """
        made, corpus, vectors = DenseIndex.open(folder, options)
        loaded = open_encoder(made.query_spec(encoder, device, dtype), own_process=own_process)
        try:
            _require_dimension(loaded.facts, made.dimension, folder, "that belongs to the index")
            _require_weights(loaded.facts, made, folder, named=encoder is not None)
        except UserError:
            loaded.close()
            raise
        return cls(vectors, corpus, loaded, made.faiss_type)

    def prepare(self, queries: Sequence[str]) -> Floats:
        """Return the query vectors [n, dimension]."""
        return self._encoder.encode_queries(queries)

    def find(self, prepared: Floats, topk: int) -> list[list[Hit]]:
        """Return up to `topk` hits per query vector, best first."""
        scores, rows = self._vectors.search(prepared, topk)
        # One fetch for all rows, so that disk reads overlap; row -1 means no hit.
        passages = iter(self._corpus.fetch(rows[rows >= 0].tolist()))
        return [
            [Hit(score, next(passages)) for score, row in zip(line_scores, line_rows, strict=True) if row >= 0]
            for line_scores, line_rows in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Stop the encoder's subprocess, if any; files are unmapped with the last reference."""
        self._encoder.close()

    def describe(self) -> Mapping[str, Any]:
        """Return passages, corpus, encoder, dimension, FAISS type, and nprobe and ef_search if set."""
        corpus = {"passages": len(self._corpus), "corpus_sha256": self._corpus.checksum}
        vectors = {"dimension": self._vectors.dimension, "faiss_type": self._faiss_type}
        settings = {key: value for key, value in asdict(self._vectors.settings).items() if value is not None}
        return {"kind": DENSE, **corpus, "encoder": self._encoder.facts.name, **vectors, **settings}


def _require_dimension(facts: EncoderFacts, dimension: int, held_by: str | Path, whose: str) -> None:
    if facts.dimension != dimension:
        problem = f"encoder {facts.name!r} gives vectors of {facts.dimension} dimensions, but {held_by} has {dimension}"
        raise UserError(f"{problem}: give the encoder {whose}.", code="mismatch", key=facts.name)


def _require_weights(facts: EncoderFacts, made: Manifest, folder: str | Path, *, named: bool) -> None:
    """Raise UserError for weights other than those that encoded the passages.

    Any weights are accepted if the family has separate encoders and the user `named` the query encoder.
    """
    if facts.checksum != made.encoder_sha256:
        if not named or made.family not in _TWO_ENCODERS:
            problem = f"the weights of encoder {facts.name!r} are not those that {folder} was built with"
            raise UserError(
                f"{problem}: give the encoder that belongs to it, or build the index again.",
                code="mismatch",
                key=facts.name,
            )
        _log.info("queries are encoded by %s, but the passages were encoded by %s", facts.name, made.encoder)


def open_prebuilt(
    index_file: str | Path,
    corpus: str | Path,
    encoder: EncoderSpec,
    options: SearchOptions | None = None,
    *,
    own_process: bool = False,
) -> VectorRetriever:
    """Open a bare FAISS file, as published by Search-R1 and others, with its corpus and a query encoder.

    Row r of the file is line r + 1 of `corpus`. Without a manifest the passage encoder cannot be verified, so a warning
    names the query encoder. Raises UserError if rows, dimension or metric do not match.
    """
    index_file = Path(index_file)
    if not index_file.is_file():
        raise UserError(
            f"FAISS index {index_file} is not a file: give the one that belongs to the corpus.",
            code="not_found",
            key=str(index_file),
        )
    passages = Corpus.open(corpus)
    vectors = Vectors.open(index_file, options)
    if vectors.rows != len(passages):
        problem = f"{index_file} holds {vectors.rows} vectors, but {corpus} has {len(passages)} passages"
        raise UserError(
            f"{problem}: give the corpus that the index was built from, unchanged.", code="mismatch", key=str(corpus)
        )
    loaded = open_encoder(encoder, own_process=own_process)
    facts = loaded.facts
    try:
        _require_dimension(facts, vectors.dimension, index_file, "that the index was built with")
    except UserError:
        loaded.close()
        raise
    _log.warning(
        "%s does not record its encoder: queries are encoded by %s (%s, query prefix %r, at most %d tokens); if the "
        "passages were encoded by another encoder, results are silently wrong",
        *(index_file, facts.name, facts.family, facts.family.query_prefix, facts.max_tokens),
    )
    return VectorRetriever(vectors, passages, loaded, vectors.faiss_type)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Build settings of a dense index, besides corpus and encoder."""

    faiss_type: str = FLAT
    """Any string of faiss.index_factory."""
    nprobe: int | None = None
    """Recorded as the index's default; None takes sqrt(nlist), at least 8."""
    ef_search: int | None = None
    """Recorded as the index's default; None takes 128."""
    embeddings_dtype: str = "float32"
    keep_embeddings: bool = True
    """Keep the embeddings in the folder, so that another FAISS type can be built without encoding."""
    max_train_rows: int = 1_000_000
    """Maximum number of training vectors, sampled with a fixed seed and held in memory."""
    workers: int = 1
    """Number of encoding processes."""

    def __post_init__(self) -> None:
        if self.embeddings_dtype not in DTYPES:
            raise UserError(
                f"embeddings dtype {self.embeddings_dtype!r} is unknown: choose one of {', '.join(DTYPES)}.",
                code="unknown",
                key="embeddings_dtype",
            )
        if self.workers < 1:
            raise UserError(
                f"workers {self.workers} is out of range: give 1 or more.", code="out_of_range", key="workers"
            )


def build(
    corpus: Corpus,
    encoder: EncoderSpec,
    out: str | Path,
    options: BuildOptions | None = None,
    progress: OnProgress = silent,
) -> bool:
    """Build the index folder `out`; False if it exists already with the same manifest.

    A different index at `out` is replaced when the new one is complete; if only FAISS type or settings differ, its
    embeddings are reused. Raises UserError for invalid inputs before encoding starts, and RunError if the disk is full;
    encoded chunks then stay in the draft.
    """
    out = Path(out).absolute()
    options = options or BuildOptions()
    refuse_foreign(out)  # checked before the encoder is loaded
    planned = _plan(corpus, encoder, options)
    if _manifest_at(out) == planned:
        return False
    with claim_draft(out) as draft:
        there = _manifest_at(out)
        if there == planned:
            return False
        searched: dict[str, Any] = {"nprobe": planned.nprobe, "ef_search": planned.ef_search}
        same_vectors = there is not None and replace(there, **searched) == planned
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
            # Written through Python, because FAISS does not report a short write at the end of a file.
            with (draft.folder / INDEX_FILE).open("wb") as file:
                faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]
        add_corpus(corpus, draft.folder)
        draft.complete(DENSE, asdict(planned))
    if not options.keep_embeddings:
        (out / EMBEDDINGS_FILE).unlink(missing_ok=True)
    return True


def _plan(corpus: Corpus, spec: EncoderSpec, options: BuildOptions) -> Manifest:
    """Return the manifest of the index to build. Raises UserError if it cannot be built."""
    facts = open_encoder(spec).facts
    index = new_index(options.faiss_type, facts.dimension)
    least, most = least_train_rows(index), min(len(corpus), options.max_train_rows)
    if most < least:
        raise UserError(
            f"FAISS type {options.faiss_type!r} needs at least {least} training vectors, but gets {most} "
            f"(passages: {len(corpus)}, max_train_rows: {options.max_train_rows}): give a smaller type, such as Flat.",
            code="mismatch",
            key="faiss_type",
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
        **asdict(settings),
    )


def _manifest_at(folder: Path) -> Manifest | None:
    """Return the manifest of a dense index in `folder`, or None if it cannot be read."""
    try:
        return Manifest.read(folder)
    except UserError:
        return None


def _encode(
    corpus: Corpus, spec: EncoderSpec, planned: Manifest, options: BuildOptions, draft: IndexDraft, progress: OnProgress
) -> None:
    """Encode the chunks that are missing in the draft; start over if the draft has other inputs."""
    recipe = json.dumps(planned.embeddings() | {"chunk_rows": CHUNK_ROWS, "dtype": spec.dtype}, indent=2)
    noted = draft.home / _RECIPE
    if not (noted.is_file() and noted.read_text(encoding="utf-8") == recipe):
        if noted.is_file():
            _log.warning("%s holds an incomplete index of other inputs: deleting it", draft.home)
        for _ in corpus.chunks(CHUNK_ROWS):
            pass  # parses every line, so that a bad one raises now rather than after hours of encoding
        draft.clear()
        shape, dtype = (planned.rows, planned.dimension), np.dtype(planned.embeddings_dtype)
        new_array(draft.folder / EMBEDDINGS_FILE, shape, dtype).flush()
        noted.write_text(recipe, encoding="utf-8")
    with closing(ChunkWriter(_open_embeddings(draft, planned), draft.home / _FLAGS)) as writer:
        missing = writer.missing()
        done = planned.rows - sum(len(writer.rows_of(chunk)) for chunk in missing)
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
    """Return a trained FAISS index that holds all vectors of `embeddings`."""
    index = new_index(planned.faiss_type, planned.dimension)
    if not index.is_trained:
        # More vectors do not help: FAISS's k-means uses at most 256 per centroid.
        gaining = 256 * max(_CENTROIDS, least_train_rows(index))
        count = min(planned.rows, options.max_train_rows, gaining)
        progress("train", 0, count)
        try:
            index.train(embeddings.sample(count, _SEED))
        except RuntimeError as error:
            problem = f"FAISS cannot train {planned.faiss_type!r} on {count} vectors ({error})"
            raise UserError(
                f"{problem}: build again with another type; the encoded vectors are kept.",
                code="unsupported",
                key="faiss_type",
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


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A .npy file of `rows` vectors, complete or still being filled."""

    path: Path
    rows: int
    dimension: int
    dtype: np.dtype
    offset: int
    """Byte offset of the first vector."""

    @classmethod
    def open(cls, path: Path, rows: int, dimension: int, dtype: str) -> Embeddings:
        """Open the file. Raises UserError unless it holds [rows, dimension] in `dtype`."""
        try:
            mapped = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read ({error}): remove it and build again.", code="malformed", key=str(path)
            ) from None
        if (mapped.shape, mapped.dtype) != ((rows, dimension), np.dtype(dtype)):
            problem = f"{path} holds {list(mapped.shape)} of {mapped.dtype}, not {[rows, dimension]} of {dtype}"
            raise UserError(f"{problem}: remove it and build again.", code="mismatch", key=str(path))
        return cls(path, rows, dimension, mapped.dtype, int(mapped.offset))

    def blocks(self) -> Iterator[Floats]:
        """Yield all vectors in order, as float32 blocks [n, dimension] of up to BLOCK_BYTES."""
        step = max(1, BLOCK_BYTES // (4 * self.dimension))
        with self.path.open("rb") as file:  # not mapped, because mapped pages count as the process's memory
            file.seek(self.offset)
            for first in range(0, self.rows, step):
                count = min(step, self.rows - first)
                flat = np.fromfile(file, self.dtype, count * self.dimension)
                yield flat.reshape(count, self.dimension).astype(np.float32, copy=False)

    def sample(self, count: int, seed: int) -> Floats:
        """Return random vectors [min(count, rows), dimension] float32, without repetition, in row order."""
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
    """Writes chunks of `embeddings` and marks each as done in the file `flags`, one byte per chunk."""

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
        """Return the numbers of the missing chunks, in order."""
        return list(map(int, np.flatnonzero(~self._done)))

    def rows_of(self, chunk: int) -> range:
        return range(chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, self._embeddings.rows))

    def put(self, chunk: int, vectors: Floats) -> None:
        """Write and fsync the vectors of a chunk, [chunk rows, dimension]. Raises RunError for non-finite values."""
        with np.errstate(over="ignore"):  # overflow is reported below, with its line
            stored: NDArray[np.floating] = vectors.astype(self._embeddings.dtype)
        rows = self.rows_of(chunk)
        if stored.shape != (len(rows), self._embeddings.dimension):
            raise ValueError(f"chunk {chunk} needs {len(rows)} vectors, got {list(stored.shape)}")
        if not np.isfinite(stored).all():
            bad = rows[int(np.flatnonzero(~np.isfinite(stored).all(axis=1))[0])]
            problem = f"the vector of line {bad + 1} of the corpus is not finite in {stored.dtype}"
            raise RunError(f"{problem}: encode in float32, or store float32")
        self._vectors.seek(self._embeddings.offset + rows.start * stored[0].nbytes)
        self._flags.seek(chunk)
        for file, content in ((self._vectors, stored.tobytes()), (self._flags, b"\1")):
            file.write(content)
            file.flush()
            os.fdatasync(file.fileno())
        self._done[chunk] = True


@dataclass(frozen=True, slots=True)
class FaissSettings:
    """Search breadth of an approximate index.

    None stands for the index's default, or for a setting that the index lacks.
    """

    nprobe: int | None = None
    """Number of IVF lists that a query visits."""
    ef_search: int | None = None
    """Breadth of an HNSW search."""


@dataclass(frozen=True, slots=True)
class SearchOptions(FaissSettings):
    """Options to open and search a dense index."""

    mmap: bool = False
    """Map the vectors instead of reading them: opens at once and shares memory between processes of a host, but the
    first searches wait for the disk. The packed codes of fast-scan types are always read in full."""
    faiss_gpu: bool = False
    """Spread the vectors over all GPUs as float16."""
    depth: int = DEPTH
    """The ranking does not depend on `topk` as long as `topk` is at most this number; at least 1."""


def new_index(faiss_type: str, dimension: int) -> faiss.Index:
    """Create an empty index. Raises UserError for an invalid factory string or an unsupported type."""
    try:
        index = faiss.index_factory(dimension, faiss_type, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        problem = (
            f"FAISS type {faiss_type!r} does not support inner products of {dimension} dimensions ({_reason(error)})"
        )
        remedy = "give a string of faiss.index_factory, such as Flat, HNSW64 or IVF1024,Flat"
        raise UserError(f"{problem}: {remedy}.", code="unknown", key="faiss_type") from None
    layers = list(_layers(index))
    if found := [_name(layer) for layer in layers if _name(layer) in _UNSUPPORTED]:
        problem = f"FAISS type {faiss_type!r} ({found[0]}) cannot be filled block by block with rows in their order"
        raise UserError(f"{problem}: give another one, such as HNSW64.", code="unsupported", key="faiss_type")
    _require_inner_product(index, f"FAISS type {faiss_type!r}", "faiss_type")
    for layer in layers:
        if hasattr(layer, "hnsw"):
            layer.hnsw.efConstruction = EF_CONSTRUCTION
        if hasattr(layer, "do_polysemous_training"):
            # Polysemous training takes seconds per sub-vector and helps only a Hamming filter, unused here.
            layer.do_polysemous_training = False
    return index


def least_train_rows(index: faiss.Index) -> int:
    """Return the minimum number of training vectors; 0 for an index without training."""
    return 0 if index.is_trained else max(map(_least_rows, _layers(index)))


def reserve(index: faiss.Index, rows: int) -> None:
    """Allocate memory for `rows` codes in an empty index; growing by doubling would briefly hold two copies."""
    for layer in _layers(index):
        if isinstance(layer, faiss.IndexFlatCodes) and layer.ntotal == 0:
            layer.codes.resize(rows * layer.code_size)
            layer.codes.resize(0)


def settle(
    index: faiss.Index, asked: FaissSettings, *, faiss_type: str, recorded: FaissSettings | None = None
) -> FaissSettings:
    """Return the `asked` settings, else the `recorded` ones, else the type's defaults.

    Raises UserError for values out of range and for a setting that the type lacks.
    """
    recorded = recorded or FaissSettings()
    nlist = max((layer.nlist for layer in _layers(index) if hasattr(layer, "nlist")), default=None)
    graph = any(hasattr(layer, "hnsw") for layer in _layers(index))
    for key, value, most in (
        ("nprobe", asked.nprobe, nlist),
        ("ef_search", asked.ef_search, _NEVER if graph else None),
    ):
        if value is not None and most is None:
            raise UserError(
                f"{key}={value} is given, but FAISS type {faiss_type!r} has no {key}: leave it out.",
                code="conflict",
                key=key,
            )
        if value is not None and most is not None and not 1 <= value <= most:
            most_text = "the number of passages" if most == _NEVER else most
            raise UserError(f"{key}={value} is out of range: give 1 to {most_text}.", code="out_of_range", key=key)
    for key, value in asdict(recorded).items():
        if value is not None and not 1 <= value <= _NEVER:
            raise UserError(
                f"the manifest's {key}={value} is out of range: build the index again.", code="out_of_range", key=key
            )
    nprobe = None if nlist is None else min(nlist, max(_MIN_NPROBE, math.isqrt(nlist)))
    ef_search = asked.ef_search or recorded.ef_search or (EF_SEARCH if graph else None)
    return FaissSettings(asked.nprobe or recorded.nprobe or nprobe, ef_search)


class Vectors:
    """A searchable FAISS index. Not thread-safe."""

    def __init__(self, index: faiss.Index, settings: FaissSettings, *, depth: int = DEPTH, gpu: bool = False) -> None:
        self.settings = settings
        self.rows, self.dimension = int(index.ntotal), int(index.d)
        self._index, self._depth = index, depth
        self._graphs = [layer.hnsw for layer in _layers(index) if hasattr(layer, "hnsw")]
        for layer in _layers(index):
            if settings.nprobe is not None and hasattr(layer, "nlist"):
                layer.nprobe = min(settings.nprobe, layer.nlist)
        self._broaden(depth)
        if gpu:
            # Last, because the GPU copy keeps the settings that the index has when it is copied.
            sharded = faiss.GpuMultipleClonerOptions()
            sharded.shard = sharded.useFloat16 = True
            self._index = faiss.index_cpu_to_all_gpus(index, co=sharded)
        self.faiss_type = _name(faiss.downcast_index(self._index))
        """FAISS class name, used if the factory string is unknown."""

    @classmethod
    def open(
        cls,
        path: Path,
        options: SearchOptions | None = None,
        *,
        faiss_type: str | None = None,
        recorded: FaissSettings | None = None,
    ) -> Vectors:
        """Open the FAISS file at `path`; `recorded` settings apply where `options` has None."""
        options = options or SearchOptions()
        try:
            index = faiss.read_index(str(path), _MMAP if options.mmap else 0)
        except RuntimeError as error:
            raise UserError(
                f"{path} is missing or damaged ({_reason(error)}): build the index again.",
                code="malformed" if path.is_file() else "not_found",
                key=str(path),
            ) from None
        _require_inner_product(index, str(path), str(path))
        if options.depth < 1:
            raise UserError(f"depth {options.depth} is out of range: give 1 or more.", code="out_of_range", key="depth")
        if options.faiss_gpu:
            require_gpu(index)
        name = faiss_type or _name(faiss.downcast_index(index))
        settings = settle(index, options, faiss_type=name, recorded=recorded)
        return cls(index, settings, depth=options.depth, gpu=options.faiss_gpu)

    def search(self, queries: Floats, topk: int) -> tuple[Floats, NDArray[np.int64]]:
        """Return scores and rows of the best vectors for `queries` [n, dimension], best first.

        Both are [n, min(topk, rows)]; row -1 means no hit. FAISS always looks for at least `depth` hits. Otherwise the
        ranking would vary with `topk`, because graph breadth, refinement candidates and the order of ties depend on the
        number of hits.
        """
        # FAISS's default threshold suits many cores; with few, it makes a batch of 32 nine times slower.
        faiss.cvar.distance_compute_blas_threshold = 1 if len(queries) >= _MATRIX_QUERIES else _NEVER
        wanted = min(max(topk, self._depth), self.rows)
        if wanted > self._depth:
            self._broaden(wanted)
        scores, rows = self._index.search(queries, wanted)
        if wanted > self._depth:
            self._broaden(self._depth)
        return scores[:, :topk], rows[:, :topk]

    def _broaden(self, hits: int) -> None:
        """Raise efSearch to at least `hits`, because a graph search finds no more hits than its breadth."""
        for graph in self._graphs:
            graph.efSearch = max(self.settings.ef_search or 0, hits)


def gpu_count() -> int:
    """Return the number of GPUs usable by FAISS; 0 for a CPU build."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def require_gpu(index: faiss.Index) -> None:
    """Raise UserError unless FAISS has a GPU and supports this index on it."""
    if gpu_count() == 0:
        knows = hasattr(faiss, "StandardGpuResources")
        has = "sees no GPU" if knows else "is built without GPU support"
        raise UserError(
            f"faiss_gpu is set, but this FAISS {has}: install faiss-gpu-cu12, or leave it out.",
            code="no_room" if knows else "not_installed",
            key="faiss_gpu",
        )
    if held := [_name(layer) for layer in _layers(index) if _name(layer) not in _GPU]:
        problem = f"faiss_gpu is set, but FAISS supports {held[0]} only on the CPU"
        raise UserError(
            f"{problem}: leave it out, or build a type such as Flat or IVF4096,SQ8.",
            code="unsupported",
            key="faiss_gpu",
        )


def _require_inner_product(index: faiss.Index, what: str, key: str) -> None:
    for layer in _layers(index):
        if layer.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise UserError(
                f"{what} ({_name(layer)}) does not rank by inner products: give another one.",
                code="unsupported",
                key=key,
            )


def _layers(index: faiss.Index) -> Iterator[Any]:
    """Yield the index and its nested indexes, downcast, outermost first."""
    index = faiss.downcast_index(index)
    yield index
    for attribute in _INNER:
        if (inner := getattr(index, attribute, None)) is not None:
            yield from _layers(inner)


def _least_rows(layer: Any) -> int:
    """Return how many training vectors `layer` itself needs at least: one per k-means centroid or PCA dimension."""
    least = [1, getattr(layer, "nlist", 0), _CENTROIDS if hasattr(layer, "rq") else 0]
    if hasattr(layer, "pq"):
        least.append(layer.pq.ksub)
    chain: Any = getattr(layer, "chain", None)
    for number in range(0 if chain is None else chain.size()):
        transform = faiss.downcast_VectorTransform(chain.at(number))
        if isinstance(transform, faiss.OPQMatrix):
            least.append(_CENTROIDS)
        if isinstance(transform, faiss.PCAMatrix):
            least.append(transform.d_out)
    return int(max(least))


def _name(index: Any) -> str:
    return type(index).__name__


def _reason(error: RuntimeError) -> str:
    """Return FAISS's error text without its prefix of function, file and line."""
    return str(error).splitlines()[0].rsplit(": ", 1)[-1].strip()
