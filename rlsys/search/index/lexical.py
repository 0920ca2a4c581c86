"""Retrieval by words: BM25 over postings that are memory-mapped.

    corpus.jsonl    the corpus it was built from, linked or copied, row r = line r + 1
    postings/       an index of the library bm25s, which can open it too
    manifest.json   corpus, BM25 parameters, and how text is split into words

The defaults are those of Anserini, whose BM25 Search-R1 serves through pyserini: k1 0.9, b 0.4, lower-cased
words without possessive 's and without Lucene's 33 English stop words. One thing differs: Anserini also cuts
English words to their Porter stems, here words are matched as they are.

Building streams the corpus (see `postings`); bm25s itself would hold 4 KB a passage of 100 words in memory.
The scorer is one of its own too: it leaves the passages without a word of the query untouched, orders equal
scores by row and lets other threads run. A build that is killed starts anew and leaves nothing under the final
name.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import orjson
from bm25s import BM25
from bm25s import __version__ as bm25s_version
from bm25s.stopwords import STOPWORDS_EN

from rlsys.errors import RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.index.assemble import add_corpus, assemble
from rlsys.search.index.draft import Draft
from rlsys.search.index.folder import CORPUS_FILE
from rlsys.search.index.manifest import read_manifest, typed
from rlsys.search.index.postings import Floats, Postings, PostingsBuilder, Rows, Scorer
from rlsys.search.index.progress import OnProgress
from rlsys.search.retrieval import Hit

KIND = "bm25"
_POSTINGS_FOLDER = "postings"
_STOP_WORDS: Mapping[str, Sequence[str]] = {"en": STOPWORDS_EN, "none": ()}
_WORDS = r"\b(?!(?<=['’])s\b)\w+"
"""Runs of letters, digits and underscores, but no `s` behind an apostrophe."""
_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class LexicalOptions:
    """How words are weighed. Raises UserError for what is no BM25 parameter."""

    k1: float = 0.9
    """How slowly a word that is repeated stops to count more; 0 to 1,000,000."""
    b: float = 0.4
    """How much a long passage loses; 0 to 1."""
    stopwords: str = "en"
    """Words to leave out: en, or none."""

    def __post_init__(self) -> None:
        # With a larger k1 weights would be 0 in single precision.
        if not (0 <= self.k1 <= 1e6 and 0 <= self.b <= 1):
            raise UserError(
                f"k1 {self.k1:g} and b {self.b:g} are no BM25 parameters: give k1 from 0 to 1000000 and b from 0 to 1"
            )
        Tokeniser(stopwords=self.stopwords)


@dataclass(frozen=True, slots=True)
class Tokeniser:
    """Splits passages and queries into words alike. Raises UserError for unknown stop words, and for no pattern."""

    pattern: str = _WORDS
    stopwords: str = "en"

    def __post_init__(self) -> None:
        if self.stopwords not in _STOP_WORDS:
            raise UserError(f"stopwords {self.stopwords!r} is unknown: give {' or '.join(_STOP_WORDS)}")
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(
                f"pattern {self.pattern!r} is no regular expression ({error}): build the index again"
            ) from None

    def splitter(self) -> Callable[[str], list[str]]:
        """The function that gives the words of a text, in order."""
        words, stopped = re.compile(self.pattern).findall, frozenset(_STOP_WORDS[self.stopwords])
        return lambda text: [word for word in words(text.lower()) if word not in stopped]


@dataclass(frozen=True, slots=True)
class LexicalManifest:
    """What an index was made from. Two builds with equal manifests give the same index."""

    corpus_sha256: str
    rows: int
    k1: float
    b: float
    tokeniser: Tokeniser
    method: str = "lucene"
    bm25s: str = bm25s_version

    @classmethod
    def read(cls, folder: str | Path) -> LexicalManifest:
        """The folder's manifest. Raises UserError when there is none, or none of a BM25 index."""
        values = read_manifest(folder)
        if values["kind"] != KIND:
            raise UserError(f"{folder} is an index of kind {values['kind']!r}, not {KIND!r}: give a BM25 one")
        del values["format"], values["kind"]
        values["tokeniser"] = typed(Tokeniser, values.get("tokeniser"), folder)
        return typed(cls, values, folder)


def build_lexical(
    corpus: Corpus,
    out: str | Path,
    options: LexicalOptions | None = None,
    progress: OnProgress | None = None,
) -> bool:
    """Make the index folder `out`; True if it was made, False if it is there already with this manifest.

    An index of other inputs in `out` is replaced once the new one is complete. Raises UserError for a folder
    that is no index, and for a corpus with a bad line or without a single word.
    """
    options = options or LexicalOptions()
    tokeniser = Tokeniser(stopwords=options.stopwords)
    manifest = LexicalManifest(corpus.checksum, len(corpus), options.k1, options.b, tokeniser)

    def fill(draft: Draft) -> None:
        builder = PostingsBuilder(draft.home)
        vocabulary = _add_all(corpus, tokeniser.splitter(), builder, progress)
        if not vocabulary:
            raise UserError(f"corpus {corpus.path} holds no words: BM25 has nothing to find in it")
        _save(builder.finish(options.k1, options.b), vocabulary, manifest, draft.folder / _POSTINGS_FOLDER)
        add_corpus(corpus, draft.folder / CORPUS_FILE)

    return assemble(Path(out).absolute(), KIND, asdict(manifest), fill)


def _add_all(
    corpus: Corpus,
    words: Callable[[str], list[str]],
    builder: PostingsBuilder,
    progress: OnProgress | None,
) -> dict[str, int]:
    """Give every passage's words to the builder; returns the number of each word."""
    vocabulary: defaultdict[str, int] = defaultdict()
    vocabulary.default_factory = vocabulary.__len__
    done = 0
    if progress is not None:
        progress("tokenise", 0, len(corpus))
    for passages in corpus.chunks(_CHUNK_ROWS):
        for passage in passages:
            builder.add(map(vocabulary.__getitem__, words(passage["contents"])))
        done += len(passages)
        if progress is not None:
            progress("tokenise", done, len(corpus))
    return dict(vocabulary)


def _save(postings: Postings, vocabulary: dict[str, int], made: LexicalManifest, folder: Path) -> None:
    ranker = BM25(k1=made.k1, b=made.b, method=made.method)
    ranker.vocab_dict = vocabulary
    ranker.nonoccurrence_array = None  # Lucene's method has none
    ranker.scores = {
        "data": postings.weights,
        "indices": postings.rows,
        "indptr": postings.starts,
        "num_docs": made.rows,
    }
    ranker.save(folder, show_progress=False)


class LexicalRetriever:
    """Finds the passages that hold words of the query; the queries of a batch are shared out over threads.

    A passage without any of the words is no hit, so there may be fewer hits than asked for, and none for a
    query of unknown words. Equal scores are in the order of the rows.
    """

    def __init__(
        self,
        manifest: LexicalManifest,
        corpus: Corpus,
        postings: Postings,
        vocabulary: Mapping[str, int],
        threads: int,
    ) -> None:
        self._manifest = manifest
        self._corpus = corpus
        self._vocabulary = vocabulary
        self._words = manifest.tokeniser.splitter()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bm25")
        self._idle: SimpleQueue[Scorer] = SimpleQueue()
        for _ in range(threads):
            self._idle.put(Scorer(postings, manifest.rows))
        self._best(np.zeros(1, dtype=np.int32), topk=1)  # compiles, so that no query waits for it

    @classmethod
    def open(cls, folder: str | Path, *, threads: int | None = None) -> LexicalRetriever:
        """Open what `build_lexical` made; one thread a core without `threads`, each with 8 bytes a passage.

        Raises UserError when manifest, corpus and postings do not fit together. The entries of the postings are read
        when a query needs them: `find` raises RunError for one that is damaged.
        """
        folder = Path(folder)
        manifest = LexicalManifest.read(folder)
        corpus = Corpus.open(folder / CORPUS_FILE)
        if corpus.checksum != manifest.corpus_sha256:
            raise UserError(
                f"{corpus.path} has changed since {folder} was built: build the index again or restore the file"
            )
        postings, vocabulary, passages = _load(folder / _POSTINGS_FOLDER)
        if not (passages == manifest.rows == len(corpus) and _fits(postings, len(vocabulary))):
            raise UserError(f"the postings of {folder} do not fit its manifest: build the index again")
        return cls(manifest, corpus, postings, vocabulary, threads or len(os.sched_getaffinity(0)))

    @property
    def parallel(self) -> int:
        """One: a batch keeps all threads busy."""
        return 1

    def prepare(self, queries: Sequence[str]) -> list[Rows]:
        """The known words of each query as numbers, repeated as often as they are asked."""
        known = self._vocabulary
        return [
            np.array([known[word] for word in self._words(query) if word in known], dtype=np.int32) for query in queries
        ]

    def find(self, prepared: list[Rows], topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each query, best first."""
        best = partial(self._best, topk=min(topk, self._manifest.rows))
        found = list(self._pool.map(best, prepared))
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
        """Passages, corpus and how they are ranked."""
        made = self._manifest
        return {
            "kind": KIND,
            "passages": made.rows,
            "corpus_sha256": made.corpus_sha256,
            "k1": made.k1,
            "b": made.b,
            "stopwords": made.tokeniser.stopwords,
        }

    def close(self) -> None:
        """End the threads; the mapped files go with the last reference to them."""
        self._pool.shutdown()


def _load(folder: Path) -> tuple[Postings, Mapping[str, int], int]:
    """The mapped postings in `folder`, the number of each word, and of how many passages they are."""
    try:
        starts, rows, weights = (
            np.asarray(np.lib.format.open_memmap(folder / f"{name}.csc.index.npy", mode="r"))
            for name in ("indptr", "indices", "data")
        )
        vocabulary = dict(orjson.loads((folder / "vocab.index.json").read_bytes()))
        np.fromiter(vocabulary.values(), dtype=np.int32, count=len(vocabulary))  # raises for what is no number
        passages = orjson.loads((folder / "params.index.json").read_bytes())["num_docs"]
    # As many kinds as there are ways in which numpy and JSON can find something else than was written.
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise UserError(f"{folder} is missing or damaged ({error}): build the index again") from None
    return Postings(starts, rows, weights), vocabulary, passages


def _fits(postings: Postings, words: int) -> bool:
    """True where the arrays are of the right types and lengths, and every word has a range of entries."""
    starts, rows, weights = postings.starts, postings.rows, postings.weights
    return (
        (starts.dtype, rows.dtype, weights.dtype) == (np.int64, np.int32, np.float32)
        and starts.shape == (words + 1,)
        and rows.shape == weights.shape == (starts[-1],)
        and starts[0] == 0
        and bool((starts[1:] >= starts[:-1]).all())
    )
