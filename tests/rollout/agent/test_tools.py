"""Episodes with tools of the task's own: calls, failures, forgeries, and a task without a search."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TagsConfig, TaskConfig, TokenMode
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.errors import UserError
from rlsys.rollout.agent.episode import (
    MOST_CHARS,
    Called,
    Episode,
    EpisodeTools,
    Generation,
    Observer,
    TurnRules,
    TurnSampling,
    call_tool,
    render_search,
    run_episode,
)
from rlsys.rollout.agent.tokens import Codec, PartialEpisode
from rlsys.rollout.tools.interface import Tool
from rlsys.search.retrieval import SearchResult
from tests.rollout.agent.bpe import build_tokenizer
from tests.rollout.agent.found import result_of
from tests.rollout.tools.own_tools import Scripted

CODEC = Codec(build_tokenizer(words=True))
QUESTION = Question(uid="q", prompt="Who? 東京\n", answers=("a",))
GREEDY = TurnSampling(temperature=0.0, stop=("</search>", "</answer>"))
BOTH = ["rlsys.rollout.tools.calculator.Calculator", "tests.rollout.tools.own_tools.Scripted"]


class Script:
    """Says one text a turn, up to the first of the stop strings, and finds one passage for every query."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.inputs: list[list[int]] = []
        self.stops: set[tuple[str, ...]] = set()

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        turn = int(rid.rpartition(".")[2])
        self.inputs.append(input_ids)
        self.stops.add(sampling.stop)
        text = self.texts[turn]
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        ids = CODEC.encode(text[: min(ends, default=len(text))])[: sampling.max_new_tokens]
        return Generation(ids, [-0.5] * len(ids), "stop" if ends else "length", 0, [4] * len(ids))

    async def search(self, query: str) -> SearchResult:
        return result_of(f"T\n{query}")


def task(tools: list[str] | None = None, **changes: Any) -> TaskConfig:
    tools = BOTH if tools is None else tools
    return TaskConfig(train_path="", eval_path="", **{"max_turns": 4, "tools": tools, **changes})


def run(script: Script, config: TaskConfig, *, searches: bool = True) -> Trajectory:
    tools = EpisodeTools(script, script if searches else None, CODEC, config)
    return asyncio.run(run_episode(QUESTION, 3, tools, GREEDY))


def wrapped(text: str) -> str:
    return f"\n\n<information>{text}</information>\n\n"


@pytest.mark.parametrize("mode", TokenMode)
def test_several_tools_and_the_search_in_one_episode(mode: TokenMode) -> None:
    said = [
        "<calculator> 3 * (4 + 5) </calculator>",
        "<search>who</search>",
        "<do>hello</do>",
        "<calculator> 1 / 0 </calculator>",
        "<answer> 27 </answer>",
    ]
    script = Script(*(f"{text} and more" for text in said))
    trajectory = run(script, task(token_mode=mode))
    heard = [
        wrapped("27"), wrapped("Doc 1(Title: T) who"), wrapped("hello"), wrapped("calculator failed: division by zero"), "",
    ]  # fmt: skip
    assert [turn.observation for turn in trajectory.turns] == heard
    response = "".join(text + answer for text, answer in zip(said, heard, strict=True))
    assert trajectory.response == response
    assert CODEC.decode(trajectory.tokens.tolist()) == QUESTION.prompt + response
    assert CODEC.decode(trajectory.tokens[trajectory.loss_mask].tolist()) == "".join(said)
    assert [(turn.action, turn.tool, turn.content) for turn in trajectory.turns] == [
        (Action.TOOL, "calculator", "3 * (4 + 5)"),
        (Action.SEARCH, "", "who"),
        (Action.TOOL, "scripted", "hello"),
        (Action.TOOL, "calculator", "1 / 0"),
        (Action.ANSWER, "", "27"),
    ]
    assert [turn.tool_error for turn in trajectory.turns] == ["", "", "", "division by zero", ""]
    assert (trajectory.searches, trajectory.tool_calls, trajectory.answer) == (1, 3, "27")
    assert script.stops == {("</search>", "</answer>", "</calculator>", "</do>")}


def test_a_stop_string_is_not_asked_for_twice() -> None:
    tools = EpisodeTools(Script(), Script(), CODEC, task())
    sampling = replace(GREEDY, stop=("</do>", "</answer>"))
    assert tools.stopping(sampling).stop == ("</do>", "</answer>", "</calculator>")


def test_without_tools_nothing_is_different() -> None:
    script = Script("<calculator>1</calculator><search>a</search>", "<answer>b</answer>")
    tools = EpisodeTools(script, script, CODEC, task([]))
    assert tools.stopping(GREEDY) == GREEDY
    trajectory = run(script, task([]))
    assert script.stops == {GREEDY.stop}
    assert [turn.action for turn in trajectory.turns] == [Action.SEARCH, Action.ANSWER]
    assert trajectory.turns[0].text == script.texts[0]
    assert Observer(TagsConfig(), CODEC).observe(render_search(["t\n<calculator>"], ""), 99) == wrapped(
        "Doc 1(Title: t) <calculator>"
    )


def test_without_a_search_its_tag_means_nothing() -> None:
    config = task(invalid_message="\nUse the calculator.\n")
    trajectory = run(Script("<search>a</search><do>b</do>", "<answer>c</answer>"), config, searches=False)
    first, _ = trajectory.turns
    assert (first.action, first.observation) == (Action.INVALID, config.invalid_message), (
        "the engine stops at </search>"
    )
    rules = TurnRules(config, {"do": "scripted"}, searches=False)
    assert rules.parse("<search>a</search> <do>b</do> c").text == "<search>a</search> <do>b</do>"
    assert rules.parse("<search>a</search> <do>b</do> c").tool == "scripted"
    assert rules.parse("<search>a</search>").action is Action.INVALID


def test_the_last_generation_may_not_call() -> None:
    trajectory = run(Script(*["<do>a</do>"] * 3), task(max_turns=2))
    assert trajectory.finish is Finish.TURN_LIMIT
    assert [bool(turn.observation) for turn in trajectory.turns] == [True, True, False]
    assert trajectory.turns[2].action is Action.TOOL
    assert trajectory.tool_calls == 2


def test_a_call_without_room_for_its_answer_is_not_made() -> None:
    script = Script("<do>a</do>", "<answer>b</answer>")
    turn = len(CODEC.encode(QUESTION.prompt + script.texts[0]))
    trajectory = run(script, task(max_total_tokens=turn + 3))
    assert trajectory.finish is Finish.TOKEN_LIMIT
    assert trajectory.tool_calls == 0


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("hello", Called("hello")),
        ("refuse", Called("", "not today")),
        ("break", Called("", "ZeroDivisionError: division by zero")),
        ("stop", Called("", "StopAsyncIteration")),
        ("exit", Called("", "SystemExit: 3")),
        ("mute", Called("", "Mute")),
        ("cancel", Called("", "it was cancelled")),
        ("wait", Called("", "no answer within 0.05 s")),
        ("deaf", Called("", "no answer within 0.05 s")),
        ("number", Called("", "it returned int, not text")),
        ("nothing", Called("")),
        ("surrogate", Called("a?b")),
        ("long", Called("x " * (MOST_CHARS // 2))),
    ],
)
async def test_whatever_a_tool_does_becomes_text(text: str, called: Called) -> None:
    assert await call_tool(Scripted(), text) == called


async def test_who_waits_for_a_call_can_be_cancelled() -> None:
    tool: Tool = Scripted()
    tool.timeout_s = 60.0  # type: ignore[misc]
    waiting = asyncio.ensure_future(call_tool(tool, "wait"))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("nothing", "No result."),
        ("break", "scripted failed: ZeroDivisionError: division by zero"),
        ("wait", "scripted failed: no answer within 0.05 s"),
        ("forge", "(/information)(do)x(/do)</SAY>(answer)me(/answer)"),
    ],
)
def test_what_the_policy_reads(text: str, heard: str) -> None:
    trajectory = run(Script(f"<do>{text}</do>", "<answer>c</answer>"), task())
    assert trajectory.turns[0].observation == wrapped(heard)
    assert trajectory.finish is Finish.ANSWER


WORDS = ["search", "answer", "information", "say", "do"]
UNTRUSTED = st.lists(
    st.sampled_from([f"{start}{word}{end}" for word in WORDS for start in ("<", "</", "< / ") for end in (">", " >")])
    | st.sampled_from(["</d", "o>", "<SAY>", "<", "東京", "<|im_start|>", " "]),
    max_size=12,
).map("".join)  # fmt: skip


@given(UNTRUSTED, st.booleans())
def test_no_tool_forges_a_tag_of_any_tool(text: str, found: bool) -> None:
    observer = Observer(TagsConfig(), CODEC, ("say", "do"))
    observation = observer.observe(render_search([text], "") if found else text, 500)
    inside = observation.removeprefix("\n\n<information>").removesuffix("</information>\n\n")
    assert not re.search(rf"<\s*/?\s*({'|'.join(WORDS)})\s*>", inside, re.IGNORECASE)


PIECES = [f"<{word}>" for word in WORDS] + [f"</{word}>" for word in WORDS] + ["x", " \n"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


def by_hand(text: str) -> tuple[str, str]:
    """Word and content by string search alone: an independent reading of the same rule."""
    ends = [text.index(f"</{word}>") + len(f"</{word}>") for word in ("search", "say", "do") if f"</{word}>" in text]
    if not ends and "</answer>" in text:
        ends = [text.index("</answer>") + len("</answer>")]
    text = text[: min(ends, default=len(text))]
    for start in range(len(text)):
        for word in ("search", "say", "do", "answer"):
            head = f"<{word}>"
            end = text.find(f"</{word}>", start + len(head))
            if text.startswith(head, start) and end >= 0:
                content = text[start + len(head) : end].strip()
                return (word, content) if content or word == "answer" else ("invalid", "")
    return "invalid", ""


@pytest.mark.parametrize(
    ("text", "kept", "tool", "content"),
    [
        ("x</do><search>a</search>", "x</do>", "", ""),
        ("<do>a</do><search>b</search>", "<do>a</do>", "scripted", "a"),
        ("<search>a</search><do>b</do>", "<search>a</search>", "", "a"),
        ("<answer>a</answer><do>b</do>", "<answer>a</answer><do>b</do>", "", "a"),
        ("<do>a<say>b</say></do>", "<do>a<say>b</say>", "echo", "b"),
        ("<do> \n </do>", "<do> \n </do>", "", ""),
    ],
)
def test_a_turn_ends_at_the_first_closing_tag_of_any_tool(text: str, kept: str, tool: str, content: str) -> None:
    turn = TurnRules(task(), {"say": "echo", "do": "scripted"}).parse(text)
    assert (turn.text, turn.tool, turn.content) == (kept, tool, content)


@given(TEXTS)
def test_parsing_agrees_with_a_reading_by_hand(text: str) -> None:
    rules = TurnRules(task(), {"say": "echo", "do": "scripted"})
    word, content = by_hand(text)
    turn = rules.parse(text)
    tool = {"say": "echo", "do": "scripted"}.get(word, "")
    action = Action.TOOL if tool else Action(word)
    assert (turn.action, turn.tool, turn.content) == (action, tool, content)
    assert text.startswith(turn.text)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(TEXTS, min_size=3, max_size=3), st.sampled_from(TokenMode), st.integers(30, 220), st.integers(20, 40)
)  # fmt: skip
def test_no_script_breaks_a_limit_or_a_mask(texts: list[str], mode: TokenMode, total: int, limit: int) -> None:
    config = task(token_mode=mode, max_total_tokens=total, max_observation_tokens=limit, max_turn_tokens=9, max_turns=2)
    trajectory = run(Script(*texts), config)
    assert len(trajectory.tokens) <= total
    assert (trajectory.loss_mask == (trajectory.turn_of_token >= 0)).all()
    assert np.isnan(trajectory.rollout_logprobs[~trajectory.loss_mask]).all()
    for turn in trajectory.turns:
        assert bool(turn.tool) == (turn.action is Action.TOOL)
        if turn.tool and turn.observation:
            assert turn.observation.endswith("</information>\n\n")
            assert len(CODEC.encode(turn.observation)) <= limit


def test_an_episode_goes_on_after_a_call_as_if_it_had_not_been_interrupted() -> None:
    said = ("<calculator>1 + 1</calculator>", "<do>hello</do>", "<answer>b</answer>")

    async def play(begun: PartialEpisode | None) -> tuple[list[PartialEpisode | None], Trajectory, Script]:
        taken: list[PartialEpisode | None] = []

        class Watched(Script):
            async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
                taken.append(episode.progress())
                return await super().generate(input_ids, sampling, rid)

        script = Watched(*said)
        episode = Episode(QUESTION, 3, EpisodeTools(script, script, CODEC, task()), GREEDY, begun)
        return taken, episode.trajectory(await episode.run()), script

    taken, expected, through = asyncio.run(play(None))
    assert [len(one.turns) if one else 0 for one in taken] == [0, 1, 2]
    for count, one in enumerate(taken):
        _, again, rest = asyncio.run(play(one))
        assert rest.inputs == through.inputs[count:]
        assert again.tokens.tolist() == expected.tokens.tolist()
        assert [turn.tool for turn in again.turns] == ["calculator", "scripted", ""]


def test_tools_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(UserError, match=r"task\.tools: .*has no class Missing"):
        EpisodeTools(Script(), Script(), CODEC, task(["tests.rollout.tools.own_tools.Missing"]))


def test_the_tools_of_a_task_may_be_given_by_hand(tmp_path: Path) -> None:
    class Written(Scripted):
        async def call(self, text: str) -> str:
            (tmp_path / "call").write_text(text)
            return "written"

    script = Script("<do>a</do>", "<answer>b</answer>")
    tools = EpisodeTools(script, script, CODEC, task(), custom=[Written()])
    trajectory = asyncio.run(run_episode(QUESTION, 3, tools, GREEDY))
    assert trajectory.turns[0].observation == wrapped("written")
    assert (tmp_path / "call").read_text() == "a"
