"""Tests of the protocol of a turn against a second parser that is built differently."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TagsConfig, TaskConfig
from rlsys.data.trajectory import Action, Finish
from rlsys.rollout.agent.search_r1 import TurnRules

TASK = TaskConfig(train_path="", eval_path="", max_turns=2)
TOOLS = {"say": "echo", "do": "scripted"}
PLAIN, WITH_TOOLS, TOOLS_ALONE = TurnRules(TASK), TurnRules(TASK, TOOLS), TurnRules(TASK, TOOLS, searches=False)
EMPTY_TOO = TurnRules(TASK, TOOLS, allow_empty_query=True)
"""Rules under which an empty query is a search; an empty input of a tool stays invalid."""

WORDS = ["search", "answer", "information", *TOOLS]
PIECES = [f"<{word}>" for word in WORDS] + [f"</{word}>" for word in WORDS] + ["x", " \n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


def by_hand(text: str, acts: Iterable[str], may_be_empty: Iterable[str]) -> tuple[str, str, str]:
    """Return the kept text, the word of the tag and its content, found independently of the parser by string search.

    An empty element counts only if its word is in `may_be_empty`.
    """
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
                return (text, word, content) if content or word in may_be_empty else (text, "invalid", "")
    return text, "invalid", ""


@settings(max_examples=50)
@given(TEXTS, st.sampled_from([PLAIN, WITH_TOOLS, TOOLS_ALONE, EMPTY_TOO]), st.integers(0, 3))
@example("<think>t</think><search> q </search> more", PLAIN, 0)
@example("<answer>a</answer><search>q</search>", PLAIN, 2)
@example("<search> \n </search>", PLAIN, 1)
@example("<search> \n </search><answer>a</answer>", EMPTY_TOO, 1)
@example("<do></do>", EMPTY_TOO, 0)
@example("x</do><search>a</search>", WITH_TOOLS, 2)
@example("<do>a<say>b</say></do>", WITH_TOOLS, 0)
@example("<search>a</search> <do>b</do> c", TOOLS_ALONE, 0)
def test_turn_agrees_with_the_second_parser(text: str, rules: TurnRules, number: int) -> None:
    tools = {} if rules is PLAIN else TOOLS
    may_be_empty = ["answer", *(["search"] if rules is EMPTY_TOO else [])]
    kept, word, content = by_hand(text, tools if rules is TOOLS_ALONE else ["search", *tools], may_be_empty)
    turn = rules.parse(text)
    finish = rules.finish(number, turn.action)
    action = Action.TOOL if word in tools else Action(word)
    assert (turn.text, turn.action, turn.tool, turn.content) == (kept, action, tools.get(word, ""), content)
    assert finish is (Finish.ANSWER if word == "answer" else Finish.TURN_LIMIT if number >= 2 else None)


def test_tags_are_taken_literally_from_the_task() -> None:
    tags = TagsConfig(search="s.+", answer="done")
    rules = TurnRules(TaskConfig(train_path="", eval_path="", tags=tags))
    assert rules.parse("<s.+>q</s.+>").content == "q"
    assert rules.parse("<sxx>q</sxx>").action is Action.INVALID
    assert rules.parse("<done>a</done> tail").text == "<done>a</done>"
