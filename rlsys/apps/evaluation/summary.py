"""The figures of an evaluation with their intervals: of every set, and their mean over sets. Pure.

The mean over sets weighs every set alike, as the papers' "Avg." does. The unit of every interval is the question: several
answers to one are averaged first, because they are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rlsys.orchestrator.evaluation.evaluate import Answered, Evaluation
from rlsys.orchestrator.evaluation.intervals import Estimate, estimate, mean_of, pass_at

UNNAMED = "questions"
"""Of questions that do not say what set they are of."""


@dataclass(frozen=True, slots=True)
class SetFigures:
    """Of one set, or of several on average."""

    name: str
    questions: int
    answers: int
    em: Estimate
    """Of one answer: avg@k, where there are k answers to each question."""
    f1: Estimate
    sub_em: Estimate
    finished: Estimate
    """Share of episodes that ended with an answer."""
    searches: float
    """Of one answer."""
    tokens: float
    """Generated for one answer."""
    search_errors: int
    """Searches that failed, in all."""
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """Chance that one of so many answers is right, where there are several."""
    by_hop: tuple[SetFigures, ...] = ()
    """By hops, where the set has questions of more than one kind; the names are their numbers."""


def summarise(evaluation: Evaluation) -> list[SetFigures]:
    """The figures of every set, in the order of the questions."""
    return [_figures(name or UNNAMED, part) for name, part in evaluation.by_source.items()]


def average(sets: Sequence[SetFigures]) -> SetFigures:
    """Their mean; the counts are sums."""
    shared = set.intersection(*(set(one.pass_at) for one in sets))
    return SetFigures(
        name="average",
        questions=sum(one.questions for one in sets),
        answers=sum(one.answers for one in sets),
        em=mean_of([one.em for one in sets]),
        f1=mean_of([one.f1 for one in sets]),
        sub_em=mean_of([one.sub_em for one in sets]),
        finished=mean_of([one.finished for one in sets]),
        searches=fmean(one.searches for one in sets),
        tokens=fmean(one.tokens for one in sets),
        search_errors=sum(one.search_errors for one in sets),
        pass_at={k: mean_of([one.pass_at[k] for one in sets]) for k in sorted(shared)},
    )


def overall(sets: Sequence[SetFigures]) -> list[SetFigures]:
    """The rows that follow those of `sets` in a table: the average of several; below one there is none."""
    return [average(sets)] if len(sets) > 1 else []


def tries(samples: int) -> list[int]:
    """The k of pass@k that `samples` answers to a question are reported for: 1, 2, 4, ... and all of them."""
    if samples == 1:
        return []
    return [2**power for power in range((samples - 1).bit_length())] + [samples]


def _figures(name: str, part: Evaluation, *, split: bool = True) -> SetFigures:
    questions = list(part.by_question.values())
    hops = part.by_hop if split else {}
    samples = min(map(len, questions))

    def mean(value: Callable[[Answered], float]) -> Estimate:
        return estimate([fmean(map(value, answers)) for answers in questions])

    def passed(k: int) -> Estimate:
        return estimate([pass_at(k, len(answers), sum(one.em == 1 for one in answers)) for answers in questions])

    return SetFigures(
        name=name,
        questions=len(questions),
        answers=len(part.answered),
        em=mean(lambda one: one.em),
        f1=mean(lambda one: one.scores.f1),
        sub_em=mean(lambda one: one.scores.sub_em),
        finished=mean(lambda one: one.finished),
        searches=part.searches,
        tokens=fmean(one.tokens for one in part.answered),
        search_errors=sum(one.search_errors for one in part.answered),
        pass_at={k: passed(k) for k in tries(samples)},
        by_hop=tuple(_figures(hop, of_hop, split=False) for hop, of_hop in hops.items()) if len(hops) > 1 else (),
    )
