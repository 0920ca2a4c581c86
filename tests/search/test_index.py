"""Tests of dense and hybrid indexes: hits, settings, and refusal of inputs that an index was not built with."""

import json
import logging
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import faiss
import numpy as np
import pytest

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
    new_index,
    open_prebuilt,
    reserve,
    settle,
)
from rlsys.search.index.fusion import HybridRetriever, build_hybrid, fuse
from rlsys.search.index.lexical import LexicalOptions, LexicalRetriever, build_lexical
from rlsys.search.server.command import open_retriever
from tests.search.index_edits import Edit, edit_corpus, edit_manifest
from tests.support.refusals import refused

MINILM = EncoderSpec("minilm")


@pytest.fixture
def copy(index_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_dir, tmp_path / "copy"))


def drop_vector(folder: Path) -> None:
    vectors = faiss.read_index(str(folder / "index.faiss"))
    vectors.remove_ids(faiss.IDSelectorRange(3, 4))
    faiss.write_index(vectors, str(folder / "index.faiss"))


@pytest.mark.parametrize(
    ("damage", "code", "at"),
    [
        (edit_corpus, "mismatch", "corpus.jsonl"),
        (edit_manifest(rows=199), "mismatch", ""),
        (edit_manifest(surprise=1), "malformed", "manifest.json"),
        (edit_manifest(encoder=None), "malformed", "manifest.json"),
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
def test_an_inconsistent_index_folder_is_refused(copy: Path, damage: Edit, code: Code, at: str | None) -> None:
    damage(copy)
    with refused(code, None if at is None else copy / at):
        DenseIndex.open(copy)


def test_other_weights_are_refused_except_for_a_query_encoder_of_dpr(copy: Path, spec: EncoderSpec) -> None:
    edit_manifest(encoder_sha256="0" * 64)(copy)
    for encoder in (None, "minilm"):
        with refused("mismatch", "minilm"):
            VectorRetriever.open(copy, encoder)
    edit_manifest(family="dpr")(copy)
    with refused("mismatch", "minilm"):
        VectorRetriever.open(copy)
    assert VectorRetriever.open(copy, "minilm").describe()["passages"] == 200
    with refused("mismatch", spec.name):  # it gives vectors of another dimension
        VectorRetriever.open(copy, spec.name)


def test_queries_are_encoded_with_the_settings_of_the_manifest(copy: Path, queries: list[str]) -> None:
    made = {"pooling": "cls", "query_prefix": "search: ", "normalize": False, "max_tokens": 5}
    edit_manifest(**made)(copy)
    expected = Encoder.load("minilm", **made).encode_queries(queries[:3])
    prepared = VectorRetriever.open(copy).prepare(queries[:3])
    np.testing.assert_allclose(prepared, expected, rtol=1e-5, atol=1e-5)


def test_a_bare_faiss_file_is_served_with_its_corpus_and_a_warning(
    index_dir: Path, corpus_path: Path, retriever: VectorRetriever, queries: list[str], caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        bare = open_prebuilt(index_dir / "index.faiss", corpus_path, MINILM)
    assert "minilm" in caplog.text
    for hits, expected in zip(*(one.find(one.prepare(queries), 3) for one in (bare, retriever)), strict=True):
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-5)
        assert hits[0].document == expected[0].document


def test_a_bare_faiss_file_that_does_not_fit_is_refused(tmp_path: Path, corpus_path: Path, spec: EncoderSpec) -> None:
    path, inner = tmp_path / "bare.index", faiss.METRIC_INNER_PRODUCT
    with refused("not_found", path):
        open_prebuilt(path, corpus_path, spec)
    cases: list[tuple[int, int, int, Code, object]] = [
        (199, 16, inner, "mismatch", corpus_path),
        (200, 32, inner, "mismatch", spec.name),
        (200, 16, faiss.METRIC_L2, "unsupported", path),
    ]
    for rows, dimension, metric, code, key in cases:
        index = faiss.index_factory(dimension, "Flat", metric)
        index.add(np.ones((rows, dimension), dtype=np.float32))
        faiss.write_index(index, str(path))
        with refused(code, str(key)):
            open_prebuilt(path, corpus_path, spec)


# ---- hybrids


def test_ties_go_to_the_first_ranking_and_a_repeated_key_is_counted_once() -> None:
    assert [key for key, _ in fuse([["a", "x"], ["b", "y"]], topk=4)] == ["a", "b", "x", "y"]
    assert fuse([["a", "a", "b"]], topk=5) == [("a", 1 / 61), ("b", 1 / 63)]


@pytest.fixture(scope="module")
def hybrid_dir(corpus_path: Path, spec: EncoderSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid") / "countries"
    assert build_hybrid(Corpus.open(corpus_path), spec, out)
    return out


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


def test_a_hybrid_finds_each_passage_of_a_document(tmp_path: Path, spec: EncoderSpec) -> None:
    texts = ["Paris is the capital of France.", "Football is played in Paris.", "Rivers flow to the sea."]
    rows = [{"id": f"doc{number // 2}", "contents": text} for number, text in enumerate(texts)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_hybrid(Corpus.open(tmp_path / "corpus.jsonl"), spec, tmp_path / "index")
    hybrid = open_retriever(tmp_path / "index", threads=1)
    (hits,) = hybrid.find(hybrid.prepare(["capital of France"]), 3)
    assert hits[0].document["contents"] == texts[0]
    assert {hit.document["contents"] for hit in hits} == {*texts}


@pytest.fixture
def hybrid(hybrid_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hybrid_dir, tmp_path / "copy"))


def test_only_the_changed_part_of_a_hybrid_is_rebuilt(hybrid: Path, corpus_path: Path, spec: EncoderSpec) -> None:
    corpus, stages = Corpus.open(corpus_path), set[str]()
    before = (hybrid / "dense" / "index.faiss").stat().st_ino
    assert not build_hybrid(corpus, spec, hybrid)
    assert build_hybrid(corpus, spec, hybrid, None, LexicalOptions(k1=1.5), lambda *step: stages.add(step[0]))
    assert stages == {"tokenise"}
    assert (hybrid / "dense" / "index.faiss").stat().st_ino == before
    assert HybridRetriever.open(hybrid).describe()["bm25"]["k1"] == 1.5
    assert not list(hybrid.parent.glob(".*"))


def test_parts_of_another_corpus_are_refused_and_closed(hybrid: Path, corpus_path: Path, tmp_path: Path) -> None:
    def refuse(code: Code, key: Path | str, closed: list[type]) -> None:
        parts = [VectorRetriever, LexicalRetriever]
        with ExitStack() as stack:
            spied = [patch.object(part, "close", autospec=True, side_effect=part.close) for part in parts]
            spies = list(map(stack.enter_context, spied))
            with refused(code, key):
                HybridRetriever.open(hybrid)
        assert [part for part, spy in zip(parts, spies, strict=True) for _ in spy.mock_calls] == closed

    with refused("mismatch", hybrid / "dense"):
        HybridRetriever.open(hybrid / "dense")
    edit_manifest(corpus_sha256="0" * 64)(hybrid)
    refuse("mismatch", hybrid, closed=[VectorRetriever, LexicalRetriever])
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join(corpus_path.read_text().splitlines(keepends=True)[:5]))
    build_lexical(Corpus.open(shorter), hybrid / "bm25")
    refuse("mismatch", "corpus_sha256", closed=[VectorRetriever, LexicalRetriever])
    shutil.rmtree(hybrid / "bm25")
    refuse("not_found", hybrid / "bm25", closed=[VectorRetriever])


# ---- vectors

DIMENSION = 64
Array = np.ndarray[Any, Any]


def drawn(rows: int, seed: int) -> Array:
    """Return [rows, 64] random vectors of length 1."""
    vectors = np.random.default_rng(seed).standard_normal((rows, DIMENSION))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def write(path: Path, faiss_type: str, vectors: Array) -> Path:
    index = new_index(faiss_type, DIMENSION)
    index.train(vectors)
    reserve(index, len(vectors))
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize("faiss_type", ["HNSW16", "PQ32x4fs,RFlat", "IVF64,PQ32x4fs", "Flat"])
def test_an_answer_does_not_depend_on_topk(faiss_type: str, tmp_path: Path) -> None:
    """Every vector is stored twice, so that scores tie; a deeper search in between changes nothing."""
    stored, asked = np.tile(drawn(1500, seed=0), (2, 1)), drawn(100, seed=1)
    index = Vectors.open(write(tmp_path / "i", faiss_type, stored), SearchOptions(depth=200))
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
        ("IVF256,Flat", {}, {"nprobe": 5}, (5, None)),
        ("IVF256,Flat", {"nprobe": 6}, {"nprobe": 5}, (6, None)),
        ("HNSW4", {}, {"ef_search": 300}, (None, 300)),
        ("HNSW4", {"ef_search": 400}, {"ef_search": 300}, (None, 400)),
    ],
)
def test_settings_of_the_caller_else_the_record_else_the_type_reach_faiss(
    tmp_path: Path, faiss_type: str, asked: Any, recorded: Any, settled: tuple[int | None, int | None]
) -> None:
    path, depth = write(tmp_path / "i", faiss_type, drawn(300, seed=0)), 1
    vectors = Vectors.open(path, SearchOptions(**asked, depth=depth), recorded=FaissSettings(**recorded))
    assert vectors.settings == FaissSettings(*settled)
    layers = list(dense._layers(vectors._index))
    used = [[layer.nprobe for layer in layers if hasattr(layer, "nprobe")]]
    used.append([layer.hnsw.efSearch for layer in layers if hasattr(layer, "hnsw")])
    assert used == [[] if value is None else [value] for value in settled]


def test_a_search_of_few_lists_gives_fewer_hits_each_with_its_document(copy: Path, corpus_path: Path) -> None:
    build(Corpus.open(corpus_path), MINILM, copy, BuildOptions("IVF16,Flat", nprobe=1))
    retriever = open_retriever(copy)
    assert retriever.describe()["nprobe"] == 1
    ready = retriever.prepare(["Bamako", "Lima"])
    found = [[hit.document["id"] for hit in hits] for hits in retriever.find(ready, 1000)]
    for row, ids in enumerate(found):
        assert 0 < len(set(ids)) == len(ids) < 190
        (alone,) = retriever.find(ready[row : row + 1], 1000)
        assert ids == [hit.document["id"] for hit in alone]


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
def test_unsupported_index_types_and_settings_are_refused(faiss_type: str, asked: Any, code: Code, key: str) -> None:
    with refused(code, key):
        settle(new_index(faiss_type, DIMENSION), FaissSettings(**asked), faiss_type=faiss_type)
