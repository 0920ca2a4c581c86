"""FAISS types against exact search in numpy, on vectors that lie in clusters as those of texts do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from rlsys.errors import Code
from rlsys.search.index import dense
from rlsys.search.index.dense import (
    FaissSettings,
    SearchOptions,
    Vectors,
    least_train_rows,
    new_index,
    reserve,
    settle,
)
from tests.support.refusals import refused

ROWS, DIMENSION, QUERIES = 4000, 64, 100
Array = np.ndarray[Any, Any]


def normalised(drawn: Array) -> Array:
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def stored() -> Array:
    """[4000, 64] around 100 centres; later dimensions matter less, as after a rotation by PCA."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((100, DIMENSION))
    drawn = centres[random.integers(0, 100, ROWS)] + random.standard_normal((ROWS, DIMENSION))
    return normalised(drawn / (1 + np.arange(DIMENSION) / 4))


@pytest.fixture(scope="module")
def asked(stored: Array) -> Array:
    """[100, 64] near stored ones."""
    random = np.random.default_rng(1)
    return normalised(stored[random.integers(0, ROWS, QUERIES)] + 0.05 * random.standard_normal((QUERIES, DIMENSION)))


@pytest.fixture(scope="module")
def exact(stored: Array, asked: Array) -> Array:
    """[100, 4000] scores."""
    return asked.astype(np.float64) @ stored.T.astype(np.float64)


def write(path: Path, faiss_type: str, vectors: Array) -> Path:
    index = new_index(faiss_type, DIMENSION)
    index.train(vectors)
    reserve(index, len(vectors))
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


@pytest.fixture(scope="module")
def written(stored: Array, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a type's index of the stored vectors, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("types")
    return cache(lambda faiss_type: write(folder / faiss_type, faiss_type, stored))


def test_a_mapped_index_is_the_one_that_is_read(written: Callable[[str], Path]) -> None:
    read, mapped = (Vectors.open(written("RR64,HNSW8"), SearchOptions(mmap=mmap)) for mmap in (False, True))
    np.testing.assert_array_equal(faiss.serialize_index(mapped._index), faiss.serialize_index(read._index))


@pytest.mark.parametrize(("faiss_type", "setting"), [("RR64,IVF64,Flat", "nprobe"), ("RR64,HNSW8", "ef_search")])
def test_more_is_found_the_broader_the_search(
    faiss_type: str, setting: str, asked: Array, exact: Array, written: Callable[[str], Path]
) -> None:
    def found(recorded: FaissSettings | None = None, **options: Any) -> float:
        index = Vectors.open(written(faiss_type), SearchOptions(depth=10, **options), recorded=recorded)
        best = np.argsort(-exact, axis=1)[:, :10]
        rows = index.search(asked, 10)[1]
        return float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(rows, best, strict=True)]))

    assert found(**{setting: 1}) < found(**{setting: 64}) - 0.03
    assert found(**{setting: 64}) >= 0.95
    assert found(recorded=FaissSettings(**{setting: 64})) >= 0.95


@pytest.mark.parametrize("faiss_type", ["HNSW16", "PQ32x4fs,RFlat", "IVF64,PQ32x4fs", "Flat"])
def test_an_answer_does_not_depend_on_topk(faiss_type: str, stored: Array, asked: Array, tmp_path: Path) -> None:
    """Every vector is stored twice, so that scores tie; a search beyond the depth finds all and changes no later one."""
    index = Vectors.open(write(tmp_path / "i", faiss_type, np.tile(stored[:1500], (2, 1))), SearchOptions(depth=200))
    scores, rows = index.search(asked, 200)
    for topk in (1, 3, 50):
        some_scores, some_rows = index.search(asked, topk)
        np.testing.assert_array_equal(some_rows, rows[:, :topk])
        np.testing.assert_array_equal(some_scores, scores[:, :topk])
    assert (index.search(asked, 500)[1] >= 0).all() or "IVF" in faiss_type
    np.testing.assert_array_equal(index.search(asked, 200)[1], rows)


@pytest.mark.parametrize(
    ("faiss_type", "asked", "recorded", "settled"),
    [
        ("Flat", {}, {}, (None, None)),
        ("OPQ8_32,IVF256_HNSW8,PQ8x4fs,RFlat", {}, {}, (16, 128)),
        ("IVF1024,Flat", {}, {"nprobe": 5}, (5, None)),
        ("IVF1024,Flat", {"nprobe": 6}, {"nprobe": 5}, (6, None)),
    ],
)
def test_settings_are_those_asked_for_else_recorded_else_the_types_own(
    faiss_type: str, asked: Any, recorded: Any, settled: tuple[int | None, int | None]
) -> None:
    index, before = new_index(faiss_type, DIMENSION), FaissSettings(**recorded)
    assert settle(index, FaissSettings(**asked), faiss_type=faiss_type, recorded=before) == FaissSettings(*settled)


@pytest.mark.parametrize(
    ("faiss_type", "asked", "code", "key"),
    [
        ("Flat", {"nprobe": 1}, "conflict", "nprobe"),
        ("IVF4,Flat", {"nprobe": 5}, "out_of_range", "nprobe"),
        ("HNSW4", {"ef_search": 0}, "out_of_range", "ef_search"),
        ("Flatty", {}, "unknown", "faiss_type"),
        ("HNSW32_PQ16", {}, "unsupported", "faiss_type"),
        ("IDMap,Flat", {}, "unsupported", "faiss_type"),
    ],
)
def test_types_and_settings_that_do_not_fit_are_refused(faiss_type: str, asked: Any, code: Code, key: str) -> None:
    with refused(code, key):
        settle(new_index(faiss_type, DIMENSION), FaissSettings(**asked), faiss_type=faiss_type)


def test_gpus_are_refused_where_there_are_none_and_to_types_that_stay_on_the_cpu(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with refused("not_installed", "faiss_gpu"):
        Vectors.open(written("Flat"), SearchOptions(faiss_gpu=True))
    monkeypatch.setattr(dense, "gpu_count", lambda: 1)
    with refused("unsupported", "faiss_gpu"):
        Vectors.open(written("HNSW16"), SearchOptions(faiss_gpu=True))


@pytest.mark.parametrize(
    ("faiss_type", "least"), [("Flat", 0), ("PQ8x4fs", 16), ("OPQ8_32,Flat", 256), ("PCA32,IVF300_HNSW8,SQ8", 300)]
)
def test_training_works_with_the_least_rows_and_fails_with_fewer(faiss_type: str, least: int, stored: Array) -> None:
    assert least_train_rows(new_index(faiss_type, DIMENSION)) == least
    if least:
        new_index(faiss_type, DIMENSION).train(stored[:least])
        with pytest.raises(RuntimeError):
            new_index(faiss_type, DIMENSION).train(stored[: least - 1])
