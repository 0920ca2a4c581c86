"""User-defined reward terms for tests, valid and invalid ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory

NUMBER = 3.0
BARRIER = threading.Barrier(2, timeout=600)


def answers(question: Question, trajectory: Trajectory) -> float:
    return float(len(question.answers) + trajectory.prompt_length)


def per_turn(_question: Question, trajectory: Trajectory) -> list[float]:
    return [float(turn) for turn, _ in enumerate(trajectory.turns)]


async def in_time(_question: Question, _trajectory: Trajectory) -> float:
    await asyncio.sleep(0)
    return 0.5


def meets_another(_question: Question, _trajectory: Trajectory) -> float:
    """Return after two threads have called this term: 1 in a daemon thread, which cannot delay the exit, else 0."""
    BARRIER.wait()
    return threading.current_thread().daemon


def one_argument(_question: Question) -> float:
    return 1.0


def yields(_question: Question, _trajectory: Trajectory) -> Iterator[float]:
    yield 1.0


def too_many(_question: Question, trajectory: Trajectory) -> list[float]:
    return [1.0] * (len(trajectory.turns) + 1)


def hangs(_question: Question, _trajectory: Trajectory) -> float:
    threading.Event().wait(60)
    return 1.0


async def never_ready(_question: Question, _trajectory: Trajectory) -> float:
    await asyncio.sleep(60)
    return 1.0


async def blocks_its_loop(_question: Question, _trajectory: Trajectory) -> float:
    threading.Event().wait(60)
    return 1.0


async def exits_later(_question: Question, _trajectory: Trajectory) -> float:
    raise SystemExit(3)


def _raises(error: BaseException) -> Callable[[Question, Trajectory], float]:
    def term(_question: Question, _trajectory: Trajectory) -> float:
        raise error

    return term


fails, stops, exits, times_out_itself = map(
    _raises, (KeyError("no such\nthing"), StopIteration(), SystemExit(3), TimeoutError("no server"))
)


def _returns(value: Any) -> Callable[[Question, Trajectory], Any]:
    return lambda _question, _trajectory: value


not_a_number, text, too_large, with_gradient = map(
    _returns, (float("nan"), "1.0", 10**400, torch.tensor(1.0, requires_grad=True))
)
