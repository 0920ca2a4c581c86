"""A dense index finds what brute force finds, and is never asked with other inputs than it was built with."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from rlsys.errors import Code, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.dense import (
    BuildOptions,
    DenseIndex,
    SearchOptions,
    VectorRetriever,
    build,
    open_prebuilt,
)
from rlsys.search.index.folder import write_manifest
from rlsys.search.server.command import open_retriever
from tests.search.index_edits import Edit, edit_corpus, edit_manifest
from tests.support.refusals import refused

MINILM = EncoderSpec("minilm")


@pytest.fixture
def copy(index_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_dir, tmp_path / "copy"))


def test_scores_and_rows_equal_brute_force(
    index_dir: Path, encoder: Encoder, queries: list[str], brute_force: tuple[Any, Any]
) -> None:
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


@pytest.mark.parametrize(("kind", "options"), [("bm25", {"nprobe": 4}), ("elasticsearch", {"encoder": "e"}), ("x", {})])
def test_options_that_the_kind_of_a_folder_has_not_are_refused(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    write_manifest(tmp_path, kind, {})
    with pytest.raises(UserError, match=kind):
        open_retriever(tmp_path, **options)


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
