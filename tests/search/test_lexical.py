from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.errors import RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.index.lexical import (
    LexicalOptions,
    LexicalRetriever,
    PostingsBuilder,
    PostingsScorer,
    WordSplitter,
    build_lexical,
)

STOPWORDS = re.compile(
    "a|an|and|are|as|at|be|but|by|for|if|in|into|is|it|no|not|of|on|or|such|that|the|their|then|there|these|"
    "they|this|to|was|will|with"
)


def words(text: str) -> list[str]:
    """Lucene's English analyser without stems, in other words than the code's."""
    parts = re.sub(r"(\w)['’]s\b", r"\1 ", text.lower())
    return [word for word in re.split(r"\W+", parts) if word and not STOPWORDS.fullmatch(word)]


def reference(passages: Sequence[Sequence[Any]], query: Sequence[Any], k1: float, b: float) -> list[float]:
    """BM25 of every passage in double precision, straight from the formula."""
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


def test_a_score_computed_by_hand(tmp_path: Path) -> None:
    retriever = make(tmp_path, ["cat cat dog", "dog", "bird bird"], k1=1.2, b=0.75)
    idf = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    assert search(retriever, "The cat?") == [(0, pytest.approx(idf * 2 / (2 + 1.2 * (0.25 + 0.75 * 3 / 2))))]


def test_scores_equal_brute_force_over_real_passages(
    bm25_dir: Path, passages: list[dict[str, Any]], queries: list[str]
) -> None:
    retriever = LexicalRetriever.open(bm25_dir, threads=2)
    texts = [words(passage["contents"]) for passage in passages]
    found = retriever.find(retriever.prepare(queries), 7)
    for query, hits in zip(queries[:16], found, strict=False):
        expected = reference(texts, words(query), k1=0.9, b=0.4)
        best = sorted((-score, row) for row, score in enumerate(expected) if score)[:7]
        assert [hit.score for hit in hits] == pytest.approx([-score for score, _ in best], rel=1e-5)
        assert [expected[int(hit.document["id"][1:])] for hit in hits] == pytest.approx(
            [-score for score, _ in best], rel=1e-5
        )


def test_bm25s_opens_the_postings_and_agrees(bm25_dir: Path, queries: list[str]) -> None:
    retriever = LexicalRetriever.open(bm25_dir)
    theirs = bm25s.BM25.load(bm25_dir / "postings", mmap=True, show_progress=False)
    found = retriever.find(retriever.prepare(queries), 5)
    for query, hits in zip(queries, found, strict=True):
        scores = theirs.get_scores(words(query))
        assert [hit.score for hit in hits] == pytest.approx(np.sort(scores)[::-1][:5].tolist(), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    passages=st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=9).filter(any),
    query=st.lists(st.integers(0, 6), max_size=5),
    topk=st.integers(1, 10),
    block=st.integers(1, 20),
    k1=st.floats(0, 3),
    b=st.floats(0, 1),
)
def test_postings_equal_the_formula_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory,
    passages: Any,
    query: Any,
    topk: int,
    block: int,
    k1: float,
    b: float,
) -> None:
    names = {term: number for number, term in enumerate(dict.fromkeys(t for p in passages for t in p))}
    builder = PostingsBuilder(tmp_path_factory.mktemp("scratch"), block=block)
    for passage in passages:
        builder.add(names[term] for term in passage)
    scorer = PostingsScorer(builder.finish(k1, b), len(passages))
    terms = np.array([names[term] for term in query if term in names], dtype=np.int32)
    expected = np.array(reference(passages, query, k1, b))
    for _ in range(2):  # the second search finds the scratch of the first clean
        rows, scores = scorer.best(terms, topk)
        np.testing.assert_allclose(scores, np.sort(expected[expected > 0])[::-1][:topk], rtol=1e-5)
        np.testing.assert_allclose(expected[rows], scores, rtol=1e-5)
        assert len(set(rows.tolist())) == len(rows)


def test_equal_scores_are_in_the_order_of_the_rows(tmp_path: Path) -> None:
    retriever = make(tmp_path, ["x y", "x", "x y", "y x", "x y"])
    assert [row for row, _ in search(retriever, "y", topk=3)] == [0, 2, 3]
    assert [row for row, _ in search(retriever, "x y", topk=5)] == [0, 2, 3, 4, 1]


def test_only_passages_with_a_word_of_the_query_are_hits(tmp_path: Path) -> None:
    retriever = make(tmp_path, ["cat", "dog", "cat dog", "the"])
    assert [row for row, _ in search(retriever, "cat")] == [0, 2]
    for nothing in ("zebra", "the", "", "?!"):
        assert search(retriever, nothing) == []
    assert retriever.find(retriever.prepare([]), 3) == []


def test_words_are_those_of_lucenes_english_analyser() -> None:
    split = WordSplitter().function()
    text = "The Beatles' drummer, O'Neil’s 2nd café IS in U.S. (Vitamin C) — it’s"
    assert split(text) == ["beatles", "drummer", "o", "neil", "2nd", "café", "u", "s", "vitamin", "c"]
    assert WordSplitter(stopwords="none").function()("To be, or not to be") == [
        "to",
        "be",
        "or",
        "not",
        "to",
        "be",
    ]
    assert set(words(text)) == set(split(text))


def test_building_twice_builds_once_and_other_inputs_replace(copy: Path, corpus_path: Path) -> None:
    corpus = Corpus.open(corpus_path)
    before = (copy / "postings" / "data.csc.index.npy").stat().st_mtime_ns
    assert not build_lexical(corpus, copy)
    assert (copy / "postings" / "data.csc.index.npy").stat().st_mtime_ns == before
    seen: list[tuple[str, int, int]] = []
    assert build_lexical(corpus, copy, LexicalOptions(k1=1.2), lambda *step: seen.append(step))
    assert seen == [("tokenise", 0, 200), ("tokenise", 200, 200)]
    assert LexicalRetriever.open(copy).describe()["k1"] == 1.2
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_a_failed_build_leaves_the_old_index_and_no_draft(copy: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "0", "contents": "fine"}\n{"id": "1"}\n')
    for out in (copy, tmp_path / "new"):
        with pytest.raises(UserError, match="line 2"):
            build_lexical(Corpus.open(bad), out)
    assert LexicalRetriever.open(copy).describe()["passages"] == 200
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))


def test_what_a_killed_build_left_is_not_used(corpus_path: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from rlsys.search.corpus import Corpus\n"
        "from rlsys.search.index.lexical import build_lexical\n"
        "kill = lambda *step: os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_lexical(Corpus.open(sys.argv[1]), sys.argv[2], None, kill)\n"
    )
    out = tmp_path / "index"
    ended = subprocess.run([sys.executable, "-c", code, str(corpus_path), str(out)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not out.exists()
    left = tmp_path / ".index.building" / "index"
    (left / "half").write_text("of something")
    assert build_lexical(Corpus.open(corpus_path), out)
    assert not (out / "half").exists()
    assert not left.parent.exists()


def test_a_corpus_that_changes_meanwhile_replaces_no_index(copy: Path, tmp_path: Path) -> None:
    growing = tmp_path / "growing.jsonl"
    growing.write_text('{"id": "0", "contents": "a word"}\n')

    def grow(*_: object) -> None:
        with growing.open("a") as file:
            file.write('{"id": "1", "contents": "another"}\n')

    before = (copy / "manifest.json").read_text()
    with pytest.raises(UserError, match="has changed while its index was built"):
        build_lexical(Corpus.open(growing), copy, None, grow)
    assert (copy / "manifest.json").read_text() == before


def test_what_cannot_be_built_is_refused(tmp_path: Path, corpus_path: Path) -> None:
    corpus = Corpus.open(corpus_path)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"k1": -1.0}, "k1 -1 and b 0.4"),
        ({"b": 1.5}, "k1 0.9 and b 1.5"),
        ({"k1": math.nan}, "k1 nan"),
        ({"k1": math.inf}, "k1 inf"),
        ({"stopwords": "fr"}, "stopwords 'fr' is unknown"),
    ]
    for options, reason in refused:
        with pytest.raises(UserError, match=reason):
            LexicalOptions(**options)
    with pytest.raises(UserError, match="holds no words"):
        build_lexical(Corpus.open(write(tmp_path / "mute.jsonl", ["?", "the"])), tmp_path / "new")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("keep")
    with pytest.raises(UserError, match="is no index"):
        build_lexical(corpus, tmp_path / "mine")
    assert (tmp_path / "mine" / "precious").read_text() == "keep"


def edit_manifest(**changes: Any) -> Any:
    def edit(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_corpus(folder: Path) -> None:
    path = folder / "corpus.jsonl"
    text = path.read_text()
    path.unlink()  # it is a link to the corpus of the other tests
    path.write_text(text.replace("capital", "Capital", 1))


def cut(folder: Path) -> None:
    path = folder / "postings" / "indices.csc.index.npy"
    path.write_bytes(path.read_bytes()[:500])


def drop_entry(folder: Path) -> None:
    path = folder / "postings" / "data.csc.index.npy"
    np.save(path, np.load(path)[:-1])


def edit_file(name: str, **changes: Any) -> Any:
    def edit(folder: Path) -> None:
        path = folder / "postings" / f"{name}.index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_array(name: str, place: int, value: float) -> Any:
    def edit(folder: Path) -> None:
        array = np.load(folder / "postings" / f"{name}.csc.index.npy", mmap_mode="r+")
        array[place] = value

    return edit


def retype(name: str, dtype: str) -> Any:
    def edit(folder: Path) -> None:
        path = folder / "postings" / f"{name}.csc.index.npy"
        np.save(path, np.load(path).astype(dtype))

    return edit


def claim_words(folder: Path) -> None:
    """Postings of which every entry is of the same passage, with a weight that leaves its score at 0."""
    for name, value in (("indices", 3), ("data", 0)):
        path = folder / "postings" / f"{name}.csc.index.npy"
        np.save(path, np.full_like(np.load(path), value))


DAMAGED = [
    edit_array("indices", 40, 2**31 - 1),
    edit_array("indices", 40, -(2**30)),
    edit_array("indices", 40, -1),
    edit_array("indices", 40, 200),
    edit_array("indptr", 7, 2**40),
    edit_array("indptr", 7, -(2**62)),
    edit_array("indptr", 7, 0),
    edit_array("indptr", 0, -(2**40)),
    edit_array("indptr", 0, 1),
    edit_array("data", 40, math.nan),
    edit_array("data", 40, math.inf),
    edit_array("data", 40, -1.0),
    claim_words,
    retype("indices", "int64"),
    retype("indptr", "float64"),
    retype("data", ">f4"),
    edit_file("vocab", capital=2**30),
    edit_file("vocab", capital=-2),
    edit_file("vocab", zebra=1),
    edit_file("vocab", zebra="one"),
    edit_file("vocab", zebra=None),
    edit_file("params", num_docs=None),
    lambda folder: (folder / "postings" / "params.index.json").write_text("[]"),
    lambda folder: (folder / "postings" / "vocab.index.json").write_text("[" * 100_000),
    lambda folder: (folder / "postings" / "indices.csc.index.npy").write_bytes(b""),
    edit_manifest(rows=2**40),
]


def test_damaged_postings_end_in_a_sentence_and_not_the_process(bm25_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from rlsys.errors import RunError, UserError\n"
        "from rlsys.search.index.lexical import LexicalRetriever\n"
        "from rlsys.search.corpus import Corpus\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n"
        "        retriever = LexicalRetriever.open(folder, threads=1)\n"
        "        texts = [passage['contents'] for passage in Corpus.open(folder + '/corpus.jsonl').fetch(range(200))]\n"
        "        hits = retriever.find(retriever.prepare(texts), 5)\n"
        "        print('nothing noticed', flush=True)\n"
        "    except (RunError, UserError) as told:\n"
        "        print(folder, str(told).isprintable() and str(told).endswith('build the index again'), flush=True)\n"
    )
    folders = [str(shutil.copytree(bm25_dir, tmp_path / str(number))) for number in range(len(DAMAGED))]
    for damage, folder in zip(DAMAGED, folders, strict=True):
        damage(Path(folder))
    ended = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines() == [f"{folder} True" for folder in folders], ended.stderr
    assert ended.returncode == 0


def test_a_query_that_met_damage_leaves_nothing_to_the_next(copy: Path) -> None:
    entries = np.load(copy / "postings" / "indptr.csc.index.npy")
    numbers = json.loads((copy / "postings" / "vocab.index.json").read_text())
    edit_array("indices", int(entries[numbers["capital"] + 1]) - 1, 2**31 - 1)(copy)
    retriever = LexicalRetriever.open(copy, threads=1)
    expected = search(retriever, "Bamako Mali")
    assert expected
    with pytest.raises(RunError, match="is damaged: build the index again"):
        search(retriever, "capital")
    assert search(retriever, "Bamako Mali") == expected


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (edit_corpus, "has changed since"),
        (edit_manifest(rows=199), "do not fit its manifest"),
        (edit_manifest(surprise=1), "does not hold its keys"),
        (edit_manifest(kind="dense"), "of kind 'dense'"),
        (edit_manifest(k1="0.9", tokeniser=None), "does not hold its keys"),
        (edit_manifest(tokeniser={"pattern": "("}), "is no regular expression"),
        (edit_manifest(tokeniser={"stopwords": "fr"}), "stopwords 'fr' is unknown"),
        (drop_entry, "do not fit its manifest"),
        (cut, "missing or damaged"),
        (lambda folder: shutil.rmtree(folder / "postings"), "missing or damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), "is not an index"),
    ],
)
def test_what_does_not_fit_together_is_refused(copy: Path, damage: Any, reason: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=reason):
        LexicalRetriever.open(copy)


def test_threads_that_search_at_once_do_not_disturb_each_other(bm25_dir: Path, queries: list[str]) -> None:
    retriever = LexicalRetriever.open(bm25_dir, threads=2)
    expected = retriever.find(retriever.prepare(queries), 5)
    answers: list[bool] = []

    def ask() -> None:
        answers.extend(retriever.find(retriever.prepare(queries), 5) == expected for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(answers) == {True: 80}
    retriever.close()
