"""The index folder: what it says, what it refuses, and what is found through it."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.dense import (
    BuildOptions,
    DenseIndex,
    Manifest,
    SearchOptions,
    VectorRetriever,
    build,
    open_prebuilt,
)
from rlsys.search.index.folder import read_manifest, write_manifest
from rlsys.search.server.command import open_retriever

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


def test_more_hits_than_passages_gives_all_of_them(retriever: VectorRetriever) -> None:
    (hits,) = retriever.find(retriever.prepare(["Bamako"]), topk=1000)
    assert len({hit.document["id"] for hit in hits}) == 200


def test_the_manifest_says_how_the_vectors_were_made(index_dir: Path, encoder: Encoder) -> None:
    assert (
        asdict(DenseIndex.open(index_dir).manifest).items()
        >= {
            "rows": 200,
            "encoder": "minilm",
            "pooling": "mean",
            "normalize": True,
            "dimension": 384,
            "faiss_type": "Flat",
            "embeddings_dtype": "float32",
            "nprobe": None,
            "ef_search": None,
            "encoder_sha256": encoder.facts.checksum,
        }.items()
    )
    assert read_manifest(index_dir)["kind"] == "dense"


def edit_corpus(folder: Path) -> None:
    path = folder / "corpus.jsonl"
    path.write_text(path.read_text().replace("capital", "Capital", 1))


def edit_manifest(**changes: Any) -> Any:
    def edit(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def drop_vector(folder: Path) -> None:
    vectors = faiss.read_index(str(folder / "index.faiss"))
    vectors.remove_ids(faiss.IDSelectorRange(3, 4))
    faiss.write_index(vectors, str(folder / "index.faiss"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (edit_corpus, "has changed since"),
        (edit_manifest(rows=199), "manifest says 199"),
        (edit_manifest(dimension=768), "manifest says 200 of 768"),
        (edit_manifest(surprise=1), "does not hold its keys .*: surprise"),
        (
            edit_manifest(encoder=None, rows=True, nprobe="4", normalize=1),
            ": encoder, normalize, nprobe, rows.: build",
        ),
        (edit_manifest(nprobe=-1), "nprobe=-1 is out of range"),
        (edit_manifest(ef_search=2**40), "ef_search=.* is out of range"),
        (edit_manifest(format=3), "has format 3, this version of rlsys reads 2"),
        (edit_manifest(kind="bm25"), "of kind 'bm25', not 'dense'"),
        (edit_manifest(kind=None), "names no kind"),
        (drop_vector, "holds 199 vectors"),
        (lambda folder: (folder / "index.faiss").write_bytes(b"junk"), "missing or damaged"),
        (lambda folder: (folder / "index.faiss").unlink(), "missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text('{"rows": 200}'), "has format 1"),
        (lambda folder: (folder / "manifest.json").unlink(), "is not an index"),
    ],
)
def test_what_does_not_fit_together_is_refused(copy: Path, damage: Any, reason: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=reason):
        DenseIndex.open(copy)


def test_other_weights_than_the_index_was_made_with_are_refused(copy: Path) -> None:
    edit_manifest(encoder_sha256="0" * 64)(copy)
    for encoder in (None, "minilm"):
        with pytest.raises(UserError, match="weights of encoder 'minilm' are not those"):
            VectorRetriever.open(copy, encoder)


def test_a_query_encoder_of_its_own_is_for_dpr(copy: Path) -> None:
    edit_manifest(encoder_sha256="0" * 64, family="dpr")(copy)
    with pytest.raises(UserError, match="are not those"):
        VectorRetriever.open(copy)
    assert VectorRetriever.open(copy, "minilm").describe()["passages"] == 200


def test_queries_are_encoded_as_the_manifest_says_not_as_the_family_would(copy: Path, queries: list[str]) -> None:
    edit_manifest(pooling="cls", query_prefix="search: ", normalize=False)(copy)
    expected = Encoder.load("minilm", pooling="cls", query_prefix="search: ", normalize=False)
    np.testing.assert_array_equal(VectorRetriever.open(copy).prepare(queries[:3]), expected.encode_queries(queries[:3]))


def test_any_folder_is_opened_by_its_kind(index_dir: Path, tmp_path: Path) -> None:
    assert open_retriever(index_dir, depth=7).describe() == VectorRetriever.open(index_dir).describe()
    with pytest.raises(UserError, match="nprobe=4 is given, but an index of FAISS type 'Flat' has none"):
        open_retriever(index_dir, nprobe=4)
    for kind, options, reason in (
        ("bm25", {"nprobe": 4, "device": "cpu"}, "'bm25', which has no device, nprobe"),
        ("elasticsearch", {"encoder": "minilm"}, "'elasticsearch', which has no encoder"),
        ("colbert", {}, "kind 'colbert', which this version of rlsys does not know"),
    ):
        write_manifest(tmp_path, kind, {})
        with pytest.raises(UserError, match=reason):
            open_retriever(tmp_path, **options)


def test_describe_names_what_answers_depend_on(index_dir: Path, corpus_path: Path, tmp_path: Path) -> None:
    assert VectorRetriever.open(index_dir).describe() == {
        "kind": "dense",
        "passages": 200,
        "corpus_sha256": Corpus.open(corpus_path).checksum,
        "encoder": "minilm",
        "dimension": 384,
        "faiss_type": "Flat",
    }
    out = tmp_path / "lists"
    build(Corpus.open(corpus_path), MINILM, out, BuildOptions("IVF16_HNSW4,Flat", nprobe=5))
    built = VectorRetriever.open(out).describe()
    assert (built["faiss_type"], built["nprobe"], built["ef_search"]) == ("IVF16_HNSW4,Flat", 5, 128)
    asked = VectorRetriever.open(out, options=SearchOptions(nprobe=2, ef_search=9)).describe()
    assert (asked["nprobe"], asked["ef_search"]) == (2, 9)


def test_lists_that_hold_too_few_give_short_answers_of_real_passages(corpus_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "lists"
    build(Corpus.open(corpus_path), MINILM, out, BuildOptions("IVF16,Flat", nprobe=1))
    few = VectorRetriever.open(out)
    (hits,) = few.find(few.prepare(["Bamako"]), 150)
    assert 0 < len(hits) < 150
    assert len({hit.document["id"] for hit in hits}) == len(hits)
    assert all(np.isfinite(hit.score) for hit in hits)


def test_a_bare_faiss_file_is_served_with_its_corpus(
    index_dir: Path, corpus_path: Path, retriever: VectorRetriever, queries: list[str], caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        bare = open_prebuilt(index_dir / "index.faiss", corpus_path, MINILM)
    assert "minilm (mean pooling, normalised, query prefix ''" in caplog.text
    assert bare.find(bare.prepare(queries), 3) == retriever.find(retriever.prepare(queries), 3)
    assert bare.describe()["faiss_type"] == "IndexFlatIP"


def write_faiss(path: Path, rows: int, dimension: int, metric: int) -> Path:
    index = faiss.index_factory(dimension, "Flat", metric)
    index.add(np.ones((rows, dimension), dtype=np.float32))
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize(
    ("rows", "dimension", "metric", "reason"),
    [
        (199, 384, faiss.METRIC_INNER_PRODUCT, "holds 199 vectors, .* has 200 passages"),
        (200, 768, faiss.METRIC_INNER_PRODUCT, "gives vectors of 384, .* holds vectors of 768"),
        (200, 384, faiss.METRIC_L2, "does not rank by inner products"),
    ],
)
def test_a_bare_faiss_file_that_does_not_fit_is_refused(
    tmp_path: Path, corpus_path: Path, rows: int, dimension: int, metric: int, reason: str
) -> None:
    path = write_faiss(tmp_path / "bare.index", rows, dimension, metric)
    with pytest.raises(UserError, match=reason):
        open_prebuilt(path, corpus_path, MINILM)
    with pytest.raises(UserError, match="is not a file"):
        open_prebuilt(tmp_path / "none", corpus_path, MINILM)


def test_manifests_are_equal_only_if_all_is(index_dir: Path) -> None:
    made = Manifest.read(index_dir)
    assert made.embeddings() == replace(made, faiss_type="SQ8", nprobe=3).embeddings()
    assert made.embeddings() != replace(made, embeddings_dtype="float16").embeddings()
