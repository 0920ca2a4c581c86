from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.index.dense import DenseRetriever
from rlsys.search.index.folder import Index, build


@pytest.fixture
def copy(index_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_dir, tmp_path / "copy"))


def test_scores_and_rows_equal_brute_force(
    index_dir: Path, encoder: Encoder, queries: list[str], brute_force: tuple[Any, Any]
) -> None:
    expected, order = brute_force
    scores, rows = Index.open(index_dir).search(encoder.encode_queries(queries), topk=5)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, order[:, :5], axis=1), atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(expected, rows, axis=1), scores, atol=1e-5)


def test_more_hits_than_passages_gives_all_of_them(retriever: DenseRetriever) -> None:
    (hits,) = retriever.find(retriever.prepare(["Bamako"]), topk=1000)
    assert len({hit.document["id"] for hit in hits}) == 200


def test_the_manifest_says_how_the_vectors_were_made(index_dir: Path, encoder: Encoder) -> None:
    assert (
        asdict(Index.open(index_dir).manifest).items()
        >= {
            "rows": 200,
            "encoder": "minilm",
            "pooling": "mean",
            "normalize": True,
            "dimension": 384,
            "faiss_type": "Flat",
            "encoder_sha256": encoder.checksum,
        }.items()
    )


def test_building_twice_builds_once_and_other_inputs_replace(
    copy: Path, corpus_path: Path, encoder: Encoder, tmp_path: Path
) -> None:
    before = (copy / "index.faiss").stat().st_mtime_ns
    assert not build(Corpus.open(corpus_path), encoder, copy)
    assert (copy / "index.faiss").stat().st_mtime_ns == before
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join(corpus_path.read_text().splitlines(keepends=True)[:5]))
    seen: list[tuple[int, int]] = []
    assert build(Corpus.open(shorter), encoder, copy, lambda done, rows: seen.append((done, rows)))
    assert seen == [(5, 5)]
    assert Index.open(copy).vectors.ntotal == 5


def test_a_failed_build_leaves_the_old_index_and_no_draft(
    copy: Path, encoder: Encoder, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "0", "contents": "fine"}\n{"id": "1"}\n')
    for out in (copy, tmp_path / "new"):
        with pytest.raises(UserError, match="line 2"):
            build(Corpus.open(bad), encoder, out)
    assert Index.open(copy).manifest.rows == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "copy"]


def test_a_folder_that_is_no_index_is_never_replaced(
    tmp_path: Path, corpus_path: Path, encoder: Encoder
) -> None:
    (tmp_path / "precious").write_text("keep")
    with pytest.raises(UserError, match="is no index"):
        build(Corpus.open(corpus_path), encoder, tmp_path)
    assert (tmp_path / "precious").read_text() == "keep"


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
        (edit_manifest(surprise=1), "does not hold the keys"),
        (drop_vector, "holds 199 vectors"),
        (lambda folder: (folder / "index.faiss").write_bytes(b"junk"), "missing or damaged"),
        (lambda folder: (folder / "index.faiss").unlink(), "missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "manifest.json").unlink(), "is not an index"),
    ],
)
def test_what_does_not_fit_together_is_refused(copy: Path, damage: Any, reason: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=reason):
        Index.open(copy)


def test_other_weights_than_the_index_was_made_with_are_refused(copy: Path) -> None:
    edit_manifest(encoder_sha256="0" * 64)(copy)
    with pytest.raises(UserError, match="weights of encoder 'minilm' have changed"):
        DenseRetriever.open(copy)
    other = DenseRetriever.open(copy, encoder="minilm")
    (hits,) = other.find(other.prepare(["What is the capital of Mali?"]), 1)
    assert "Bamako" in hits[0].document["contents"]
