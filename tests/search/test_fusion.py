"""Reciprocal-rank fusion against exact fractions, and hybrids whose two parts fit together."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.search.corpus import Corpus
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.dense import VectorRetriever
from rlsys.search.index.fusion import HybridRetriever, build_hybrid, fuse
from rlsys.search.index.lexical import LexicalOptions, build_lexical
from rlsys.search.server.command import open_retriever
from tests.search.tiny_encoders import bert, save
from tests.support.refusals import refused

rankings = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=8), min_size=1, max_size=4)


def test_ties_go_to_the_first_ranking_and_a_repeated_key_counts_once() -> None:
    assert [key for key, _ in fuse([["a", "x"], ["b", "y"]], topk=4)] == ["a", "b", "x", "y"]
    assert fuse([["a", "a", "b"]], topk=5) == [("a", 1 / 61), ("b", 1 / 63)]


@settings(max_examples=50)
@given(rankings, st.integers(0, 9), st.randoms(use_true_random=False))
def test_scores_equal_exact_fractions_in_any_order_of_the_rankings(
    lists: list[list[int]], topk: int, random: Any
) -> None:
    exact = {
        key: sum(Fraction(1, 61 + ranking.index(key)) for ranking in lists if key in ranking)
        for key in {key for ranking in lists for key in ranking}
    }
    fused = fuse(lists, topk=100)
    assert dict(fused) == pytest.approx({key: float(score) for key, score in exact.items()})
    assert [exact[key] for key, _ in fused] == sorted(exact.values(), reverse=True)
    assert fuse(lists, topk) == fused[:topk]
    assert dict(fused) == dict(fuse(random.sample(lists, len(lists)), topk=100))


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
def copy(hybrid_dir: Path, tmp_path: Path) -> Path:
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


def test_only_the_part_that_changes_is_built_again(copy: Path, corpus_path: Path, spec: EncoderSpec) -> None:
    corpus, stages = Corpus.open(corpus_path), set[str]()
    before = (copy / "dense" / "index.faiss").stat().st_ino
    assert not build_hybrid(corpus, spec, copy)
    assert build_hybrid(corpus, spec, copy, None, LexicalOptions(k1=1.5), lambda *step: stages.add(step[0]))
    assert stages == {"tokenise"}
    assert (copy / "dense" / "index.faiss").stat().st_ino == before
    assert HybridRetriever.open(copy).describe()["bm25"]["k1"] == 1.5
    assert not list(copy.parent.glob(".*"))


def test_a_build_that_fails_in_the_second_part_keeps_the_first(tmp_path: Path, spec: EncoderSpec) -> None:
    path, stages = tmp_path / "corpus.jsonl", list[str]()
    path.write_text('{"id": "0", "contents": "?"}\n')
    for _ in range(2):
        with refused("empty"):
            build_hybrid(Corpus.open(path), spec, tmp_path / "out", progress=lambda stage, *_: stages.append(stage))
    assert stages.count("add") == 2  # start and end of the one time that the dense part was built
    assert not (tmp_path / "out").exists()


def test_parts_that_do_not_fit_together_are_refused_and_closed(copy: Path, corpus_path: Path, tmp_path: Path) -> None:
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join(corpus_path.read_text().splitlines(keepends=True)[:5]))
    build_lexical(Corpus.open(shorter), copy / "bm25")
    with refused("mismatch", "corpus_sha256"):
        HybridRetriever.open(copy)
    with refused("mismatch", copy / "dense"):
        HybridRetriever.open(copy / "dense")
    shutil.rmtree(copy / "bm25")
    with patch.object(VectorRetriever, "close") as closed, refused("not_found", copy / "bm25"):
        HybridRetriever.open(copy)
    closed.assert_called_once()
