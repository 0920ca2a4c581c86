"""Whole episodes with an engine, a search and tools that follow a script."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TaskConfig, TokenMode
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.rollout.agent.episode import (
    MOST_CHARS,
    Called,
    EngineActivity,
    EpisodeTools,
    Generation,
    TurnSampling,
    call_tool,
    common_wait,
    run_episode,
    within,
)
from rlsys.rollout.agent.tokens import Codec
from rlsys.search.retrieval import SearchResult
from tests.rollout.tools.own_tools import Scripted
from tests.support.bpe import build_tokenizer
from tests.support.refusals import refused
from tests.support.search_results import result_of

CODEC = Codec(build_tokenizer(words=True))
QUESTION = Question(uid="q", prompt="Who? 東京\n", answers=("a",))
GREEDY = TurnSampling(temperature=0.0, stop=("</search>", "</answer>"))
BOTH = ["rlsys.rollout.tools.calculator.Calculator", "tests.rollout.tools.own_tools.Scripted"]


@dataclass
class Script:
    """Says one text a turn, cut to the tokens allowed; finds one passage for every query."""

    texts: Sequence[str]
    result: SearchResult = field(default_factory=lambda: result_of("T\nParis 🚀"))
    heeds_stops: bool = True
    inputs: list[list[int]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    stops: set[tuple[str, ...]] = field(default_factory=set)

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        assert rid == f"q#3.{len(self.inputs)}"
        text = self.texts[len(self.inputs)]
        self.inputs.append(input_ids)
        self.stops.add(sampling.stop)
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text and self.heeds_stops]
        ids = CODEC.encode(text[: min(ends, default=len(text))])
        kept = ids[: sampling.max_new_tokens]
        finish = "stop" if len(kept) == len(ids) else "length"
        return Generation(kept, [-0.5] * len(kept), finish, 0, versions=[4] * len(kept))

    async def search(self, query: str) -> SearchResult:
        self.queries.append(query)
        return self.result


def task(**changes: Any) -> TaskConfig:
    return TaskConfig(train_path="", eval_path="", **{"max_turns": 4, "tools": BOTH, **changes})


def run(script: Script, config: TaskConfig, *, searches: bool = True, timeout_s: float | None = None) -> Trajectory:
    tools = EpisodeTools(script, script if searches else None, CODEC, config)
    return asyncio.run(run_episode(QUESTION, 3, tools, GREEDY, timeout_s))


def wrapped(text: str) -> str:
    return f"\n\n<information>{text}</information>\n\n"


@pytest.mark.parametrize("mode", TokenMode)
def test_several_tools_and_the_search_in_one_episode(mode: TokenMode) -> None:
    said = [
        "<calculator> 3 * (4 + 5) </calculator>",
        "<search> who </search>",
        "<do>hello</do>",
        "<calculator> 1 / 0 </calculator>",
        "<answer> 27 </answer>",
    ]
    script = Script([f"{text} and more" for text in said])
    trajectory = run(script, task(token_mode=mode))
    heard = ["27", "Doc 1(Title: T) Paris 🚀", "hello", "calculator failed: division by zero"]
    observations = [*map(wrapped, heard), ""]
    assert [turn.observation for turn in trajectory.turns] == observations
    response = "".join(text + answer for text, answer in zip(said, observations, strict=True))
    assert trajectory.response == response
    assert CODEC.decode(trajectory.tokens.tolist()) == QUESTION.prompt + response
    assert CODEC.decode(trajectory.tokens[trajectory.loss_mask].tolist()) == "".join(said)
    assert trajectory.tokens[-1] == CODEC.eos_id
    assert set(trajectory.versions[trajectory.loss_mask]) == {4, -1}
    assert [(turn.action, turn.tool, turn.content) for turn in trajectory.turns] == [
        (Action.TOOL, "calculator", "3 * (4 + 5)"),
        (Action.SEARCH, "", "who"),
        (Action.TOOL, "scripted", "hello"),
        (Action.TOOL, "calculator", "1 / 0"),
        (Action.ANSWER, "", "27"),
    ]
    assert [turn.tool_error for turn in trajectory.turns] == ["", "", "", "division by zero", ""]
    assert [turn.prompt_tokens for turn in trajectory.turns] == [len(inputs) for inputs in script.inputs]
    assert (trajectory.searches, trajectory.tool_calls, trajectory.answer) == (1, 3, "27")
    assert script.queries == ["who"]
    assert script.stops == {("</search>", "</answer>", "</calculator>", "</do>")}


def test_the_last_generation_may_not_act() -> None:
    script = Script(["<search>a</search>", "hm", "<search>c</search>"])
    trajectory = run(script, task(max_turns=2))
    assert trajectory.finish is Finish.TURN_LIMIT
    assert [turn.action for turn in trajectory.turns] == [Action.SEARCH, Action.INVALID, Action.SEARCH]
    assert [turn.observation for turn in trajectory.turns[1:]] == [task().invalid_message, ""]
    assert (script.queries, trajectory.searches, trajectory.answer) == (["a"], 1, None)
    assert trajectory.tokens[-1] != CODEC.eos_id


def test_a_call_without_room_for_its_answer_is_not_made() -> None:
    script = Script(["<do>a</do>", "<answer>b</answer>"])
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
        ("surrogate", Called("a?b")),
        ("long", Called("x " * (MOST_CHARS // 2))),
    ],
)
async def test_whatever_a_tool_does_becomes_text(text: str, called: Called) -> None:
    assert await call_tool(Scripted(), text) == called


async def test_within_returns_raises_and_gives_up() -> None:
    async def answer() -> int:
        return 7

    async def fail() -> int:
        raise ZeroDivisionError

    async def wait() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise ValueError("an error that nobody asks for") from None
        return 0

    cancelled: list[bool] = []
    assert await within(answer(), timeout_s=60.0) == 7
    with pytest.raises(ZeroDivisionError):
        await within(fail())
    assert await within(wait(), timeout_s=0.01) is None
    assert cancelled == [True]


WORDS = ["search", "answer", "do", "calculator"]
PIECES = [f"<{word}>" for word in WORDS] + [f"</{word}>" for word in WORDS] + ["東京", "🚀", " ", "\n", "Paris", "é"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(max_examples=50)
@given(
    st.lists(TEXTS, min_size=3, max_size=3),
    TEXTS,
    st.sampled_from(TokenMode),
    st.integers(12, 220),
    st.integers(20, 40),
    st.booleans(),
)
def test_no_script_breaks_a_limit_or_an_array(
    texts: list[str], passage: str, mode: TokenMode, total: int, observation: int, eos: bool
) -> None:
    limits = {"max_total_tokens": total, "max_observation_tokens": observation, "max_turn_tokens": 9, "max_turns": 2}
    script = Script(texts, result_of(*[passage] * 3), heeds_stops=False)
    trajectory = run(script, task(token_mode=mode, train_eos=eos, **limits))
    length = len(trajectory.tokens)
    assert length <= total
    turn_of_token = trajectory.turn_of_token
    for array in (trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.versions, turn_of_token):
        assert len(array) == length
    assert (trajectory.loss_mask == (turn_of_token >= 0)).all()
    assert turn_of_token.max(initial=-1) < len(trajectory.turns)
    assert (np.diff(turn_of_token[trajectory.loss_mask]) >= 0).all()
    assert not trajectory.loss_mask[: trajectory.prompt_length].any()
    assert np.isnan(trajectory.rollout_logprobs[~trajectory.loss_mask]).all()
    assert all(len(inputs) < total for inputs in script.inputs)
    ended = bool(length) and trajectory.tokens[-1] == CODEC.eos_id
    assert ended == (eos and trajectory.finish is Finish.ANSWER)
    for turn in trajectory.turns:
        assert bool(turn.tool) == (turn.action is Action.TOOL)
        if turn.action is not Action.INVALID and turn.observation:
            assert turn.observation.endswith("</information>\n\n")
            assert len(CODEC.encode(turn.observation)) <= observation


def test_what_cannot_work_is_refused() -> None:
    with refused("out_of_range", "task.max_observation_tokens"):
        run(Script([]), task(max_observation_tokens=3))
    with refused("out_of_range", "task.max_prompt_tokens"):
        run(Script([]), task(max_prompt_tokens=2))
    with refused("unknown", "task.tools"):
        run(Script([]), task(tools=["tests.rollout.tools.own_tools.Missing"]))


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        ([], ""),
        ([EngineActivity(False, {"search": 0})], ""),
        ([EngineActivity(False, {"search": 2}), EngineActivity(False, {})], "search"),
        ([EngineActivity(False, {"search": 2}), EngineActivity(True, {})], ""),
        ([EngineActivity(False, {"search": 2}), EngineActivity(False, {"clock": 1, "search": 1})], "clock and search"),
    ],
)
def test_all_wait_where_none_generates(found: list[EngineActivity], cause: str) -> None:
    assert common_wait(found) == cause


class Watched(Script):
    """Looks at what episodes wait for while it is asked; its search may never answer."""

    hangs = False

    def __init__(self, *texts: str) -> None:
        super().__init__(texts)
        self.tools = EpisodeTools(self, self, CODEC, task(), custom=[self])  # type: ignore[list-item]
        self.seen: list[Counter[str]] = []

    name, tag, timeout_s, description = "watch", "watch", 60.0, "be looked at"

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        self.seen.append(+self.tools.awaited)
        return await super().generate(input_ids, sampling, rid)

    async def search(self, query: str) -> SearchResult:
        self.seen.append(+self.tools.awaited)
        if self.hangs:
            await asyncio.Event().wait()
        return await super().search(query)

    async def call(self, text: str) -> str:
        self.seen.append(+self.tools.awaited)
        return text


def test_an_episode_counts_for_as_long_as_it_waits() -> None:
    watched = Watched("<search>who</search>", "<watch>it</watch>", "<answer>42</answer>")
    asyncio.run(run_episode(QUESTION, 3, watched.tools, GREEDY))
    nothing: Counter[str] = Counter()
    assert watched.seen == [nothing, Counter(search=1), nothing, Counter(watch=1), nothing]
    assert not +watched.tools.awaited


def test_an_episode_out_of_time_returns_what_it_has_and_waits_no_more() -> None:
    watched = Watched("<search>who</search>")
    watched.hangs = True
    playing = run_episode(QUESTION, 3, watched.tools, GREEDY, timeout_s=1.0)
    trajectory = asyncio.run(playing)
    assert trajectory.finish is Finish.ABORTED
    assert len(trajectory.turns) == len(watched.inputs)
    assert not +watched.tools.awaited
