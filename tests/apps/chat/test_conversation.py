"""Tests of a conversation's events against the episode that `run_episode` plays with the same engine and search."""

from contextlib import aclosing
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.apps.chat.conversation import (
    Conversation,
    EpisodeEnded,
    Event,
    Failed,
    Kind,
    ObservationAdded,
    SearchFinished,
    Segments,
    TextPiece,
    TurnEnded,
)
from rlsys.config.schema import TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.rollout.agent.episode import EpisodeTools, run_episode
from rlsys.rollout.agent.recorder import TurnSampling
from tests.support.chat import ANSWERS, SEARCHES, FakeSearch, Script, codec, conversation, task

QUESTION = "What is the capital of France?"


async def all_of(asked: Conversation, text: str = QUESTION) -> list[Event]:
    async with aclosing(asked.ask(text, None)) as events:
        return [event async for event in events]


def response(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextPiece | ObservationAdded))


async def trained(turns: tuple[str, ...], search: FakeSearch, tasks: TaskConfig) -> tuple[Script, Trajectory]:
    """Play the episode as training does; return its engine and trajectory."""
    script = Script(codec(), turns)
    tools = EpisodeTools(script, search, script.codec, tasks)
    sampling = TurnSampling(0.0, stop=("</search>", "</answer>"))
    return script, await run_episode(Question("other", f"Question: {QUESTION}\n", ()), 0, tools, sampling)


@pytest.mark.parametrize(
    ("turns", "failure"),
    [
        ((SEARCHES, ANSWERS), ""),
        (("I do not know.", SEARCHES, ANSWERS), "the server is gone"),
        ((SEARCHES + " and more", "<answer>Zürich 東京 🚀</answer>"), ""),
        ((SEARCHES, SEARCHES, SEARCHES), ""),
    ],
)
async def test_events_match_the_episode_that_training_plays(turns: tuple[str, ...], failure: str) -> None:
    script, search, same_search = Script(codec(), turns), FakeSearch(error=failure), FakeSearch(error=failure)
    events = await all_of(conversation(script, search))
    again, played = await trained(turns, same_search, task())
    assert script.inputs == again.inputs
    assert script.sampled == again.sampled
    assert search.queries == same_search.queries
    assert response(events) == played.response
    assert not any("\ufffd" in event.text for event in events if isinstance(event, TextPiece)), "no character is split"
    ended = events[-1]
    assert isinstance(ended, EpisodeEnded)
    assert (ended.answer, ended.finish, ended.searches) == (played.answer, played.finish, played.searches)
    assert ended.tokens == sum(turn.generated_tokens for turn in played.turns)
    acted = [event for event in events if isinstance(event, TurnEnded)]
    assert [(one.action, one.content) for one in acted] == [(t.action, t.content) for t in played.turns]
    assert {event.error for event in events if isinstance(event, SearchFinished)} == {failure}
    observed = [event.text for event in events if isinstance(event, ObservationAdded)]
    assert observed == [turn.observation for turn in played.turns if turn.observation]


async def test_an_observation_that_fills_the_token_limit_is_reported() -> None:
    turns = (SEARCHES, ANSWERS)
    whole, _ = await trained(turns, FakeSearch(), task())
    tight = task(max_total_tokens=len(whole.inputs[1]) - 3)
    events = await all_of(conversation(Script(codec(), turns), FakeSearch(), tight))
    _, played = await trained(turns, FakeSearch(), tight)
    assert response(events) == played.response
    assert (played.finish, type(events[-2])) == (Finish.TOKEN_LIMIT, ObservationAdded)


async def test_an_episode_ends_at_its_time_limit() -> None:
    script = Script(codec(), (SEARCHES, ANSWERS), halt_after=8)
    tools = EpisodeTools(script, FakeSearch(), script.codec, task())
    asked = Conversation(script, tools, TurnSampling(0.0), lambda text: text, timeout_s=0.1)
    ended = (await all_of(asked))[-1]
    assert isinstance(ended, EpisodeEnded)
    assert (ended.answer, ended.finish) == (None, "time_limit")


@pytest.mark.parametrize(
    ("text", "code", "key"), [(" \n", "empty", "question"), ("why " * 100, "out_of_range", "task.max_prompt_tokens")]
)
async def test_an_invalid_question_fails_and_the_next_is_answered(text: str, code: str, key: str) -> None:
    asked = conversation(Script(codec(), (ANSWERS,)), FakeSearch())
    (failed,) = await all_of(asked, text)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.key) == (code, key)
    assert isinstance((await all_of(asked))[-1], EpisodeEnded)


TAGS = {"think": Kind.thought, "search": Kind.search, "answer": Kind.answer}
BITS = st.sampled_from(
    ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<", ">", "</", "a", "b", "<b>", "<thin"]
)


def pieces(parts: list[str]) -> list[tuple[Kind, str]]:
    """Return the pieces of all `parts`, with neighbours of one kind joined."""
    segments = Segments(TAGS)
    found = [piece for part in parts for piece in segments.feed(part)]
    found += segments.end()
    assert all(text for _, text in found)
    return [(kind, "".join(text for _, text in group)) for kind, group in groupby(found, key=lambda piece: piece[0])]


@settings(max_examples=50)
@given(st.lists(BITS, max_size=12).map("".join), st.lists(st.integers(0, 60), max_size=8))
def test_pieces_do_not_depend_on_where_the_text_is_split(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in pairwise(places)]
    assert pieces(parts) == pieces(list(text)) == pieces([text])
    assert "".join(piece for _, piece in pieces(parts)) == text
