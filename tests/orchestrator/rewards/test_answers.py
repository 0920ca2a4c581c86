"""Tests of the comparison of an answer with the accepted answers, by hand and against SQuAD's measure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.data.answers import contains, exact_match, f1, normalize, sub_exact_match

WORDS = st.lists(st.sampled_from(["the", "Paris", "a", "bamako,", "city", "of", "Mali!", "1,000"]), max_size=7)
TEXTS = WORDS.map(" ".join) | st.text(max_size=12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("an  apple,\n a day!", "apple day"),
        ("A.N. Other", "other"),
        ("theatre and banana", "theatre and banana"),
        ("1,000.5", "10005"),
        ("the", ""),
        ("“Curly” — naïve", "“curly” — naïve"),
    ],
)
def test_answer_is_normalised(text: str, expected: str) -> None:
    assert normalize(text) == expected


def squad_f1(prediction: str, answer: str) -> float:
    """Return SQuAD's F1, counting shared words by crossing them off one after the other."""
    predicted, accepted = normalize(prediction).split(), normalize(answer).split()
    left, shared = list(accepted), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            shared += 1
    if not predicted or not accepted:
        return float(predicted == accepted)
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(accepted)
    return 2 * precision * recall / (precision + recall)


@settings(max_examples=50)
@given(TEXTS, st.lists(TEXTS, max_size=4))
def test_f1_is_that_of_squad_and_an_exact_match_has_full_score(prediction: str, answers: list[str]) -> None:
    expected = max((squad_f1(prediction, answer) for answer in answers), default=0.0)
    assert f1(prediction, answers) == pytest.approx(expected, abs=1e-12)
    assert exact_match(prediction, answers) == (normalize(prediction) in [normalize(answer) for answer in answers])
    if exact_match(prediction, answers):
        assert sub_exact_match(prediction, answers)
        assert f1(prediction, answers) == 1.0


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("It is Bamako, in Mali.", ["Paris", "bamako"], True),
        ("Bama", ["Bamako"], False),
        ("a normal issue", ["mal"], True),
        ("anything", ["the"], False),
        ("a", ["the"], True),
    ],
)
def test_substring_match_compares_normalised_text(prediction: str, answers: list[str], expected: bool) -> None:
    assert sub_exact_match(prediction, answers) is expected
    assert not contains("whatever was found", ["", "the", "..."]), "an empty answer is in no text"
