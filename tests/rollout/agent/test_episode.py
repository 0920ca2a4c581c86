"""Tests of whole episodes with a scripted engine, search and tools."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.custom import custom_variant
from rlsys.config.schema import CustomAgent, SearchR1Agent, TaskConfig, TokenMode
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.rollout.agent.episode import Episode, EpisodeGroup, EpisodeTools, run_episode
from rlsys.rollout.tools.calls import MAX_CHARS, ToolResult, call_tool
from rlsys.search.retrieval import SearchFailed, SearchResult
from tests.rollout.agent.scripted import CALCULATOR, CODEC, DRAWN, QUESTION, SCRIPTED, Script, task, tools_of
from tests.rollout.tools.own_tools import Scripted
from tests.support.refusals import refused
from tests.support.search_results import result_of

HIDES = "tests.extensions.agent_toys.hides_failures"


def run(script: Script, config: TaskConfig) -> Trajectory:
    with closing(tools_of(script, config)) as tools:
        return asyncio.run(run_episode(QUESTION, 3, tools, DRAWN))


@pytest.mark.parametrize("allowed", [False, True])
def test_empty_query_is_searched_only_if_allowed(allowed: bool) -> None:
    script = Script(["<search> </search>", "<answer>a</answer>"], found=result_of())
    config = task(agent=SearchR1Agent(allow_empty_query=allowed))
    heard = "\n\n<information>No results found.</information>\n\n" if allowed else SearchR1Agent().invalid_message
    trajectory = run(script, config)
    assert (script.queries, trajectory.searches) == (([""], 1) if allowed else ([], 0))
    assert trajectory.turns[0].observation == heard


@pytest.mark.parametrize("mode", TokenMode)
def test_episode_calls_several_tools_and_the_search(mode: TokenMode) -> None:
    said = [
        "<calculator> 3 * (4 + 5) </calculator>",
        "<search> who </search>",
        "<do>hello</do>",
        "<calculator> 1 / 0 </calculator>",
        "<answer> 27 </answer>",
    ]
    script = Script([f"{text} and more" for text in said])
    trajectory = run(script, task(token_mode=mode, max_turns=4, tools=[CALCULATOR, SCRIPTED]))
    heard = ["27", "Doc 1(Title: T) Paris 🚀", "hello", "calculator failed: division by zero"]
    observations = [*(f"\n\n<information>{text}</information>\n\n" for text in heard), ""]
    assert [turn.observation for turn in trajectory.turns] == observations
    response = "".join(text + answer for text, answer in zip(said, observations, strict=True))
    assert trajectory.response == response
    assert CODEC.decode(trajectory.tokens.tolist()) == QUESTION.prompt + response
    assert CODEC.decode(trajectory.tokens[trajectory.loss_mask].tolist()) == "".join(said)
    assert trajectory.tokens[-1] == CODEC.eos_id
    assert [(turn.action, turn.tool, turn.content) for turn in trajectory.turns] == [
        (Action.TOOL, "calculator", "3 * (4 + 5)"),
        (Action.SEARCH, "", "who"),
        (Action.TOOL, "scripted", "hello"),
        (Action.TOOL, "calculator", "1 / 0"),
        (Action.ANSWER, "", "27"),
    ]
    assert [turn.tool_error for turn in trajectory.turns] == ["", "", "", "division by zero", ""]
    assert [turn.prompt_tokens for turn in trajectory.turns] == [len(inputs) for _, inputs, _ in script.calls]
    assert (trajectory.searches, trajectory.tool_calls, trajectory.answer) == (1, 3, "27")
    assert script.queries == ["who"]
    assert script.stops == {("</search>", "</answer>", "</calculator>", "</do>")}


def test_call_without_room_for_its_answer_is_not_made() -> None:
    said = "<do>a</do>"
    room = len(CODEC.encode(QUESTION.prompt + said)) + 3
    trajectory = run(Script([said, "<answer>b</answer>"]), task(max_total_tokens=room, tools=[SCRIPTED]))
    assert trajectory.finish is Finish.TOKEN_LIMIT
    assert trajectory.tool_calls == 0


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("hello", ToolResult("hello")),
        ("refuse", ToolResult("", "not today")),
        ("exit", ToolResult("", "SystemExit: 3")),
        ("mute", ToolResult("", "Mute")),
        ("cancel", ToolResult("", "it was cancelled")),
        ("stubborn", ToolResult("", "no answer within 0.05 s")),
        ("number", ToolResult("", "it returned int, not text")),
        ("surrogate", ToolResult("a?b")),
        ("long", ToolResult("x " * (MAX_CHARS // 2))),
    ],
)
async def test_result_or_failure_of_a_tool_becomes_text(text: str, called: ToolResult) -> None:
    assert await asyncio.wait_for(call_tool(Scripted(), text), 600) == called


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
def test_random_episodes_keep_all_limits_and_have_consistent_arrays(
    texts: list[str], passage: str, mode: TokenMode, total: int, observation: int, eos: bool
) -> None:
    limits = {"max_total_tokens": total, "max_observation_tokens": observation, "max_turn_tokens": 9, "max_turns": 2}
    script = Script([CODEC.encode(text) for text in texts], result_of(*[passage] * 3))
    trajectory = run(script, task(token_mode=mode, train_eos=eos, tools=[CALCULATOR, SCRIPTED], **limits))
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
    assert all(len(inputs) < total for _, inputs, _ in script.calls)
    ended = bool(length) and trajectory.tokens[-1] == CODEC.eos_id
    assert ended == (eos and trajectory.finish is Finish.ANSWER)
    for turn in trajectory.turns:
        assert bool(turn.tool) == (turn.action is Action.TOOL)
        if turn.action is not Action.INVALID and turn.observation:
            assert turn.observation.endswith("</information>\n\n")
            assert len(CODEC.encode(turn.observation)) <= observation


def test_task_whose_limits_are_too_small_is_refused() -> None:
    with refused("out_of_range", "task.max_observation_tokens"):
        run(Script([]), task(max_observation_tokens=3))
    with refused("out_of_range", "task.max_prompt_tokens"):
        run(Script([]), task(max_prompt_tokens=2))


async def test_episode_is_counted_while_it_waits_for_a_tool_or_search() -> None:
    seen, called = list[Counter[str]](), threading.Event()

    class Watched(Script):
        async def search(self, query: str) -> SearchResult:
            seen.append(+tools.awaited)
            return await super().search(query)

    async def call(text: str) -> str:
        seen.append(+tools.awaited)
        called.set()
        await asyncio.Event().wait()
        return text

    watched = Watched(["<search>who</search>", "<watch>it</watch>"])
    watch = SimpleNamespace(name="watch", tag="watch", timeout_s=600.0, description="", call=call)
    tools = EpisodeTools(watched, watched, CODEC, task(), custom=[watch])  # type: ignore[list-item]
    episode = Episode(QUESTION, 3, tools, DRAWN)
    playing = asyncio.create_task(episode.run())
    assert await asyncio.to_thread(called.wait, 600)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert seen == [Counter(search=1), Counter(watch=1)]
    assert not +tools.awaited
    assert len(episode.trajectory(Finish.ABORTED).turns) == 2


@pytest.mark.parametrize("agent", [SearchR1Agent(), custom_variant(CustomAgent, HIDES)(HIDES)], ids=["own", "hides"])
async def test_search_that_no_server_answers_ends_the_episode_and_its_group(agent: SearchR1Agent | CustomAgent) -> None:
    """Also if an agent from outside of the package hides the error from the engine."""

    class Down(Script):
        async def search(self, query: str) -> SearchResult:
            self.queries.append(query)
            raise SearchFailed("connection refused")

    script = Down(["<search>who</search>", "<answer>a</answer>"])
    with closing(tools_of(script, task(agent=agent))) as tools:
        with pytest.raises(SearchFailed):
            await run_episode(QUESTION, 3, tools, DRAWN)
        group = EpisodeGroup(QUESTION, [0, 1], tools, DRAWN)
        with pytest.raises(SearchFailed):
            await group.play(asyncio.Semaphore(2), 60.0)
    assert script.queries
