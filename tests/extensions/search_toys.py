"""Search backends from outside of rlsys: one that works, and some that do not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt

Measure = StrEnum("Measure", ["shared", "jaccard"])


class Letters:
    """Scores a passage by the letters that it shares with the query, times `scale`."""

    closed = 0

    def __init__(self, *, scale: Annotated[float, Gt(0)] = 1.0, measure: Measure = Measure.shared) -> None:
        assert isinstance(measure, Measure)
        self.scale, self.measure = scale, measure

    def build(self, corpus: Any, folder: Path) -> None:
        texts = [passage["contents"] for chunk in corpus.chunks(7) for passage in chunk]
        np.save(folder / "letters.npy", np.stack([self._letters(text) for text in texts]))

    def open(self, folder: Path) -> None:
        self._rows = np.load(folder / "letters.npy")

    def size(self) -> int:
        return len(self._rows)

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        asked = np.stack([self._letters(query) for query in queries])
        shared = (asked[:, None] & self._rows[None]).sum(axis=-1).astype(float)
        if self.measure is Measure.jaccard:
            shared /= (asked[:, None] | self._rows[None]).sum(axis=-1)
        best = np.argsort(-shared, axis=1, kind="stable")[:, :topk]
        return [[(row, self.scale * line[row]) for row in rows] for line, rows in zip(shared, best, strict=True)]

    def close(self) -> None:
        type(self).closed += 1

    @staticmethod
    def _letters(text: str) -> np.ndarray[Any, Any]:
        return np.array([letter in text.lower() for letter in "abcdefghijklmnopqrstuvwxyz"])


class Answers(Letters):
    """Returns `answer`, in JSON, to every query."""

    def __init__(self, *, answer: str) -> None:
        super().__init__()
        self._answer = answer

    def search(self, queries: Sequence[str], topk: int) -> Any:  # noqa: ARG002
        return [json.loads(self._answer)] * len(queries)


class AnswersOnce(Letters):
    def search(self, queries: Sequence[str], topk: int) -> Any:
        return super().search(queries, topk)[:-1]


class FailsToSearch(Letters):
    def search(self, queries: Sequence[str], topk: int) -> Any:
        raise ZeroDivisionError(queries, topk)


class ExitsInSearch(Letters):
    def search(self, queries: Sequence[str], topk: int) -> Any:  # noqa: ARG002
        raise SystemExit(3)


class ExitsInBuild(Letters):
    def build(self, corpus: Any, folder: Path) -> None:  # noqa: ARG002
        raise SystemExit(3)


class FailsToBuild(Letters):
    def build(self, corpus: Any, folder: Path) -> None:
        super().build(corpus, folder)
        raise PermissionError("no")


class FailsToOpen(Letters):
    def open(self, folder: Path) -> None:
        raise LookupError(folder)


class ForgetsPassages(Letters):
    def size(self) -> int:
        return super().size() - 1


class WithoutSearch:
    def build(self, corpus: Any, folder: Path) -> None: ...

    def open(self, folder: Path) -> None: ...

    def size(self) -> int:
        return 0


class SearchWithoutTopk(Letters):
    def search(self, queries: Sequence[str]) -> Any:  # type: ignore[override]
        return super().search(queries, 3)
