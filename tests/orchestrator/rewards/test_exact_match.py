"""Exact match, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rlsys.data.answers import exact_match, normalize, score
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory, Turn


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Beatles", "beatles"),
        ("an  apple,\n a day!", "apple day"),
        ("A.N. Other", "other"),
        ("theatre and banana", "theatre and banana"),
        ("St. John's", "st johns"),
        ("1,000.5", "10005"),
        ("the", ""),
        ("“Curly” — naïve", "“curly” — naïve"),
    ],
)
def test_normalisation_by_hand(text: str, expected: str) -> None:
    assert normalize(text) == expected


def test_a_match_with_any_accepted_answer_counts() -> None:
    assert exact_match(" the Beatles! ", ["Stones", "Beatles"])
    assert not exact_match("Beatles band", ["Beatles"])
    assert not exact_match("Beatles", [])


def trajectory(*turns: tuple[str, Action, str]) -> Trajectory:
    """A trajectory of (text, action, content) turns; its tokens do not matter here."""
    none = np.zeros(0)
    return Trajectory(
        question_uid="q",
        sample=0,
        tokens=none.astype(np.int32),
        prompt_length=0,
        loss_mask=none.astype(np.bool_),
        rollout_logprobs=none.astype(np.float32),
        versions=none.astype(np.int32),
        turn_of_token=none.astype(np.int32),
        tokens_differing=0,
        response="".join(text for text, _, _ in turns),
        turns=tuple(Turn(text, action, content, "", 1, 1, 0, 0.0, 0.0) for text, action, content in turns),
        finish=Finish.TURN_LIMIT,
    )


def ask(*answers: str) -> Question:
    prompt = "For example, <answer> Beijing </answer>. Question: What is the capital of China?\n"
    return Question(uid="q", prompt=prompt, answers=answers)


def test_the_last_turns_answer_is_scored() -> None:
    right = ("<answer> the Beijing. </answer>", Action.ANSWER, "the Beijing.")
    wrong = ("<answer>Lyon</answer>", Action.ANSWER, "Lyon")
    assert score(trajectory(right), ask("Beijing")) == 1.0
    assert score(trajectory(wrong), ask("Beijing")) == 0.0


def test_the_prompts_example_is_no_answer() -> None:
    assert score(trajectory(("I do not know", Action.INVALID, "")), ask("Beijing")) == 0.0
    assert score(trajectory(), ask("Beijing")) == 0.0


def test_the_invalid_actions_message_is_no_answer() -> None:
    told_off = ("put the answer between <answer> and </answer>. Let me try again.", Action.INVALID, "")
    assert score(trajectory(told_off), ask("and")) == 0.0


def test_an_empty_answer_matches_nothing_but_an_empty_one() -> None:
    assert score(trajectory(("<answer> </answer>", Action.ANSWER, "")), ask("Beijing")) == 0.0
