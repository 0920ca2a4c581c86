"""AnswerScores worked out by hand, and against a slow reference that shares no code with them."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.orchestrator.evaluation.scores import AnswerScores, scores_of


def words_of(text: str) -> list[str]:
    """SQuAD's normalisation, character by character and word by word."""
    kept = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(?:a|an|the)\b", " ", kept).split()


def slow(answer: str, accepted: list[str]) -> AnswerScores:
    """Words are struck off one by one; precision and recall are computed as such."""
    said, em, best, inside = words_of(answer), 0.0, 0.0, 0.0
    for gold in map(words_of, accepted):
        if said == gold:
            em = best = inside = 1.0
        if gold and " ".join(gold) in " ".join(said):
            inside = 1.0
        closed = [" ".join(said) in ("yes", "no", "noanswer"), " ".join(gold) in ("yes", "no", "noanswer")]
        if said == gold or any(closed):
            continue
        left, shared = list(gold), 0
        for word in said:
            if word in left:
                left.remove(word)
                shared += 1
        if shared:
            precision, recall = shared / len(said), shared / len(gold)
            best = max(best, 2 * precision * recall / (precision + recall))
    return AnswerScores(em, best, inside)


@pytest.mark.parametrize(
    ("answer", "accepted", "em", "f1", "sub_em"),
    [
        ("The Nile.", ["nile"], 1, 1, 1),
        ("the River Nile", ["Nile"], 0, 2 / 3, 1),
        ("Nile", ["the River Nile", "Amazon"], 0, 2 / 3, 0),
        ("Congo", ["Nile"], 0, 0, 0),
        ("no", ["no one"], 0, 0, 0),
        ("yes it is", ["yes"], 0, 0, 1),
        ("yes it is", ["yes", "it is"], 0, 0.8, 1),
        ("", ["Nile"], 0, 0, 0),
        ("the", ["a"], 1, 1, 1),
        ("Nile", ["the"], 0, 0, 0),
    ],
)
def test_by_hand(answer: str, accepted: list[str], em: float, f1: float, sub_em: float) -> None:
    got = scores_of(answer, accepted)
    assert (got.em, got.f1, got.sub_em) == pytest.approx((em, f1, sub_em))


def test_no_answer_has_nothing() -> None:
    assert scores_of(None, ["", "the"]) == AnswerScores(0.0, 0.0, 0.0)


TEXT = st.lists(st.sampled_from(["the", "The", "nile", "Nile!", "blue", "yes", "no", "A", ",", "in", "n"]), max_size=5)


@settings(max_examples=50)
@given(TEXT.map(" ".join), st.lists(TEXT.map(" ".join), min_size=1, max_size=3))
def test_against_the_slow_reference(answer: str, accepted: list[str]) -> None:
    got, expected = scores_of(answer, accepted), slow(answer, accepted)
    assert (got.em, got.f1, got.sub_em) == pytest.approx((expected.em, expected.f1, expected.sub_em))
