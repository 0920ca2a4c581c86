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

from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.orchestrator.evaluation.scores import Scores, scores_of

Ask = Callable[[Question, int, float], Awaitable[Trajectory]]
"""Answers a question, as number so many of it, at a temperature; 0 is greedy."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer to a question, and how it went."""

    question: Question
    trajectory: Trajectory
    scores: Scores

    @property
    def em(self) -> float:
        """1 for a right answer, 0 for another or none."""
        return self.scores.em

    @property
    def finished(self) -> bool:
        """Whether the episode ended with an answer."""
        return self.trajectory.finish is Finish.ANSWER

    @property
    def tokens(self) -> int:
        """Tokens that were generated, in all turns."""
        return sum(turn.generated_tokens for turn in self.trajectory.turns)

    @property
    def search_errors(self) -> int:
        """Searches that failed."""
        return sum(bool(turn.tool_error) for turn in self.trajectory.turns)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures over all answers; those to one question come one after the other."""

    step: int
    answered: tuple[Answered, ...]

    @property
    def em(self) -> float:
        """Share of exact matches, over all answers (avg@k)."""
        return fmean(one.em for one in self.answered)

    @property
    def em_by_hop(self) -> dict[str, float]:
        """Exact match by the question's `hops`, where the data set says them."""
        return {hop: part.em for hop, part in self.by_hop.items()}

    @property
    def searches(self) -> float:
        """Searches a question."""
        return fmean(one.trajectory.searches for one in self.answered)

    @property
    def finished(self) -> float:
        """Share of episodes that ended with an answer."""
        return fmean(one.finished for one in self.answered)

    @property
    def by_source(self) -> dict[str, Evaluation]:
        """The part of each data source, in the order in which they come."""
        return self._parts(lambda one: one.question.data_source)

    @property
    def by_hop(self) -> dict[str, Evaluation]:
        """The part of each number of hops, of questions whose data set says it."""
        parts = self._parts(lambda one: str(one.question.extra.get("hops", "")))
        return {hop: parts[hop] for hop in sorted(parts) if hop}

    @property
    def by_question(self) -> dict[str, tuple[Answered, ...]]:
        """The answers to each question, by its id."""
        return {uid: part.answered for uid, part in self._parts(lambda one: one.question.uid).items()}

    def figures(self) -> dict[str, float]:
        """Flat figures for trackers: those of all answers, `em_hop_N` by hops, and, where there are several data sources,
        `em/SOURCE` of each."""
        sources = self.by_source
        return {
            "em": self.em,
            "f1": fmean(one.scores.f1 for one in self.answered),
            "sub_em": fmean(one.scores.sub_em for one in self.answered),
            "finished": self.finished,
            "searches": self.searches,
            "tokens": fmean(one.tokens for one in self.answered),
            **{f"em_hop_{hop}": em for hop, em in self.em_by_hop.items()},
            **({f"em/{name}": part.em for name, part in sources.items()} if len(sources) > 1 else {}),
        }

    def row(self) -> dict[str, object]:
        """The figures, flat enough for a table."""
        return {
            "step": self.step,
            "questions": len(self.by_question),
            "em": self.em,
            "em_by_hop": self.em_by_hop,
            "searches": self.searches,
            "finished": self.finished,
            "figures": self.figures(),
        }

    def _parts(self, name_of: Callable[[Answered], str]) -> dict[str, Evaluation]:
        parts: dict[str, list[Answered]] = defaultdict(list)
        for one in self.answered:
            parts[name_of(one)].append(one)
        return {name: Evaluation(self.step, tuple(answered)) for name, answered in parts.items()}


def plain_score(trajectory: Trajectory, question: Question) -> Scores:
    """The scores of the answer that the last turn holds."""
    return scores_of(trajectory.answer, question.answers)


async def evaluate(
    questions: Sequence[Question],
    ask: Ask,
    concurrency: int,
    step: int = 0,
    say: Callable[[str], None] = lambda _: None,
    score: Callable[[Trajectory, Question], Scores] = plain_score,
    samples: int = 1,
    temperature: float = 0.0,
    note: Callable[[Answered], None] = lambda _: None,
) -> Evaluation:
    """Ask each of `questions` `samples` times, at most `concurrency` at a time; `score` says what an answer is worth.

    `note` gets every answer as soon as it is there.

    Raises what `ask` raises, once the other questions are cancelled.
    """
    slots = asyncio.Semaphore(concurrency)
    done, total = 0, len(questions) * samples
    noun = "questions" if samples == 1 else "answers"
    say(f"evaluates 0/{total} {noun}")

    async def one(question: Question, sample: int) -> Answered:
        nonlocal done
        async with slots:
            trajectory = await ask(question, sample, temperature)
        done += 1
        say(f"evaluates {done}/{total} {noun}")
        answered = Answered(question, trajectory, score(trajectory, question))
        note(answered)
        return answered

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(one(question, sample)) for question in questions for sample in range(samples)]
    return Evaluation(step, tuple(task.result() for task in asked))
