"""An inverted index: for each term the passages that hold it, each with the BM25 weight it adds there.

BM25 as Lucene has it since version 8 (Kamphuis et al., ECIR 2020, "Which BM25 do you mean?"), with exact
passage lengths where Lucene keeps eight bits of each:

    score(q, d) = sum over the words t of q of idf(t) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|))
    idf(t) = ln(1 + (N - df + 0.5) / (df + 0.5))            always positive

so a passage scores above 0 exactly if it holds a word of the query. A word that is asked twice counts twice.

Building takes two passes in bounded memory. The first writes runs: blocks of passages as (term, row, count),
sorted. The second walks over the terms in ranges, gathers each range from all runs, weighs it and writes it
behind the one before, so that all files are read and written from front to back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rlsys.search.index.draft import new_array

Rows = NDArray[np.int32]
Floats = NDArray[np.float32]
_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class Postings:
    """Entries `starts[t]` to `starts[t + 1]` belong to term t, by row; the arrays may be memory-mapped."""

    starts: NDArray[np.int64]
    """[terms + 1]"""
    rows: Rows
    """[entries]"""
    weights: Floats
    """[entries]"""


class PostingsBuilder:
    """Takes passages in order of their rows, then makes their postings.

    It keeps `block` words, or entries, in memory at a time (about 60 bytes each, so 1 GB), besides 12 bytes a passage
    and 24 a term; `scratch` takes 12 bytes an entry for the runs and 8 for the result.
    """

    def __init__(self, scratch: Path, block: int = _BLOCK) -> None:
        self._scratch = scratch
        self._block = block
        self._terms = array("i")
        self._lengths = array("i")
        self._written = 0
        self._frequencies = np.zeros(0, dtype=np.int64)
        self._runs: list[NDArray[np.int32]] = []

    def add(self, terms: Iterable[int]) -> None:
        """The terms of the next passage, in any order, repeated as often as they occur."""
        before = len(self._terms)
        self._terms.extend(terms)
        self._lengths.append(len(self._terms) - before)
        if len(self._terms) >= self._block:
            self._write_run()

    def finish(self, k1: float, b: float) -> Postings:
        """The postings, mapped from files in `scratch`. There must be at least one term."""
        if self._terms:
            self._write_run()
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._frequencies)])
        count = len(self._lengths)
        idf = np.log1p((count - self._frequencies + 0.5) / (self._frequencies + 0.5))
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        saturation = k1 * (1 - b + b * lengths / lengths.mean())
        made = Postings(
            starts,
            self._create("rows", int(starts[-1]), np.int32),
            self._create("weights", int(starts[-1]), np.float32),
        )
        for first, last in _ranges(starts, self._block):
            term, row, tf = self._gather(first, last)
            made.rows[starts[first] : starts[last]] = row
            made.weights[starts[first] : starts[last]] = idf[term] * tf / (tf + saturation[row])
        return made

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

    def _gather(self, first: int, last: int) -> tuple[Rows, Rows, Rows]:
        """Term, row and count of the entries of the terms first to last - 1, by term, then by row."""
        parts = []
        for run in self._runs:
            begin, end = np.searchsorted(run[0], [first, last])
            parts.append(run[:, begin:end])
        entries = np.concatenate(parts, axis=1)
        term, row, tf = entries[:, np.argsort(entries[0], kind="stable")]
        return term, row, tf

    def _create(self, name: str, entries: int, dtype: type[np.generic]) -> NDArray[Any]:
        return new_array(self._scratch / f"{name}.npy", (entries,), np.dtype(dtype))


def _ranges(starts: NDArray[np.int64], entries: int) -> Iterator[tuple[int, int]]:
    """Ranges of terms of at most `entries` entries each, or of one term."""
    first = 0
    while first < len(starts) - 1:
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + entries, side="right")) - 1)
        yield first, last
        first = last


class Scorer:
    """Finds the best rows of one query at a time; keeps 8 bytes a passage. Each thread needs its own."""

    def __init__(self, postings: Postings, passages: int) -> None:
        self._postings = postings
        self._scores = np.zeros(passages, dtype=np.float32)
        self._touched = np.empty(passages, dtype=np.int32)

    def best(self, terms: Rows, topk: int) -> tuple[Rows, Floats]:
        """At most `topk` rows that hold one of `terms`, and their scores; best first, ties by row.

        Runs without Python's global lock. Raises IndexError where the postings of the terms point out of the arrays,
        as in a damaged file.
        """
        made = self._postings
        try:
            return _best(made.starts, made.rows, made.weights, terms, self._scores, self._touched, topk)
        except IndexError:
            self._scores.fill(0)
            raise


@njit(nogil=True)
def _best(
    starts: NDArray[np.int64],
    rows: Rows,
    weights: Floats,
    terms: Rows,
    scores: Floats,
    touched: Rows,
    topk: int,
) -> tuple[Rows, Floats]:
    """`scores` is all zeros on entry and on return; `touched` is scratch. Both are [passages].

    Compiled code reads and writes wherever it is told, so whatever comes from a file is looked at before it is used.
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
            # A weight of 0 or less could leave a row at 0 and have it touched without end.
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
            best_rows[later] = best_rows[later - 1]
            best_scores[later] = best_scores[later - 1]
        best_rows[place] = row
        best_scores[place] = score
    return best_rows[:kept], best_scores[:kept]
