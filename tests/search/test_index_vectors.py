"""FAISS types against exact search in numpy, on vectors that lie in clusters as those of texts do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from rlsys.errors import UserError
from rlsys.search.index import dense as module
from rlsys.search.index.dense import (
    FaissSettings,
    SearchOptions,
    Vectors,
    gpu_count,
    least_train_rows,
    new_index,
    reserve,
    settle,
)

ROWS, DIMENSION, QUERIES = 6000, 64, 100
DEFAULTS = FaissSettings()


@pytest.fixture(scope="module")
def stored() -> np.ndarray[Any, Any]:
    """[6000, 64] around 100 centres; later dimensions matter less, as after a rotation by PCA."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((100, DIMENSION))
    drawn = centres[random.integers(0, 100, ROWS)] + random.standard_normal((ROWS, DIMENSION))
    return normalised(drawn / (1 + np.arange(DIMENSION) / 4))


@pytest.fixture(scope="module")
def asked(stored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[100, 64] near stored ones."""
    random = np.random.default_rng(1)
    return normalised(stored[random.integers(0, ROWS, QUERIES)] + 0.05 * random.standard_normal((QUERIES, DIMENSION)))


def normalised(drawn: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def exact(stored: np.ndarray[Any, Any], asked: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[100, 6000] scores."""
    return asked.astype(np.float64) @ stored.T.astype(np.float64)


def write(path: Path, faiss_type: str, stored: np.ndarray[Any, Any]) -> Path:
    index = new_index(faiss_type, stored.shape[1])
    index.train(stored)
    reserve(index, len(stored))
    index.add(stored)
    faiss.write_index(index, str(path))
    return path


def recall(rows: np.ndarray[Any, Any], exact: np.ndarray[Any, Any], hits: int = 10) -> float:
    best = np.argsort(-exact, axis=1)[:, :hits]
    return float(np.mean([len(set(a) & set(b)) / hits for a, b in zip(rows[:, :hits], best, strict=True)]))


RECALL = {
    "Flat": 1.0,
    "SQ8": 0.95,
    "SQfp16": 0.99,
    "IVF64,Flat": 0.92,
    "IVF64_HNSW16,Flat": 0.92,
    "IVF64,SQ8": 0.9,
    "HNSW32": 0.99,
    "HNSW32_SQ8": 0.95,
    "PQ32x4fs": 0.4,
    "IVF64,PQ32x4fs": 0.4,
    "PQ16np": 0.45,
    "PCA48,Flat": 0.9,
    "PCA48,IVF64,Flat": 0.87,
    "PCA48,HNSW32": 0.9,
    "RR64,SQ8": 0.95,
    "PQ32x4fs,RFlat": 0.92,
    "PCA48,IVF64,PQ24x4fs,RFlat": 0.89,
}
"""recall@10 that each type reaches at least, with the settings that it has by default."""


@pytest.mark.parametrize("faiss_type", RECALL)
def test_each_type_finds_most_of_what_exact_search_finds(
    faiss_type: str,
    stored: np.ndarray[Any, Any],
    asked: np.ndarray[Any, Any],
    exact: np.ndarray[Any, Any],
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "i", faiss_type, stored)
    read, mapped = Vectors.open(path), Vectors.open(path, SearchOptions(mmap=True))
    scores, rows = read.search(asked, 10)
    assert recall(rows, exact) >= RECALL[faiss_type]
    assert (np.diff(scores, axis=1) <= 0).all()
    # The same bytes, elsewhere in memory: a kernel may round scores otherwise there, and so swap rows that nearly tie.
    np.testing.assert_array_equal(faiss.serialize_index(mapped._index), faiss.serialize_index(read._index))
    assert mapped.settings == read.settings
    assert recall(mapped.search(asked, 10)[1], exact) >= RECALL[faiss_type]
    np.testing.assert_array_equal(read.search(asked, 128)[1][:, :10], rows)
    found = np.take_along_axis(exact, rows, axis=1)
    if faiss_type in ("Flat", "IVF64,Flat", "HNSW32", "PQ32x4fs,RFlat"):
        np.testing.assert_allclose(scores, found, atol=1e-5)


def test_more_is_found_the_broader_the_search(
    stored: np.ndarray[Any, Any], asked: np.ndarray[Any, Any], exact: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    for faiss_type, narrow, broad in (
        ("IVF64,Flat", FaissSettings(nprobe=1), FaissSettings(nprobe=64)),
        ("RR64,IVF64,Flat", FaissSettings(nprobe=1), FaissSettings(nprobe=64)),
        ("HNSW8", FaissSettings(ef_search=1), FaissSettings(ef_search=1000)),
        ("RR64,HNSW8", FaissSettings(ef_search=1), FaissSettings(ef_search=1000)),
    ):
        path = write(tmp_path / faiss_type, faiss_type, stored)
        few = recall(Vectors.open(path, SearchOptions(**asdict(narrow), depth=10)).search(asked, 10)[1], exact)
        many = recall(Vectors.open(path, SearchOptions(**asdict(broad), depth=10)).search(asked, 10)[1], exact)
        recorded = recall(Vectors.open(path, SearchOptions(depth=10), recorded=broad).search(asked, 10)[1], exact)
        assert few < many - 0.03
        assert many == recorded >= 0.97


def test_more_hits_than_ef_search_are_all_found_and_found_well(
    stored: np.ndarray[Any, Any], asked: np.ndarray[Any, Any], exact: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    narrow = Vectors.open(write(tmp_path / "i", "HNSW16", stored), SearchOptions(ef_search=4, depth=10))
    before = narrow.search(asked, 10)[1]
    rows = narrow.search(asked, 500)[1]
    assert rows.shape == (QUERIES, 500)
    assert (rows >= 0).all()
    assert recall(rows, exact, 500) >= 0.95
    np.testing.assert_array_equal(narrow.search(asked, 10)[1], before)


@pytest.mark.parametrize("faiss_type", ["HNSW16", "PQ32x4fs,RFlat", "IVF64,PQ32x4fs", "PQ32x4fs", "Flat"])
def test_answers_do_not_depend_on_how_many_are_asked_for(
    faiss_type: str, stored: np.ndarray[Any, Any], asked: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    doubled = np.concatenate([stored[:2000]] * 2)
    index = Vectors.open(write(tmp_path / "i", faiss_type, doubled), SearchOptions(depth=200))
    scores, rows = index.search(asked, 200)
    for topk in (1, 3, 50):
        some_scores, some_rows = index.search(asked, topk)
        np.testing.assert_array_equal(some_rows, rows[:, :topk])
        np.testing.assert_array_equal(some_scores, scores[:, :topk])


def test_settings_by_default_and_those_that_a_type_does_not_have() -> None:
    def settled(
        faiss_type: str, asked: FaissSettings = DEFAULTS, recorded: FaissSettings | None = None
    ) -> FaissSettings:
        return settle(new_index(faiss_type, 64), asked, faiss_type=faiss_type, recorded=recorded)

    assert settled("Flat") == FaissSettings()
    assert settled("HNSW16") == FaissSettings(None, 128)
    assert settled("IVF1024,Flat") == FaissSettings(32, None)
    assert settled("IVF4,Flat") == FaissSettings(4, None)
    assert settled("OPQ8_32,IVF256_HNSW8,PQ8x4fs,RFlat") == FaissSettings(16, 128)
    assert settled("IVF1024,Flat", recorded=FaissSettings(nprobe=5)) == FaissSettings(5, None)
    assert settled("IVF1024,Flat", FaissSettings(nprobe=6), FaissSettings(nprobe=5)) == FaissSettings(6, None)
    for faiss_type, asked, reason in (
        ("Flat", FaissSettings(nprobe=1), "nprobe=1 is given, .* has none"),
        ("IVF4,Flat", FaissSettings(ef_search=9), "ef_search=9 is given, .* has none"),
        ("HNSW4", FaissSettings(nprobe=9), "nprobe=9 is given, .* has none"),
        ("IVF4,Flat", FaissSettings(nprobe=5), "nprobe=5 is out of range: give 1 to 4"),
        ("HNSW4", FaissSettings(ef_search=0), "ef_search=0 is out of range"),
    ):
        with pytest.raises(UserError, match=reason):
            settled(faiss_type, asked)


@pytest.mark.parametrize(
    ("faiss_type", "reason"),
    [
        ("Flatty", "could not parse index string Flatty"),
        ("IVF64,PQ50", "multiple of the number"),
        ("IVF16,Flat,junk", "is not one for inner products"),
        ("LSH", "is not one for inner products"),
        ("HNSW32_PQ16", "does not rank by inner products"),
        ("IDMap,Flat", "cannot be filled block by block"),
        ("NSG16", "cannot be filled block by block"),
        ("", "is not one for inner products"),
    ],
)
def test_types_that_do_not_fit_are_refused(faiss_type: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        new_index(faiss_type, 64)


@pytest.mark.parametrize(
    ("faiss_type", "least"),
    [
        ("Flat", 0),
        ("HNSW8", 0),
        ("SQ8", 1),
        ("IVF100,Flat", 100),
        ("PQ8x4fs", 16),
        ("PQ4np", 256),
        ("RQ2x8", 256),
        ("OPQ8_32,Flat", 256),
        ("PCA40,Flat", 40),
        ("PCA32,IVF300_HNSW8,SQ8", 300),
    ],
)
def test_training_works_with_the_least_rows_and_fails_with_fewer(
    faiss_type: str, least: int, stored: np.ndarray[Any, Any]
) -> None:
    assert least_train_rows(new_index(faiss_type, 64)) == least
    if least:
        new_index(faiss_type, 64).train(stored[:least])
    if least > 1:
        with pytest.raises(RuntimeError):
            new_index(faiss_type, 64).train(stored[: least - 1])


def test_gpus_are_refused_by_name_where_there_are_none(
    stored: np.ndarray[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = write(tmp_path / "flat", "PCA48,IVF4,SQ8", stored)
    graph = write(tmp_path / "graph", "PCA48,HNSW4", stored)
    if gpu_count() == 0:
        with pytest.raises(UserError, match="faiss_gpu is asked for, but this FAISS"):
            Vectors.open(flat, SearchOptions(faiss_gpu=True))
    monkeypatch.setattr(module, "gpu_count", lambda: 1)
    with pytest.raises(UserError, match="FAISS keeps IndexHNSWFlat on the CPU"):
        Vectors.open(graph, SearchOptions(faiss_gpu=True))
    module.require_gpu(faiss.read_index(str(flat)))


def test_a_depth_below_one_is_refused(stored: np.ndarray[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="depth 0 is out of range"):
        Vectors.open(write(tmp_path / "i", "Flat", stored), SearchOptions(depth=0))
