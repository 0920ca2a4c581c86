"""BM25 retrieval over memory-mapped postings.

    corpus.jsonl:   the indexed corpus, linked or copied, row r = line r + 1
    postings/:      postings in the format of the library bm25s
    manifest.json:  corpus, BM25 parameters and word pattern.

The formula follows Lucene 8 and later (Kamphuis et al., ECIR 2020). Passage lengths are exact, whereas Lucene rounds
them to eight bits:

    score(q, d) = sum over the words t of q of idf(t) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|));
    idf(t) = ln(1 + (N - df + 0.5) / (df + 0.5)), always positive.

So a passage scores above 0 exactly if it contains a query word. A repeated query word counts repeatedly. Anserini,
which Search-R1 uses through pyserini, has the same default parameters, but its Porter stemming is left out here.

The build streams the corpus in bounded memory; bm25s would hold 4 KB per passage of 100 words. The first pass writes
one sorted run of (term, row, count) per block of passages. The second pass merges the runs by ranges of terms and
writes the weights. A killed build starts over. Unlike bm25s, the scorer visits only passages with a query word, orders
ties by row and releases the GIL.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import orjson
from bm25s import BM25 as BM25sIndex
from bm25s import __version__ as bm25s_version
from bm25s.stopwords import STOPWORDS_EN
from numba import njit
from numpy.typing import NDArray

from rlsys.errors import RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.spec import Floats
from rlsys.search.index.folder import (
    BM25,
    IndexDraft,
    OnProgress,
    add_corpus,
    assemble,
    new_array,
    open_corpus,
    read_values,
    silent,
    typed,
)
from rlsys.search.retrieval import Hit

Rows = NDArray[np.int32]
_POSTINGS_FOLDER = "postings"
_STOP_WORDS: Mapping[str, Sequence[str]] = {"en": STOPWORDS_EN, "none": ()}
_WORDS = r"\b(?!(?<=['’])s\b)\w+"
"""A run of letters, digits and underscores, except a lone `s` after an apostrophe."""
_CHUNK_ROWS = 1024
_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class LexicalOptions:
    """BM25 parameters. Raises UserError for values out of range."""

    k1: float = 0.9
    """Term-frequency saturation, 0 to 1,000,000; the larger, the more repetitions count."""
    b: float = 0.4
    """Length normalisation, 0 to 1; the larger, the lower long passages score."""
    stopwords: str = "en"
    """Stop-word list: en or none."""

    def __post_init__(self) -> None:
        # A larger k1 would give weights of 0 in single precision.
        if not (0 <= self.k1 <= 1e6 and 0 <= self.b <= 1):
            problem = f"k1 {self.k1:g} or b {self.b:g} is out of range"
            raise UserError(
                f"{problem}: give k1 from 0 to 1000000 and b from 0 to 1.",
                code="out_of_range",
                key="b" if 0 <= self.k1 <= 1e6 else "k1",
            )
        WordSplitter(stopwords=self.stopwords)


@dataclass(frozen=True, slots=True)
class WordSplitter:
    """Splits passages and queries into words. Raises UserError for an unknown stop-word list or an invalid pattern."""

    pattern: str = _WORDS
    stopwords: str = "en"

    def __post_init__(self) -> None:
        if self.stopwords not in _STOP_WORDS:
            raise UserError(
                f"stopwords {self.stopwords!r} is unknown: give {' or '.join(_STOP_WORDS)}.",
                code="unknown",
                key="stopwords",
            )
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            reason = f"pattern {self.pattern!r} is not a regular expression ({error}): build the index again."
            raise UserError(reason, code="malformed", key="pattern") from None

    def function(self) -> Callable[[str], list[str]]:
        """Return a function from a text to its lower-case words, in order, without stop words."""
        words, stopped = re.compile(self.pattern).findall, frozenset(_STOP_WORDS[self.stopwords])
        return lambda text: [word for word in words(text.lower()) if word not in stopped]


@dataclass(frozen=True, slots=True)
class LexicalManifest:
    """Inputs of a BM25 index. Equal manifests mean equal indexes."""

    corpus_sha256: str
    rows: int
    k1: float
    b: float
    tokeniser: WordSplitter
    method: str = "lucene"
    bm25s: str = bm25s_version

    @classmethod
    def read(cls, folder: str | Path) -> LexicalManifest:
        """Read the folder's manifest. Raises UserError if it is missing or not of a BM25 index."""
        values = read_values(folder, [BM25], f"{BM25!r}: give a BM25 index")
        values["tokeniser"] = typed(WordSplitter, values.get("tokeniser"), folder)
        return typed(cls, values, folder)


def build_lexical(
    corpus: Corpus, out: str | Path, options: LexicalOptions | None = None, progress: OnProgress = silent
) -> bool:
    """Build the index folder `out`; False if it exists already. Raises UserError for a corpus without words."""
    options = options or LexicalOptions()
    splitter = WordSplitter(stopwords=options.stopwords)
    manifest = LexicalManifest(corpus.checksum, len(corpus), options.k1, options.b, splitter)

    def fill(draft: IndexDraft) -> None:
        builder = PostingsBuilder(draft.home)
        vocabulary: defaultdict[str, int] = defaultdict()
        vocabulary.default_factory = vocabulary.__len__
        split = splitter.function()
        done = 0
        progress("tokenise", 0, len(corpus))
        for passages in corpus.chunks(_CHUNK_ROWS):
            for passage in passages:
                builder.add(map(vocabulary.__getitem__, split(passage["contents"])))
            done += len(passages)
            progress("tokenise", done, len(corpus))
        if not vocabulary:
            raise UserError(
                f"corpus {corpus.path} holds no words to index: give one with text.",
                code="empty",
                key=str(corpus.path),
            )
        ranker = BM25sIndex(k1=options.k1, b=options.b, method=manifest.method)
        ranker.vocab_dict = dict(vocabulary)
        ranker.nonoccurrence_array = None  # Lucene's method has no such array
        starts, rows, weights = builder.finish(options.k1, options.b)
        ranker.scores = {"data": weights, "indices": rows, "indptr": starts, "num_docs": manifest.rows}
        ranker.save(draft.folder / _POSTINGS_FOLDER, show_progress=False)
        add_corpus(corpus, draft.folder)

    return assemble(Path(out).absolute(), BM25, asdict(manifest), fill)


class LexicalRetriever:
    """Ranks the passages that contain query words; the queries of a batch are spread over threads.

    Every hit contains a query word. Ties are in row order.
    """

    parallel = 1
    """1, because a single batch uses all threads."""

    def __init__(
        self, manifest: LexicalManifest, corpus: Corpus, postings: Postings, vocabulary: Mapping[str, int], threads: int
    ) -> None:
        self._manifest, self._corpus, self._vocabulary = manifest, corpus, vocabulary
        self._words = manifest.tokeniser.function()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bm25")
        self._idle: SimpleQueue[PostingsScorer] = SimpleQueue()
        for _ in range(threads):
            self._idle.put(PostingsScorer(postings, manifest.rows))
        self._best(np.zeros(1, dtype=np.int32), topk=1)  # compiles the scorer before the first query

    @classmethod
    def open(cls, folder: str | Path, *, threads: int | None = None) -> LexicalRetriever:
        """Open an index of `build_lexical`. `threads` defaults to one per core; each thread takes 8 bytes per passage.

        Raises UserError if manifest, corpus and postings do not match. Postings are read on demand, so `find` raises
        RunError for a damaged entry.
        """
        folder = Path(folder)
        manifest = LexicalManifest.read(folder)
        corpus = open_corpus(folder, manifest.corpus_sha256)
        postings, vocabulary, passages = _load(folder / _POSTINGS_FOLDER)
        if not (passages == manifest.rows == len(corpus) and _fits(postings, len(vocabulary))):
            raise UserError(
                f"the postings of {folder} do not fit its manifest: build the index again.",
                code="mismatch",
                key=str(folder),
            )
        return cls(manifest, corpus, postings, vocabulary, threads or len(os.sched_getaffinity(0)))

    def prepare(self, queries: Sequence[str]) -> list[Rows]:
        """Return the term numbers of each query's known words, repetitions included."""
        known = self._vocabulary
        terms = ([known[word] for word in self._words(query) if word in known] for query in queries)
        return [np.array(numbers, dtype=np.int32) for numbers in terms]

    def find(self, prepared: list[Rows], topk: int) -> list[list[Hit]]:
        """Return up to `topk` hits per query, best first."""
        found = list(self._pool.map(partial(self._best, topk=min(topk, self._manifest.rows)), prepared))
        passages = iter(self._corpus.fetch([row for rows, _ in found for row in rows.tolist()]))
        return [[Hit(score, next(passages)) for score in scores.tolist()] for _, scores in found]

    def _best(self, terms: Rows, topk: int) -> tuple[Rows, Floats]:
        scorer = self._idle.get()
        try:
            return scorer.best(terms, topk)
        except IndexError:
            folder = self._corpus.path.parent / _POSTINGS_FOLDER
            raise RunError(f"{folder} is damaged: build the index again") from None
        finally:
            self._idle.put(scorer)

    def describe(self) -> Mapping[str, Any]:
        """Return passages, corpus and BM25 parameters."""
        made = self._manifest
        ranking = {"k1": made.k1, "b": made.b, "stopwords": made.tokeniser.stopwords}
        return {"kind": BM25, "passages": made.rows, "corpus_sha256": made.corpus_sha256, **ranking}

    def close(self) -> None:
        """Stop the threads; the files are unmapped with the last reference."""
        self._pool.shutdown()


def _load(folder: Path) -> tuple[Postings, Mapping[str, int], int]:
    """Return the mapped postings, the vocabulary (word -> term number) and the number of passages."""
    try:
        starts, rows, weights = (
            np.asarray(np.lib.format.open_memmap(folder / f"{name}.csc.index.npy", mode="r"))
            for name in ("indptr", "indices", "data")
        )
        vocabulary = dict(orjson.loads((folder / "vocab.index.json").read_bytes()))
        np.fromiter(vocabulary.values(), dtype=np.int32, count=len(vocabulary))  # raises for a non-integer
        passages = orjson.loads((folder / "params.index.json").read_bytes())["num_docs"]
    # Every exception that numpy and JSON raise for damaged files.
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise UserError(
            f"{folder} is missing or damaged ({error}): build the index again.", code="malformed", key=str(folder)
        ) from None
    return Postings(starts, rows, weights), vocabulary, passages


def _fits(postings: Postings, words: int) -> bool:
    """True if the arrays have the right types and lengths, and every word has a valid range of entries."""
    starts, rows, weights = postings
    return (
        (starts.dtype, rows.dtype, weights.dtype) == (np.int64, np.int32, np.float32)
        and starts.shape == (words + 1,)
        and rows.shape == weights.shape == (starts[-1],)
        and starts[0] == 0
        and bool((starts[1:] >= starts[:-1]).all())
    )


class Postings(NamedTuple):
    """Postings in CSC form: entries `starts[t]` to `starts[t + 1]` belong to term t, in row order.

    Shapes: `starts` [terms + 1], `rows` and `weights` [entries]. The arrays may be memory-mapped.
    """

    starts: NDArray[np.int64]
    rows: Rows
    weights: Floats


class PostingsBuilder:
    """Builds postings from passages added in row order.

    Memory: 60 bytes for each of `block` words or entries, 12 bytes per passage, 24 bytes per term. Disk: 20 bytes per
    entry in the folder `scratch`.
    """

    def __init__(self, scratch: Path, block: int = _BLOCK) -> None:
        self._scratch, self._block = scratch, block
        self._terms, self._lengths = array("i"), array("i")
        self._written = 0
        self._frequencies = np.zeros(0, dtype=np.int64)
        self._runs: list[NDArray[np.int32]] = []

    def add(self, terms: Iterable[int]) -> None:
        """Add the terms of the next passage, in any order, with repetitions."""
        before = len(self._terms)
        self._terms.extend(terms)
        self._lengths.append(len(self._terms) - before)
        if len(self._terms) >= self._block:
            self._write_run()

    def finish(self, k1: float, b: float) -> Postings:
        """Return the postings, mapped from files in `scratch`. Requires at least one term."""
        if self._terms:
            self._write_run()
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._frequencies)])
        idf = np.log1p((len(self._lengths) - self._frequencies + 0.5) / (self._frequencies + 0.5))
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        saturation = k1 * (1 - b + b * lengths / lengths.mean())
        rows, weights = (
            new_array(self._scratch / f"{name}.npy", (int(starts[-1]),), np.dtype(kind))
            for name, kind in (("rows", np.int32), ("weights", np.float32))
        )
        first = 0
        while first < len(starts) - 1:  # as many terms as fit one block of entries, at least one
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + self._block, side="right")) - 1)
            parts = [run[:, slice(*np.searchsorted(run[0], [first, last]))] for run in self._runs]
            entries = np.concatenate(parts, axis=1)
            term, row, tf = entries[:, np.argsort(entries[0], kind="stable")]  # by term, then by row
            rows[starts[first] : starts[last]] = row
            weights[starts[first] : starts[last]] = idf[term] * tf / (tf + saturation[row])
            first = last
        return Postings(starts, rows, weights)

    def _write_run(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)[self._written :]
        rows = np.repeat(np.arange(self._written, len(self._lengths)), lengths)
        keys = np.frombuffer(self._terms, dtype=np.int32).astype(np.int64) << 32 | rows
        keys, counts = np.unique(keys, return_counts=True)
        run = np.stack([keys >> 32, keys & 0xFFFFFFFF, counts]).astype(np.int32)
        path = self._scratch / f"run-{len(self._runs)}.npy"
        np.save(path, run)
        self._runs.append(np.load(path, mmap_mode="r"))
        frequencies = np.bincount(run[0], minlength=len(self._frequencies))
        frequencies[: len(self._frequencies)] += self._frequencies
        self._frequencies = frequencies
        self._written = len(self._lengths)
        self._terms = array("i")


class PostingsScorer:
    """Finds the best rows of one query at a time, with 8 bytes of scratch per passage. One instance per thread."""

    def __init__(self, postings: Postings, passages: int) -> None:
        self._postings = postings
        self._scores = np.zeros(passages, dtype=np.float32)
        self._touched = np.empty(passages, dtype=np.int32)

    def best(self, terms: Rows, topk: int) -> tuple[Rows, Floats]:
        """Return the `topk` best rows that contain one of `terms`, and their scores; ties are in row order.

        Raises IndexError for damaged postings.
        """
        try:
            return _best(*self._postings, terms, self._scores, self._touched, topk)
        except IndexError:
            self._scores.fill(0)
            raise


@njit(nogil=True)
def _best(
    starts: NDArray[np.int64], rows: Rows, weights: Floats, terms: Rows, scores: Floats, touched: Rows, topk: int
) -> tuple[Rows, Floats]:
    """Return the best rows and scores; see `PostingsScorer.best`.

    `scores` is all zeros on entry and on return; `touched` is scratch; both are [passages]. Compiled code has no bounds
    checks, so all values from files are validated before use.
    """
    reached = 0
    for term in terms:
        if not 0 <= term < len(starts) - 1:
            raise IndexError("term")
        first, last = starts[term], starts[term + 1]
        if not 0 <= first <= last <= min(len(rows), len(weights)):
            raise IndexError("entries")
        for entry in range(first, last):
            row, weight = rows[entry], weights[entry]
            # A weight of 0 or less could leave a row's score at 0, so the row would be recorded repeatedly.
            if not (0 <= row < len(scores) and 0.0 < weight < np.inf):
                raise IndexError("entry")
            if scores[row] == 0.0:
                touched[reached] = row
                reached += 1
            scores[row] += weight
    best_rows = np.empty(topk, np.int32)
    best_scores = np.empty(topk, np.float32)
    kept = 0
    for row in touched[:reached]:
        score = scores[row]
        scores[row] = 0.0
        place = kept
        while place > 0 and (
            score > best_scores[place - 1] or (score == best_scores[place - 1] and row < best_rows[place - 1])
        ):
            place -= 1
        if place == topk:
            continue
        kept = min(kept + 1, topk)
        for later in range(kept - 1, place, -1):
            best_rows[later], best_scores[later] = best_rows[later - 1], best_scores[later - 1]
        best_rows[place], best_scores[place] = row, score
    return best_rows[:kept], best_scores[:kept]
