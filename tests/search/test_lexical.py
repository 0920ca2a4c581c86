"""Tests of BM25 indexes: against the formula and bm25s, and with damaged files."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from typing import Any
from unittest.mock import Mock

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.errors import Code, RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.index import lexical
from rlsys.search.index.lexical import (
    LexicalOptions,
    LexicalRetriever,
    Postings,
    PostingsBuilder,
    PostingsScorer,
    WordSplitter,
    build_lexical,
)
from rlsys.search.server.command import open_retriever
from tests.search.index_edits import Edit, edit_corpus, edit_json, edit_manifest
from tests.support.refusals import refused

Array = np.ndarray[Any, Any]


def reference(passages: Sequence[Sequence[Any]], query: Sequence[Any], k1: float, b: float) -> list[float]:
    """Return the BM25 score of every passage, by the formula in double precision."""
    mean = sum(map(len, passages)) / len(passages)
    scores = []
    for passage in passages:
        score = 0.0
        for word in query:
            df = sum(word in other for other in passages)
            tf = passage.count(word)
            idf = math.log(1 + (len(passages) - df + 0.5) / (df + 0.5))
            score += idf * tf / (tf + k1 * (1 - b + b * len(passage) / mean)) if tf else 0.0
        scores.append(score)
    return scores


def write(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"id": row, "contents": text}) + "\n" for row, text in enumerate(texts)))
    return path


def make(folder: Path, texts: Sequence[str], **options: Any) -> LexicalRetriever:
    build_lexical(Corpus.open(write(folder / "corpus.jsonl", texts)), folder / "index", LexicalOptions(**options))
    return LexicalRetriever.open(folder / "index", threads=2)


def search(retriever: LexicalRetriever, query: str, topk: int = 10) -> list[tuple[Any, float]]:
    (hits,) = retriever.find(retriever.prepare([query]), topk)
    return [(hit.document["id"], hit.score) for hit in hits]


@pytest.fixture(scope="session")
def bm25_dir(corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bm25") / "countries"
    assert build_lexical(Corpus.open(corpus_path), out)
    return out


@pytest.fixture
def copy(bm25_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bm25_dir, tmp_path / "copy"))


def test_bm25s_opens_the_postings_and_agrees(bm25_dir: Path, queries: list[str]) -> None:
    retriever = LexicalRetriever.open(bm25_dir)
    theirs = bm25s.BM25.load(bm25_dir / "postings", mmap=True, show_progress=False)
    found = retriever.find(retriever.prepare(queries), 5)
    for query, hits in zip(queries, found, strict=True):
        scores = theirs.get_scores(WordSplitter().function()(query))
        assert [hit.score for hit in hits] == pytest.approx(np.sort(scores)[::-1][:5].tolist(), rel=1e-6)


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=9).filter(any),
    st.lists(st.integers(0, 6), max_size=5),
    st.data(),
)
def test_postings_equal_the_formula_for_any_block_size(
    tmp_path_factory: Any, passages: Any, query: Any, data: Any
) -> None:
    topk, block = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 20))
    k1, b = data.draw(st.floats(0, 3)), data.draw(st.floats(0, 1))
    names = {term: number for number, term in enumerate(dict.fromkeys(t for p in passages for t in p))}
    builder = PostingsBuilder(tmp_path_factory.mktemp("scratch"), block=block)
    for passage in passages:
        builder.add(names[term] for term in passage)
    scorer = PostingsScorer(builder.finish(k1, b), len(passages))
    terms = np.array([names[term] for term in query if term in names], dtype=np.int32)
    expected = np.array(reference(passages, query, k1, b))
    for _ in range(2):  # the first search must leave clean buffers for the second
        rows, scores = scorer.best(terms, topk)
        np.testing.assert_allclose(scores, np.sort(expected[expected > 0])[::-1][:topk], rtol=1e-5)
        np.testing.assert_allclose(expected[rows], scores, rtol=1e-5)
        assert len(set(rows.tolist())) == len(rows)


def test_hits_share_a_word_with_the_query_and_ties_keep_the_order_of_rows(tmp_path: Path) -> None:
    retriever = make(tmp_path, ["x y", "x", "x y", "y x", "x y", "the"])
    assert [row for row, _ in search(retriever, "y", topk=3)] == [0, 2, 3]
    assert [row for row, _ in search(retriever, "x y", topk=10)] == [0, 2, 3, 4, 1]
    for nothing in ("zebra", "the", ""):
        assert search(retriever, nothing) == []
    assert retriever.find(retriever.prepare([]), 3) == []


def test_an_opened_index_has_the_threads_that_it_is_given(bm25_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(wraps=ThreadPoolExecutor)
    monkeypatch.setattr(lexical, "ThreadPoolExecutor", made)
    open_retriever(bm25_dir, threads=3).close()
    assert made.call_args.args == (3,)


def test_words_are_split_as_by_lucenes_english_analyser() -> None:
    text = "The Beatles' drummer, O'Neil’s 2nd café IS in U.S. (Vitamin C) — it’s"
    split = WordSplitter().function()(text)
    assert split == ["beatles", "drummer", "o", "neil", "2nd", "café", "u", "s", "vitamin", "c"]
    assert WordSplitter(stopwords="none").function()("To be, or") == ["to", "be", "or"]
    with refused("unknown", "stopwords"):
        LexicalOptions(stopwords="fr")
    with refused("out_of_range", "k1"):
        LexicalOptions(k1=math.nan)


def grow(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"id": "1", "contents": "more"}\n')


@pytest.mark.parametrize(("text", "grows", "code"), [("?", False, "empty"), ("word", True, "in_use")])
def test_a_corpus_without_words_or_that_grows_leaves_the_old_index_and_no_draft(
    copy: Path, tmp_path: Path, text: str, grows: bool, code: Code
) -> None:
    path, before = write(tmp_path / "corpus.jsonl", [text]), (copy / "manifest.json").read_text()
    with refused(code, path):
        build_lexical(Corpus.open(path), copy, progress=lambda *_: grow(path) if grows else None)
    assert (copy / "manifest.json").read_text() == before
    assert not list(tmp_path.glob(".*"))


def test_a_failed_fsync_leaves_no_index(corpus_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports a lost page only once, so that a second fsync would succeed."""
    real, synced = os.fsync, []

    def fail_once(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 3:  # the first call syncs the manifest
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    corpus, out = Corpus.open(corpus_path), tmp_path / "index"
    with pytest.raises(RunError, match=re.escape(str(out))):
        build_lexical(corpus, out)
    assert not list(tmp_path.rglob("manifest.json"))
    assert build_lexical(corpus, out)


def edit_array(name: str, change: Callable[[Array], Array]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "postings" / f"{name}.csc.index.npy"
        np.save(path, change(np.load(path)))

    return edit


def edit_entry(name: str, value: float) -> Edit:
    """Return an edit that sets the eighth entry of the array `name`."""
    return edit_array(name, lambda array: np.where(np.arange(len(array)) == 7, value, array).astype(array.dtype))


VOCABULARY = "postings/vocab.index.json"
DAMAGES: list[tuple[Edit, str | None]] = [
    (edit_entry("indices", 2**31 - 1), None),
    (edit_entry("data", math.nan), None),
    (edit_json(VOCABULARY, capital=2**30), None),
    (edit_entry("indptr", 2**40), "mismatch"),
    (edit_array("indices", lambda array: array.astype("int64")), "mismatch"),
    (edit_corpus, "mismatch"),
    (edit_json(VOCABULARY, zebra="one"), "malformed"),
    (lambda folder: (folder / VOCABULARY).write_text("[" * 100_000), "malformed"),
    (lambda folder: shutil.rmtree(folder / "postings"), "malformed"),
    (edit_manifest(k1="0.9", tokeniser=None), "malformed"),
    (edit_manifest(tokeniser={"pattern": "("}), "malformed"),
]


def find_all(folder: Path, queries: list[str]) -> None:
    retriever = LexicalRetriever.open(folder, threads=1)
    retriever.find(retriever.prepare(queries), 5)


@pytest.mark.parametrize(("damage", "told"), DAMAGES)
def test_a_damaged_index_raises_a_readable_error(
    copy: Path, passages: list[Any], damage: Edit, told: str | None
) -> None:
    damage(copy)
    with pytest.raises((RunError, UserError)) as caught:
        find_all(copy, [passage["contents"] for passage in passages])
    assert (caught.type, caught.value.code) == (UserError if told else RunError, told)
    assert str(caught.value).isprintable()


def test_a_query_that_fails_on_damage_leaves_the_next_unaffected() -> None:
    starts, entries = np.array([0, 2, 3]), np.array([0, 9, 0], dtype=np.int32)
    scorer = PostingsScorer(Postings(starts, entries, np.ones(3, dtype=np.float32)), 2)
    with pytest.raises(IndexError):
        scorer.best(np.array([0], dtype=np.int32), 5)
    rows, scores = scorer.best(np.array([1], dtype=np.int32), 5)
    assert (rows.tolist(), scores.tolist()) == ([0], [1.0])


def test_concurrent_queries_share_no_scorer_and_give_the_same_hits(
    bm25_dir: Path, queries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first query keeps its scorer until the other two, which run in the other thread, have ended."""
    retriever = LexicalRetriever.open(bm25_dir, threads=2)
    ready, real = retriever.prepare(queries[:3]), PostingsScorer.best
    expected = retriever.find(ready, 5)
    busy: list[PostingsScorer] = []
    shared: list[bool] = []
    lock, ended = Lock(), Event()

    def best(scorer: PostingsScorer, terms: Any, topk: int) -> Any:
        with lock:
            first = not shared
            shared.append(scorer in busy)
            busy.append(scorer)
        if first:
            assert ended.wait(900)
        found = real(scorer, terms, topk)
        with lock:
            busy.remove(scorer)
            if len(shared) == 3:
                ended.set()
        return found

    monkeypatch.setattr(PostingsScorer, "best", best)
    assert retriever.find(ready, 5) == expected
    assert shared == [False] * 3
    retriever.close()
