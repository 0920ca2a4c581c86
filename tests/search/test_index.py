"""Dense and hybrid indexes: what they find, and that they are never asked with other inputs than they were built with."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.errors import Code
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index import dense
from rlsys.search.index.dense import (
    BuildOptions,
    DenseIndex,
    FaissSettings,
    SearchOptions,
    VectorRetriever,
    Vectors,
    build,
    least_train_rows,
    new_index,
    open_prebuilt,
    reserve,
    settle,
)
from rlsys.search.index.fusion import HybridRetriever, build_hybrid, fuse
from rlsys.search.index.lexical import LexicalOptions, build_lexical
from rlsys.search.server.command import open_retriever
from tests.search.index_edits import Edit, edit_corpus, edit_manifest
from tests.search.tiny_encoders import bert, save
from tests.support.refusals import refused

MINILM = EncoderSpec("minilm")


@pytest.fixture
def copy(index_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_dir, tmp_path / "copy"))


def test_hits_equal_brute_force(index_dir: Path, encoder: Encoder, queries: list[str], brute_force: Any) -> None:
    expected, order = brute_force
    scores, rows = DenseIndex.open(index_dir).vectors.search(encoder.encode_queries(queries), topk=5)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, order[:, :5], axis=1), atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(expected, rows, axis=1), scores, atol=1e-5)


def drop_vector(folder: Path) -> None:
    vectors = faiss.read_index(str(folder / "index.faiss"))
    vectors.remove_ids(faiss.IDSelectorRange(3, 4))
    faiss.write_index(vectors, str(folder / "index.faiss"))


@pytest.mark.parametrize(
    ("damage", "code", "at"),
    [
        (edit_corpus, "mismatch", "corpus.jsonl"),
        (edit_manifest(rows=199), "mismatch", ""),
        (edit_manifest(dimension=768), "mismatch", ""),
        (edit_manifest(surprise=1), "malformed", "manifest.json"),
        (edit_manifest(rows=True), "malformed", "manifest.json"),
        (edit_manifest(ef_search=2**40), "out_of_range", None),
        (edit_manifest(format=3), "unsupported", "manifest.json"),
        (edit_manifest(kind="bm25"), "mismatch", ""),
        (drop_vector, "mismatch", ""),
        (lambda folder: (folder / "index.faiss").write_bytes(b"junk"), "malformed", "index.faiss"),
        (lambda folder: (folder / "index.faiss").unlink(), "not_found", "index.faiss"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "malformed", "manifest.json"),
        (lambda folder: (folder / "manifest.json").unlink(), "not_found", ""),
    ],
)
def test_what_does_not_fit_together_is_refused(copy: Path, damage: Edit, code: Code, at: str | None) -> None:
    damage(copy)
    with refused(code, None if at is None else copy / at):
        DenseIndex.open(copy)


def test_other_weights_than_the_index_was_made_with_are_refused_but_for_dprs_encoder_of_queries(copy: Path) -> None:
    edit_manifest(encoder_sha256="0" * 64)(copy)
    for encoder in (None, "minilm"):
        with refused("mismatch", "minilm"):
            VectorRetriever.open(copy, encoder)
    edit_manifest(family="dpr")(copy)
    with refused("mismatch", "minilm"):
        VectorRetriever.open(copy)
    assert VectorRetriever.open(copy, "minilm").describe()["passages"] == 200


def test_queries_are_encoded_as_the_manifest_says_not_as_the_family_would(copy: Path, queries: list[str]) -> None:
    made = {"pooling": "cls", "query_prefix": "search: ", "normalize": False, "max_tokens": 5}
    edit_manifest(**made)(copy)
    expected = Encoder.load("minilm", **made).encode_queries(queries[:3])
    prepared = VectorRetriever.open(copy).prepare(queries[:3])
    np.testing.assert_allclose(prepared, expected, rtol=1e-5, atol=1e-5)


def test_describe_names_what_answers_depend_on_and_only_narrow_lists_give_short_answers(
    index_dir: Path, corpus_path: Path, retriever: VectorRetriever, tmp_path: Path
) -> None:
    made = {"kind": "dense", "passages": 200, "encoder": "minilm", "dimension": 384}
    made["corpus_sha256"] = Corpus.open(corpus_path).checksum
    assert open_retriever(index_dir, depth=7).describe() == made | {"faiss_type": "Flat"}
    out = Path(shutil.copytree(index_dir, tmp_path / "lists"))
    build(Corpus.open(corpus_path), MINILM, out, BuildOptions("IVF16,Flat", nprobe=5))
    assert VectorRetriever.open(out).describe() == made | {"faiss_type": "IVF16,Flat", "nprobe": 5}
    narrow = VectorRetriever.open(out, options=SearchOptions(nprobe=1))
    assert narrow.describe()["nprobe"] == 1
    (hits,) = narrow.find(narrow.prepare(["Bamako"]), 1000)
    assert 0 < len({hit.document["id"] for hit in hits}) == len(hits) < 190
    (hits,) = retriever.find(retriever.prepare(["Bamako"]), 1000)
    assert len({hit.document["id"] for hit in hits}) == 200


def test_a_bare_faiss_file_is_served_with_its_corpus_and_a_warning(
    index_dir: Path, corpus_path: Path, retriever: VectorRetriever, queries: list[str], caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        bare = open_prebuilt(index_dir / "index.faiss", corpus_path, MINILM)
    assert "minilm" in caplog.text
    for hits, expected in zip(*(one.find(one.prepare(queries), 3) for one in (bare, retriever)), strict=True):
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-5)
        assert hits[0].document == expected[0].document


def test_a_bare_faiss_file_that_does_not_fit_is_refused(tmp_path: Path, corpus_path: Path) -> None:
    path, inner = tmp_path / "bare.index", faiss.METRIC_INNER_PRODUCT
    with refused("not_found", path):
        open_prebuilt(path, corpus_path, MINILM)
    cases: list[tuple[int, int, int, Code]] = [
        (199, 384, inner, "mismatch"),
        (200, 768, inner, "mismatch"),
        (200, 384, faiss.METRIC_L2, "unsupported"),
    ]
    for rows, dimension, metric, code in cases:
        index = faiss.index_factory(dimension, "Flat", metric)
        index.add(np.ones((rows, dimension), dtype=np.float32))
        faiss.write_index(index, str(path))
        with refused(code):
            open_prebuilt(path, corpus_path, MINILM)


# ---- hybrids

rankings = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=8), min_size=1, max_size=4)


@settings(max_examples=50)
@given(rankings, st.integers(0, 9))
def test_fused_scores_equal_exact_fractions(lists: list[list[int]], topk: int) -> None:
    exact = {
        key: sum(Fraction(1, 61 + ranking.index(key)) for ranking in lists if key in ranking)
        for key in {key for ranking in lists for key in ranking}
    }
    fused = fuse(lists, topk=100)
    assert dict(fused) == pytest.approx({key: float(score) for key, score in exact.items()})
    assert [exact[key] for key, _ in fused] == sorted(exact.values(), reverse=True)
    assert fuse(lists, topk) == fused[:topk]


def test_ties_go_to_the_first_ranking_and_a_repeated_key_counts_once() -> None:
    assert [key for key, _ in fuse([["a", "x"], ["b", "y"]], topk=4)] == ["a", "b", "x", "y"]
    assert fuse([["a", "a", "b"]], topk=5) == [("a", 1 / 61), ("b", 1 / 63)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EncoderSpec:
    """An encoder of 16 dimensions."""
    return EncoderSpec(save(bert(), tmp_path_factory.mktemp("encoder") / "e5-tiny"))


@pytest.fixture(scope="module")
def hybrid_dir(corpus_path: Path, spec: EncoderSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid") / "countries"
    assert build_hybrid(Corpus.open(corpus_path), spec, out)
    return out


@pytest.fixture
def hybrid(hybrid_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hybrid_dir, tmp_path / "copy"))


def test_an_opened_hybrid_fuses_its_two_parts(hybrid_dir: Path, queries: list[str]) -> None:
    hybrid = open_retriever(hybrid_dir)
    parts = [open_retriever(hybrid_dir / "dense"), open_retriever(hybrid_dir / "bm25")]
    found = [part.find(part.prepare(queries), 100) for part in parts]
    for hits, *sides in zip(hybrid.find(hybrid.prepare(queries), 5), *found, strict=True):
        ids = [[hit.document["id"] for hit in side] for side in sides]
        expected = {key: sum(1 / (61 + side.index(key)) for side in ids if key in side) for key in {*ids[0], *ids[1]}}
        assert [hit.score for hit in hits] == pytest.approx(sorted(expected.values())[:-6:-1])
        assert [expected[hit.document["id"]] for hit in hits] == pytest.approx([hit.score for hit in hits])
    ready = hybrid.prepare(queries)
    assert [hits[:5] for hits in hybrid.find(ready, 50)] == hybrid.find(ready, 5)


def test_only_the_part_that_changes_is_built_again(hybrid: Path, corpus_path: Path, spec: EncoderSpec) -> None:
    corpus, stages = Corpus.open(corpus_path), set[str]()
    before = (hybrid / "dense" / "index.faiss").stat().st_ino
    assert not build_hybrid(corpus, spec, hybrid)
    assert build_hybrid(corpus, spec, hybrid, None, LexicalOptions(k1=1.5), lambda *step: stages.add(step[0]))
    assert stages == {"tokenise"}
    assert (hybrid / "dense" / "index.faiss").stat().st_ino == before
    assert HybridRetriever.open(hybrid).describe()["bm25"]["k1"] == 1.5
    assert not list(hybrid.parent.glob(".*"))


def test_parts_that_do_not_fit_together_are_refused_and_closed(hybrid: Path, corpus_path: Path, tmp_path: Path) -> None:
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join(corpus_path.read_text().splitlines(keepends=True)[:5]))
    build_lexical(Corpus.open(shorter), hybrid / "bm25")
    with refused("mismatch", "corpus_sha256"):
        HybridRetriever.open(hybrid)
    with refused("mismatch", hybrid / "dense"):
        HybridRetriever.open(hybrid / "dense")
    shutil.rmtree(hybrid / "bm25")
    with patch.object(VectorRetriever, "close") as closed, refused("not_found", hybrid / "bm25"):
        HybridRetriever.open(hybrid)
    closed.assert_called_once()


# ---- vectors

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
