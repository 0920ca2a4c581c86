"""Vectors in FAISS: their types, how they are trained, opened and searched.

A type is any string that faiss.index_factory takes: Flat, SQ8, PQ48x4fs, HNSW64, "IVF1024,Flat",
"OPQ48_192,IVF4096,PQ48x4fs", "IVF256,PQ48x4fs,RFlat" and so on; the metric is the inner product always. PCA subtracts
the mean of the passages, so its inner products are those of centred vectors.

Invariants: a search returns rows of the index or -1 at its end, never anything else; what is found for a query does not
depend on how many hits are asked for, as long as these are at most `depth`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from rlsys.errors import UserError
from rlsys.search.encoders.spec import Floats

FLAT = "Flat"
DEPTH = 128
"""Hits that FAISS is asked for at least; more than a server gives by default."""
EF_SEARCH = 128
EF_CONSTRUCTION = 100
"""Breadth of the search for neighbours when a graph is built; FAISS's own 40 loses recall."""
_MIN_NPROBE = 8
_MATRIX_QUERIES = 3
"""Queries from which on products of matrices beat one scan of the vectors a query, whatever their number."""
_NEVER = 2**31 - 1
_CENTROIDS = 256
"""Of a code of eight bits, FAISS's default."""
_WHOLE = ("IndexIDMap", "IndexIDMap2", "IndexNSG", "IndexNSGFlat", "IndexNSGPQ", "IndexNSGSQ", "IndexNNDescent")
"""Types that name rows themselves or cannot be filled block by block."""
_GPU = ("IndexFlat", "IndexFlatIP", "IndexIVFFlat", "IndexIVFPQ", "IndexIVFScalarQuantizer", "IndexPreTransform")
_INNER = ("index", "base_index", "refine_index", "quantizer", "storage")
"""Attributes in which FAISS keeps an index within another."""
_MMAP: int = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP)
"""Maps everything; before FAISS 1.11 there is only the flag that maps inverted lists and reads the rest."""


@dataclass(frozen=True, slots=True)
class FaissSettings:
    """Breadth of a search in an approximate index; None for the index's own, or for what a type does not have."""

    nprobe: int | None = None
    """Lists of an IVF index that a query visits."""
    ef_search: int | None = None
    """Breadth of a search in an HNSW index."""


@dataclass(frozen=True, slots=True)
class SearchOptions(FaissSettings):
    """How the vectors of a dense index are opened and searched."""

    mmap: bool = False
    """Map the vectors in place of reading them: opens at once, and processes of a host share the memory, but the first
    searches wait for the disk. What a fast-scan type packs together is read in full."""
    faiss_gpu: bool = False
    """Spread the vectors over all GPUs as float16."""
    depth: int = DEPTH
    """Hits up to which a query's answer is the same however many are asked for: 1 or more."""


def new_index(faiss_type: str, dimension: int) -> faiss.Index:
    """An empty index. Raises UserError for a string that FAISS does not take, or a type that does not fit."""
    try:
        index = faiss.index_factory(dimension, faiss_type, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise UserError(
            f"FAISS type {faiss_type!r} is not one for inner products of {dimension} dimensions "
            f"({_reason(error)}): give a string of faiss.index_factory, such as Flat, HNSW64 or IVF1024,Flat"
        ) from None
    layers = list(_layers(index))
    if whole := [_name(layer) for layer in layers if _name(layer) in _WHOLE]:
        raise UserError(
            f"FAISS type {faiss_type!r} ({whole[0]}) cannot be filled block by block with rows in their order: "
            "give another one, such as HNSW64"
        )
    _require_inner_product(index, f"FAISS type {faiss_type!r}")
    for layer in layers:
        if hasattr(layer, "hnsw"):
            layer.hnsw.efConstruction = EF_CONSTRUCTION
        if hasattr(layer, "do_polysemous_training"):
            # It orders codes for a Hamming filter, which no search here uses, at seconds for each sub-vector.
            layer.do_polysemous_training = False
    return index


def least_train_rows(index: faiss.Index) -> int:
    """Vectors without which the index cannot be trained; 0 for one that learns nothing."""
    return 0 if index.is_trained else max(map(_least_rows, _layers(index)))


def train_rows(index: faiss.Index) -> int:
    """Vectors beyond which training gains nothing: FAISS's k-means takes 256 a centroid at most."""
    return 256 * max(_CENTROIDS, least_train_rows(index))


def reserve(index: faiss.Index, rows: int) -> None:
    """Take the memory for `rows` codes in an empty, trained index.

    FAISS would double it whenever it is full, and hold both copies for a while.
    """
    for layer in _layers(index):
        if isinstance(layer, faiss.IndexFlatCodes) and layer.ntotal == 0:
            layer.codes.resize(rows * layer.code_size)
            layer.codes.resize(0)


def settle(
    index: faiss.Index, asked: FaissSettings, *, faiss_type: str, recorded: FaissSettings | None = None
) -> FaissSettings:
    """The settings that hold: those asked for, else the recorded ones, else the type's defaults.

    By default sqrt(nlist) lists are visited, 8 at least, and graphs are searched with breadth 128. Raises UserError for
    a setting that the type does not have or a number out of range.
    """
    recorded = recorded or FaissSettings()
    nlist = max((layer.nlist for layer in _layers(index) if hasattr(layer, "nlist")), default=None)
    graph = any(hasattr(layer, "hnsw") for layer in _layers(index))
    limits = {"nprobe": (asked.nprobe, nlist), "ef_search": (asked.ef_search, _NEVER if graph else None)}
    for key, (value, most) in limits.items():
        if value is not None and most is None:
            raise UserError(f"{key}={value} is given, but an index of FAISS type {faiss_type!r} has none: leave it out")
        if value is not None and most is not None and not 1 <= value <= most:
            most_text = "as many as there are passages" if most == _NEVER else most
            raise UserError(f"{key}={value} is out of range: give 1 to {most_text}")
    for key, value in asdict(recorded).items():
        if value is not None and not 1 <= value <= _NEVER:
            raise UserError(f"the manifest's {key}={value} is out of range: build the index again")
    nprobe = None if nlist is None else min(nlist, max(_MIN_NPROBE, math.isqrt(nlist)))
    return FaissSettings(
        nprobe=asked.nprobe or recorded.nprobe or nprobe,
        ef_search=asked.ef_search or recorded.ef_search or (EF_SEARCH if graph else None),
    )


class Vectors:
    """An index that is ready to be searched, by one thread at a time."""

    def __init__(self, index: faiss.Index, settings: FaissSettings, *, depth: int = DEPTH, gpu: bool = False) -> None:
        self.settings = settings
        self.rows, self.dimension = int(index.ntotal), int(index.d)
        self._index = index
        self._depth = depth
        self._graphs = [layer.hnsw for layer in _layers(index) if hasattr(layer, "hnsw")]
        for layer in _layers(index):
            if settings.nprobe is not None and hasattr(layer, "nlist"):
                layer.nprobe = min(settings.nprobe, layer.nlist)
        self._broaden(depth)
        if gpu:
            # Last, because a copy on a GPU keeps the settings that it was made with.
            self._index = _to_gpus(index)
        self.faiss_type = _name(faiss.downcast_index(self._index))
        """FAISS's name of its class, for an index whose factory string is not known."""

    @classmethod
    def open(
        cls,
        path: Path,
        options: SearchOptions | None = None,
        *,
        faiss_type: str | None = None,
        recorded: FaissSettings | None = None,
    ) -> Vectors:
        """Open the FAISS file at `path`, with the `recorded` settings where `options` has none."""
        options = options or SearchOptions()
        try:
            index = faiss.read_index(str(path), _MMAP if options.mmap else 0)
        except RuntimeError as error:
            raise UserError(f"{path} is missing or damaged ({_reason(error)}): build the index again") from None
        _require_inner_product(index, str(path))
        if options.depth < 1:
            raise UserError(f"depth {options.depth} is out of range: give 1 or more")
        if options.faiss_gpu:
            require_gpu(index)
        name = faiss_type or _name(faiss.downcast_index(index))
        settings = settle(index, options, faiss_type=name, recorded=recorded)
        return cls(index, settings, depth=options.depth, gpu=options.faiss_gpu)

    def search(self, queries: Floats, topk: int) -> tuple[Floats, NDArray[np.int64]]:
        """The best rows of each query ([n, dimension] float32), best first, by inner product.

        Depth is constant because a graph's breadth, a refinement's candidates and the order of equal codes all follow
        from the number of hits: a query would otherwise be answered according to what it is batched with.

        Returns scores and rows, both [n, min(topk, rows)]. Where fewer were found, because the lists that were visited
        hold no more, the last rows are -1.
        """
        # FAISS's own threshold is made for many cores: with few, a batch of 32 takes nine times as long with it.
        faiss.cvar.distance_compute_blas_threshold = 1 if len(queries) >= _MATRIX_QUERIES else _NEVER
        wanted = min(max(topk, self._depth), self.rows)
        if wanted > self._depth:
            self._broaden(wanted)
        scores, rows = self._index.search(queries, wanted)
        if wanted > self._depth:
            self._broaden(self._depth)
        return scores[:, :topk], rows[:, :topk]

    def _broaden(self, hits: int) -> None:
        """A graph finds no more than its breadth, so that is at least as large as the number of hits."""
        for graph in self._graphs:
            graph.efSearch = max(self.settings.ef_search or 0, hits)


def gpu_count() -> int:
    """GPUs that this FAISS can use; 0 for the build that knows none."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def require_gpu(index: faiss.Index) -> None:
    """Raise UserError unless this FAISS has a GPU to use and the index can be put there."""
    if gpu_count() == 0:
        has = "sees no GPU" if hasattr(faiss, "StandardGpuResources") else "is built without GPU support"
        raise UserError(f"faiss_gpu is asked for, but this FAISS {has}: install faiss-gpu-cu12, or leave it out")
    if held := [_name(layer) for layer in _layers(index) if _name(layer) not in _GPU]:
        raise UserError(
            f"faiss_gpu is asked for, but FAISS keeps {held[0]} on the CPU: leave it out, or build a type such as "
            "Flat or IVF4096,SQ8"
        )


def _to_gpus(index: faiss.Index) -> faiss.Index:
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = True
    return faiss.index_cpu_to_all_gpus(index, co=options)


def _require_inner_product(index: faiss.Index, what: str) -> None:
    for layer in _layers(index):
        if layer.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise UserError(f"{what} ({_name(layer)}) does not rank by inner products: give another one")


def _layers(index: faiss.Index) -> Iterator[Any]:
    """The index and all that is inside it, as their own classes, outermost first."""
    index = faiss.downcast_index(index)
    yield index
    for attribute in _INNER:
        if (inner := getattr(index, attribute, None)) is not None:
            yield from _layers(inner)


def _least_rows(layer: Any) -> int:
    """Vectors that `layer` itself learns from, at least: k-means and PCA need one a centroid or dimension."""
    least = [1, getattr(layer, "nlist", 0)]
    if hasattr(layer, "pq"):
        least.append(layer.pq.ksub)
    if hasattr(layer, "rq"):
        least.append(_CENTROIDS)
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
    """FAISS's own words without the function, file and line that it puts before them."""
    return str(error).splitlines()[0].rsplit(": ", 1)[-1].strip()
