"""The protocol against hand-written cases and a second parser of another construction."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TagsConfig, TaskConfig
from rlsys.data.trajectory import Action, Finish
from rlsys.rollout.agent.episode import TurnRules

TASK = TaskConfig(train_path="", eval_path="", max_turns=2)
TOOLS = {"say": "echo", "do": "scripted"}
PLAIN, WITH_TOOLS = TurnRules(TASK), TurnRules(TASK, TOOLS)

WORDS = ["search", "answer", "information", *TOOLS]
PIECES = [f"<{word}>" for word in WORDS] + [f"</{word}>" for word in WORDS] + ["x", " \n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


@pytest.mark.parametrize(
    ("text", "kept", "action", "content"),
    [
        ("<think>t</think><search> q </search> more", "<think>t</think><search> q </search>", "search", "q"),
        ("<answer>a\nb</answer></answer>", "<answer>a\nb</answer>", "answer", "a\nb"),
        ("<answer>a</answer><search>q</search>", "<answer>a</answer><search>q</search>", "answer", "a"),
        ("<search>q</answer>", "<search>q</answer>", "invalid", ""),
        ("<search> \n </search>", "<search> \n </search>", "invalid", ""),
        ("", "", "invalid", ""),
    ],
)
def test_turns_are_cut_and_read_as_in_search_r1(text: str, kept: str, action: str, content: str) -> None:
    turn = PLAIN.parse(text)
    assert (turn.text, turn.action, turn.content) == (kept, Action(action), content)


@pytest.mark.parametrize(
    ("text", "kept", "tool", "content"),
    [
        ("x</do><search>a</search>", "x</do>", "", ""),
        ("<do>a</do><search>b</search>", "<do>a</do>", "scripted", "a"),
        ("<do>a<say>b</say></do>", "<do>a<say>b</say>", "echo", "b"),
    ],
)
def test_a_turn_ends_at_the_first_closing_tag_of_any_tool(text: str, kept: str, tool: str, content: str) -> None:
    turn = WITH_TOOLS.parse(text)
    assert (turn.text, turn.tool, turn.content) == (kept, tool, content)


def by_hand(text: str, acts: Iterable[str]) -> tuple[str, str]:
    """Word and content by string search alone: an independent reading of the same rule."""
    acts = tuple(acts)
    ends = [text.index(f"</{word}>") + len(f"</{word}>") for word in acts if f"</{word}>" in text]
    if not ends and "</answer>" in text:
        ends = [text.index("</answer>") + len("</answer>")]
    text = text[: min(ends, default=len(text))]
    for start in range(len(text)):
        for word in (*acts, "answer"):
            head = f"<{word}>"
            end = text.find(f"</{word}>", start + len(head))
            if text.startswith(head, start) and end >= 0:
                content = text[start + len(head) : end].strip()
                return (word, content) if content or word == "answer" else ("invalid", "")
    return "invalid", ""


@settings(max_examples=50)
@given(TEXTS, st.sampled_from([PLAIN, WITH_TOOLS]))
def test_parsing_agrees_with_a_reading_by_hand(text: str, rules: TurnRules) -> None:
    tools = TOOLS if rules is WITH_TOOLS else {}
    word, content = by_hand(text, ["search", *tools])
    turn = rules.parse(text)
    action = Action.TOOL if word in tools else Action(word)
    assert (turn.action, turn.tool, turn.content) == (action, tools.get(word, ""), content)
    assert text.startswith(turn.text)


@settings(max_examples=50)
@given(st.lists(TEXTS, min_size=3, max_size=3))
def test_an_episode_ends_with_an_answer_or_after_the_last_turn(texts: list[str]) -> None:
    for number, text in enumerate(texts):
        turn, finish = PLAIN.step(number, text)
        answered = turn.action is Action.ANSWER
        expected = Finish.ANSWER if answered else Finish.TURN_LIMIT if number == 2 else None
        assert finish is expected
        if finish is not None:
            break


def test_tags_are_words_of_the_task_and_not_patterns() -> None:
    tags = TagsConfig(search="s.+", answer="done")
    rules = TurnRules(TaskConfig(train_path="", eval_path="", tags=tags))
    assert rules.parse("<s.+>q</s.+>").content == "q"
    assert rules.parse("<sxx>q</sxx>").action is Action.INVALID
    assert rules.parse("<done>a</done> tail").text == "<done>a</done>"


def test_without_a_search_its_tag_means_nothing() -> None:
    rules = TurnRules(TASK, TOOLS, searches=False)
    turn = rules.parse("<search>a</search> <do>b</do> c")
    assert (turn.text, turn.tool) == ("<search>a</search> <do>b</do>", "scripted")
    assert rules.parse("<search>a</search>").action is Action.INVALID
