"""The figures of an evaluation with their 95 % intervals, of every set and their mean over sets, and their table.

The mean over sets weighs every set alike, as the papers' "Avg." does. The unit of every interval is the question: several
answers to one are averaged first, because they are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlsys.apps.evaluation.evaluation_inputs import title_of
from rlsys.observe.samples import visible
from rlsys.orchestrator.evaluation.heldout import Answered, Evaluation
from rlsys.orchestrator.evaluation.scores import Estimate, estimate, mean_of, pass_at

UNNAMED = "questions"  # Of questions that do not say what set they are of
NOTE = "in percent, with 95 % intervals; the average weighs every set alike"


@dataclass(frozen=True, slots=True)
class SetFigures:
    """Of one set, or of several on average."""

    name: str
    questions: int
    answers: int
    em: Estimate  # Of one answer: avg@k, where there are k answers to each question
    f1: Estimate
    sub_em: Estimate
    finished: Estimate  # Share of episodes that ended with an answer
    searches: float  # Of one answer
    tokens: float  # Generated for one answer
    search_errors: int  # Searches that failed, in all
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
    sums: dict[str, Any] = {
        name: sum(getattr(one, name) for one in sets) for name in ("questions", "answers", "search_errors")
    }
    means: dict[str, Any] = {
        name: mean_of([getattr(one, name) for one in sets]) for name in ("em", "f1", "sub_em", "finished")
    }
    return SetFigures(
        name="average",
        **sums,
        **means,
        searches=fmean(one.searches for one in sets),
        tokens=fmean(one.tokens for one in sets),
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


def render_table(sets: Sequence[SetFigures]) -> RenderableType:
    """A table in 80 columns, shares in percent above their intervals: a row a set, one for each number of hops, and the
    average of several sets; chances of several answers below."""
    below = overall(sets)
    parts: list[RenderableType] = [_scores(sets, below)]
    if sets[0].pass_at:
        parts += [Text(), _chances([*sets, *below])]
    parts.append(Text(NOTE, "dim"))
    failed = sum(one.search_errors for one in sets)
    if failed:
        parts.append(Text(f"{failed} searches failed: these figures are not those of the whole search.", "red"))
    return Group(*parts)


def _scores(sets: Sequence[SetFigures], below: Sequence[SetFigures]) -> Table:
    table = _table("", "asked", "EM", "F1", "sub-EM", "finished", "searches", "tokens")

    def add(row: SetFigures, title: str, style: str = "") -> None:
        name = Text(visible(title), overflow="fold")
        shares = [_share(value) for value in (row.em, row.f1, row.sub_em)]
        finished, per_answer = _percent(row.finished.mean), (f"{row.searches:.2f}", f"{row.tokens:.0f}")
        table.add_row(name, str(row.questions), *shares, finished, *per_answer, style=style)

    for row in sets:
        add(row, title_of(row.name))
        for hop in row.by_hop:
            add(hop, f"  {hop.name} {'hop' if hop.name == '1' else 'hops'}", "dim")
    for row in below:
        add(row, row.name, "bold")
    return table


def _chances(rows: Sequence[SetFigures]) -> Table:
    table = _table("One of k answers is right", *(f"pass@{k}" for k in rows[0].pass_at))
    for row in rows:
        table.add_row(Text(visible(title_of(row.name))), *map(_share, row.pass_at.values()))
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _share(value: Estimate) -> Text:
    interval = f"{_percent(value.low)}-{_percent(value.high)}"
    return Text.assemble(f"{_percent(value.mean)}\n", (interval, "dim"), justify="right")


def _percent(share: float) -> str:
    """At most four characters, so that a row fits."""
    text = f"{share * 100:.1f}"
    return "100" if text == "100.0" else text
