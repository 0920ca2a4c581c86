"""Kept trajectories as the page wants them: an index of columns for its list, and rows with every token for its reader.

Neighbouring tokens of one kind are a run (`runs_of`): what the policy did not write has one text for all of them, and a
figure that is the same for all of a run is written once. Numbers are rounded to what a reader can use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.data.trajectory import Action
from rlsys.observe.kept import Kept

CHUNK = 32  # Trajectories that are unpacked together, at most
DIGITS = 4  # Of log-probs, advantages and weights after the point


class TrajectoryIndex:
    """Columns of all trajectories in their order; what the page can list, filter and sort by without unpacking any."""

    def __init__(self) -> None:
        self._questions: dict[str, int] = {}
        self._asked: list[dict[str, Any]] = []
        self._columns: dict[str, list[Any]] = {}
        self._chunks: list[tuple[int, int, int]] = []

    def add(self, kept: Kept) -> None:
        """The next trajectory. Those of a step come together."""
        asked: dict[str, Any] = {"uid": kept.question_uid, "text": kept.question or kept.prompt.strip()}
        asked |= {"golden": list(kept.golden_answers), "source": kept.data_source}
        trained = kept.loss_mask.astype(bool)
        row = {
            "question": self._number(asked),
            "step": kept.step,
            "sample": kept.sample,
            "right": int(kept.exact),
            "answer": kept.answer,
            "reward": _rounded(kept.reward),
            "finish": str(kept.finish),
            "searches": sum(turn.action == Action.SEARCH and bool(turn.observation) for turn in kept.turns),
            "errors": sum(bool(turn.search_error) for turn in kept.turns),
            "trained": int(trained.sum()),
            "length": len(kept.token_ids) - kept.prompt_length,
            "advantage": _mean(kept.advantages[trained]),
            "log_ratio": _furthest((kept.old_logprobs - kept.rollout_logprobs)[trained]),
            "lag": _oldest(kept, trained),
        }
        for name, value in row.items():
            self._columns.setdefault(name, []).append(value)
        self._into_chunk(kept.step)

    def extend(self, later: TrajectoryIndex) -> None:
        """Add what is in `later`, which is of other steps than this one."""
        numbers = [self._number(asked) for asked in later._asked]
        for name, values in later._columns.items():
            own = [numbers[value] for value in values] if name == "question" else values
            self._columns.setdefault(name, []).extend(own)
        self._chunks += later._chunks

    def as_json(self, first_chunk: int) -> dict[str, Any] | None:
        """Questions, columns, and of every chunk its step, the place of its first trajectory in the step, and how many it
        has; None where nothing was kept."""
        if not self._asked:
            return None
        columns = {"questions": self._asked, "columns": self._columns}
        return {**columns, "first_chunk": first_chunk, "chunks": self._chunks}

    def _number(self, asked: dict[str, Any]) -> int:
        """Of a question, which is a new one if its uid is."""
        number = self._questions.setdefault(asked["uid"], len(self._asked))
        if number == len(self._asked):
            self._asked.append(asked)
        return number

    def _into_chunk(self, step: int) -> None:
        if not self._chunks or self._chunks[-1][0] != step:
            self._chunks.append((step, 0, 1))
            return
        _, first, count = self._chunks[-1]
        if count < CHUNK:
            self._chunks[-1] = (step, first, count + 1)
        else:
            self._chunks.append((step, first + count, 1))


class Chunks:
    """Rows on their way into chunks, as the index cuts them."""

    def __init__(self, first: int, sink: Callable[[int, list[dict[str, Any]]], None]) -> None:
        """`sink` gets each chunk's number, counted from `first`, and its rows."""
        self._next, self._sink = first, sink

    def passing(self, kept: Iterable[Kept]) -> Iterator[Kept]:
        """`kept`, unchanged; each of them is put into a chunk on its way."""
        for _, of_step in groupby(kept, key=lambda trajectory: trajectory.step):
            rows: list[dict[str, Any]] = []
            for trajectory in of_step:
                if len(rows) == CHUNK:
                    self._hand_over(rows)
                    rows = []
                rows.append(row_of(trajectory))
                yield trajectory
            self._hand_over(rows)

    def _hand_over(self, rows: list[dict[str, Any]]) -> None:
        self._sink(self._next, rows)
        self._next += 1


def row_of(kept: Kept) -> dict[str, Any]:
    """Everything that the reader shows of one trajectory."""
    return {
        "prompt": kept.prompt,
        "prompt_length": kept.prompt_length,
        "trained_version": kept.step - 1,
        "parts": {name: _rounded(value) for name, value in (kept.parts or {}).items()},
        "extra": {str(name): str(value) for name, value in (kept.extra or {}).items()},
        "turns": [
            {
                "action": str(turn.action),
                "tool": str(getattr(turn, "tool", "") or ""),
                "content": turn.content,
                "error": turn.search_error,
                "generate_s": _rounded(turn.generate_s),
                "search_s": _rounded(turn.search_s),
                "cached": turn.cached_tokens,
                "asked": turn.prompt_tokens,
                "sampled": len(turn.sampled_ids),
            }
            for turn in kept.turns
        ],
        "runs": runs_of(kept),
    }


def runs_of(kept: Kept) -> list[dict[str, Any]]:
    """The response as runs of tokens that are alike in being trained, their turn and the policy that sampled them.

    A run that is not trained has `text` and `count`. One that is has `texts` and `ids` [count], `turn`, `version`, and
    [count] or one number for all: `advantage`, `weight`, and in nats `sampled` (the engine's log-prob), `ratio` (old less
    sampled log-prob), `kl` (old less reference log-prob). A figure that is not known is null.
    """
    start = kept.prompt_length
    mask, turns, versions = (
        array[start:] for array in (kept.loss_mask.astype(bool), kept.turn_of_token, kept.versions)
    )
    if not len(mask):
        return []
    alike = (mask[1:] == mask[:-1]) & (turns[1:] == turns[:-1]) & ((versions[1:] == versions[:-1]) | ~mask[1:])
    edges = [0, *(np.flatnonzero(~alike) + 1).tolist(), len(mask)]
    return [_run(kept, begin, end, bool(mask[begin])) for begin, end in pairwise(edges)]


def _run(kept: Kept, begin: int, end: int, trained: bool) -> dict[str, Any]:
    texts = kept.pieces[begin:end]
    if not trained:
        return {"text": "".join(texts), "count": end - begin}
    part = slice(kept.prompt_length + begin, kept.prompt_length + end)
    old = kept.old_logprobs[part]
    run = {
        "texts": list(texts),
        "ids": kept.token_ids[part].tolist(),
        "turn": int(kept.turn_of_token[part][0]),
        "version": int(kept.versions[part][0]),
        "advantage": _figures(kept.advantages[part]),
        "sampled": _figures(kept.rollout_logprobs[part]),
        "ratio": _figures(old - kept.rollout_logprobs[part]),
    }
    if kept.weights is not None:
        run["weight"] = _figures(kept.weights[part])
    if kept.ref_logprobs is not None:
        run["kl"] = _figures(old - kept.ref_logprobs[part])
    return run


def _figures(values: NDArray[Any]) -> Any:
    """Rounded numbers with None for what is not finite; one where all are the same."""
    listed: Sequence[float] = np.asarray(values, np.float64).round(DIGITS).tolist()
    known = [value + 0.0 if math.isfinite(value) else None for value in listed]
    return known[0] if len(set(known)) == 1 else known


def _rounded(value: float | None) -> float | None:
    return round(float(value), DIGITS) if value is not None and math.isfinite(value) else None


def _mean(values: NDArray[Any]) -> float | None:
    return _rounded(float(values.mean())) if len(values) else None


def _furthest(values: NDArray[Any]) -> float | None:
    """The value furthest from 0, of those that are known."""
    known = values[np.isfinite(values)]
    return _rounded(float(known[np.argmax(np.abs(known))])) if len(known) else None


def _oldest(kept: Kept, trained: NDArray[np.bool_]) -> int:
    """By how many versions the oldest trained token is behind the policy that is trained."""
    sampled = kept.versions[trained & (kept.versions >= 0)]
    return max(0, kept.step - 1 - int(sampled.min())) if len(sampled) else 0
