"""The protocol against hand-written cases and a second parser of another construction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config.schema import TagsConfig, TaskConfig
from rlsys.data.trajectory import Action, Finish
from rlsys.rollout.agent.episode import TurnRules

TASK = TaskConfig(train_path="", eval_path="", max_turns=2)
RULES = TurnRules(TASK)

PIECES = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>", "x", " \n", ""]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


@pytest.mark.parametrize(
    ("text", "kept", "action", "content"),
    [
        ("<think>t</think><search> q </search> more", "<think>t</think><search> q </search>", "search", "q"),
        ("<answer>a\nb</answer></answer>", "<answer>a\nb</answer>", "answer", "a\nb"),
        ("<answer>a</answer><search>q</search>", "<answer>a</answer><search>q</search>", "answer", "a"),
        ("<search>q</answer>", "<search>q</answer>", "invalid", ""),
        ("</search><search>q</search>", "</search>", "invalid", ""),
        ("<search> \n </search>", "<search> \n </search>", "invalid", ""),
        ("<search>a<search>b</search>", "<search>a<search>b</search>", "search", "a<search>b"),
        ("nothing", "nothing", "invalid", ""),
        ("", "", "invalid", ""),
    ],
)
def test_turns_are_cut_and_read_as_in_search_r1(text: str, kept: str, action: str, content: str) -> None:
    turn = RULES.parse(text)
    assert (turn.text, turn.action, turn.content) == (kept, Action(action), content)


def by_hand(text: str) -> tuple[str, str]:
    """Action and content by string search alone: an independent reading of the same rule."""
    for closer in ("</search>", "</answer>"):
        if closer in text:
            text = text[: text.index(closer) + len(closer)]
            break
    for start in range(len(text)):
        for word in ("search", "answer"):
            head = f"<{word}>"
            end = text.find(f"</{word}>", start + len(head))
            if text.startswith(head, start) and end >= 0:
                return word, text[start + len(head) : end].strip()
    return "invalid", ""


@given(TEXTS)
def test_parsing_agrees_with_a_reading_by_hand(text: str) -> None:
    action, content = by_hand(text)
    if action == "search" and not content:
        action = "invalid"
    turn = RULES.parse(text)
    assert (turn.action, turn.content) == (Action(action), content)
    assert text.startswith(turn.text)


@given(st.lists(TEXTS, min_size=3, max_size=3))
def test_an_episode_ends_with_an_answer_or_after_the_last_turn(texts: list[str]) -> None:
    for number, text in enumerate(texts):
        turn, finish = RULES.step(number, text)
        assert turn == RULES.parse(text)
        answered = turn.action is Action.ANSWER
        assert (finish is not None) == (answered or number == 2)
        if finish is not None:
            assert finish is (Finish.ANSWER if answered else Finish.TURN_LIMIT)
            break


def test_a_search_in_the_last_generation_is_not_executed() -> None:
    finishes = []
    for number in range(3):
        turn, finish = RULES.step(number, "<search>q</search>")
        assert turn.action is Action.SEARCH
        finishes.append(finish)
    assert finishes == [None, None, Finish.TURN_LIMIT]


def test_tags_are_words_of_the_task_and_not_patterns() -> None:
    tags = TagsConfig(search="s.+", answer="done")
    rules = TurnRules(TaskConfig(train_path="", eval_path="", tags=tags))
    assert rules.parse("<s.+>q</s.+>").content == "q"
    assert rules.parse("<sxx>q</sxx>").action is Action.INVALID
    assert rules.parse("<done>a</done> tail").text == "<done>a</done>"
