"""Asking held-out questions, and what came of it.

Pure but for the asking: `evaluate` takes any coroutine function that answers one question, so an
engine and plain transformers are measured by the same lines.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlsys.agent.trajectory import Finish, Trajectory
from rlsys.data.question import Question
from rlsys.reward.exact_match import score

Ask = Callable[[Question], Awaitable[Trajectory]]


@dataclass(frozen=True, slots=True)
class Answered:
    """One question and how it went."""

    question: Question
    trajectory: Trajectory
    em: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures over all questions asked."""

    step: int
    answered: tuple[Answered, ...]

    @property
    def em(self) -> float:
        """Share of exact matches."""
        return fmean(one.em for one in self.answered)

    @property
    def em_by_hop(self) -> dict[str, float]:
        """Exact match by the question's `hops`, where the data set says them."""
        by_hop: dict[str, list[float]] = defaultdict(list)
        for one in self.answered:
            if "hops" in one.question.extra:
                by_hop[str(one.question.extra["hops"])].append(one.em)
        return {hop: fmean(by_hop[hop]) for hop in sorted(by_hop)}

    @property
    def searches(self) -> float:
        """Searches a question."""
        return fmean(one.trajectory.searches for one in self.answered)

    @property
    def finished(self) -> float:
        """Share of episodes that ended with an answer."""
        return fmean(one.trajectory.finish is Finish.ANSWER for one in self.answered)

    def answers(self) -> dict[str, str | None]:
        """What was answered to each question, by its id."""
        return {one.question.uid: one.trajectory.answer for one in self.answered}

    def row(self) -> dict[str, object]:
        """The figures, flat enough for a table."""
        return {
            "step": self.step,
            "questions": len(self.answered),
            "em": self.em,
            "em_by_hop": self.em_by_hop,
            "searches": self.searches,
            "finished": self.finished,
        }


def agreement(one: Evaluation, other: Evaluation) -> float:
    """Share of questions to which both gave the same answer, to the letter."""
    theirs = other.answers()
    return fmean(answer == theirs[uid] for uid, answer in one.answers().items())


async def evaluate(
    questions: Sequence[Question],
    ask: Ask,
    concurrency: int,
    step: int = 0,
    say: Callable[[str], None] = lambda _: None,
    em: Callable[[Trajectory, Question], float] = score,
) -> Evaluation:
    """Ask all `questions`, at most `concurrency` at a time; `em` says whether the answer is right."""
    slots = asyncio.Semaphore(concurrency)
    done = 0

    async def one(question: Question) -> Answered:
        nonlocal done
        async with slots:
            trajectory = await ask(question)
        done += 1
        say(f"evaluates {done}/{len(questions)} questions")
        return Answered(question, trajectory, em(trajectory, question))

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(one(question)) for question in questions]
    return Evaluation(step, tuple(task.result() for task in asked))
