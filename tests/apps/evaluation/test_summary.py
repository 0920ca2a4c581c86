"""Figures of sets and their average, worked out by hand."""

from __future__ import annotations

import pytest

from rlsys.apps.evaluation.results import average, summarise
from rlsys.orchestrator.evaluation.heldout import Answered, Evaluation
from rlsys.orchestrator.evaluation.scores import bootstrap, wilson
from tests.apps.evaluation.answers import SEARCH, answered, asked


def figures_of(*answers: Answered) -> Evaluation:
    return Evaluation(0, answers)


FIRST = [
    answered(asked(1, "Nile", hops=1), "the Nile", 0, SEARCH),
    answered(asked(2, "Nile", hops=2), "River Nile", 0, SEARCH, SEARCH),
    answered(asked(3, "Nile", hops=2), None),
    answered(asked(4, "Nile", hops=2), "Congo"),
]
SECOND = [answered(asked(5, "Lyon", source="2wikimultihopqa"), "Lyon")]


def test_every_set_has_its_figures() -> None:
    first, second = summarise(figures_of(*FIRST, *SECOND))
    assert (first.name, first.questions, first.answers) == ("nq", 4, 4)
    assert first.em == wilson(1, 4)
    assert first.f1 == bootstrap([1.0, 2 / 3, 0.0, 0.0])
    assert first.sub_em == wilson(2, 4)
    assert first.finished == wilson(3, 4)
    assert (first.searches, first.tokens) == (0.75, (8 + 13 + 0 + 3) / 4)
    assert (second.name, second.em, second.tokens) == ("2wikimultihopqa", wilson(1, 1), 3.0)
    assert [(one.name, one.questions, one.em) for one in first.by_hop] == [
        ("1", 1, wilson(1, 1)),
        ("2", 3, wilson(0, 3)),
    ]
    assert second.by_hop == ()


def test_sets_weigh_alike_in_the_average_whatever_their_size() -> None:
    mean = average(summarise(figures_of(*FIRST, *SECOND)))
    assert mean.em.mean == pytest.approx((0.25 + 1.0) / 2)
    assert mean.searches == pytest.approx(0.375)
    assert (mean.questions, mean.answers) == (5, 5)


def test_several_answers_to_a_question_are_averaged_before_they_are_counted() -> None:
    answers = [
        answered(question, said, sample)
        for question, row in ((asked(1, "a1"), ["a1", "x", "a1", "x"]), (asked(2, "b2"), ["x", "x", "x", "x"]))
        for sample, said in enumerate(row)
    ]
    (one,) = summarise(figures_of(*answers))
    assert (one.questions, one.answers) == (2, 8)
    assert one.em == bootstrap([0.5, 0.0])
    assert list(one.pass_at) == [1, 2, 4]
    assert [value.mean for value in one.pass_at.values()] == pytest.approx([0.25, (1 - 1 / 6) / 2, 0.5])
