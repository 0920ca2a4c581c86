"""Tests of interrupted episodes, which end like uninterrupted ones whatever turn they resume from, and of groups."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TaskConfig, TokenMode
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.errors import RunError
from rlsys.rollout.agent import recorder
from rlsys.rollout.agent.episode import Episode, EpisodeGroup, run_episode
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.agent.tokens import Codec, EpisodeProgress, PartialEpisode
from rlsys.rollout.tools import calls
from rlsys.search.retrieval import SearchResult
from tests.rollout.agent.scripted import CALCULATOR, CODEC, DRAWN, QUESTION, Script, interrupted, task, tools_of
from tests.support.bpe import build_tokenizer
from tests.support.search_results import result_of

CODECS = [CODEC, Codec(build_tokenizer())]


@pytest.fixture(autouse=True, scope="module")
def no_clock() -> Iterator[None]:
    """Stop the clock, so that all timings are equal."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (recorder, calls):
            patch.setattr(module, "perf_counter", lambda: 0.0)
        patch.setattr(recorder, "time_ns", lambda: 0)
        yield


def bits(one: EpisodeProgress | None) -> dict[str, Any]:
    """Return all fields by name, with arrays as bytes."""
    assert one is not None
    values = {each.name: getattr(one, each.name) for each in fields(one)}
    plain = {name: (str(v.dtype), v.tobytes()) if isinstance(v, np.ndarray) else v for name, v in values.items()}
    return {"": type(one), **plain}


async def prove(codec: Codec, ids: list[list[int]], config: TaskConfig, found: SearchResult) -> Trajectory:
    """Interrupt an episode at each turn, before and during its search, and another episode at all turns one after
    another.

    Check that both end like the uninterrupted episode, and return its trajectory.
    """
    through = Script(ids, found, codec)
    expected = await run_episode(QUESTION, 3, tools_of(through, config), DRAWN)
    taken: PartialEpisode | None = None
    for turn, planned in enumerate(expected.turns):
        searches = planned.action is Action.SEARCH and bool(planned.observation)
        for what in ("say", "find") if searches else ("say",):
            script = Script(ids, found, codec, halt=(turn, what))
            tools = tools_of(script, config)
            taken = await interrupted(script, tools, taken)
            once = await interrupted(script, tools)
            assert (taken is None) == (once is None) == (turn == 0)
            if once is None or taken is None:
                continue
            assert bits(once) == bits(taken)
            assert len(once.turns) == turn, "the interrupted turn is dropped"
            rest = Script(ids, found, codec)
            moved: PartialEpisode = pickle.loads(pickle.dumps(once))
            again = Episode(QUESTION, 3, tools_of(rest, config), DRAWN, moved)
            assert bits(again.progress()) == bits(once), "a resumed episode has the progress it was given"
            # The script's outputs depend on its inputs, so equal ends also prove equal inputs.
            rest.calls += through.calls[:turn]
            assert bits(again.trajectory(await again.run())) == bits(expected)
            assert rest.calls == through.calls
    return expected


PIECES = ["<search>", "</search>", "<answer>", "</answer>", "東京", "🚀", " ", "\n", "Paris", "é", "</se"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
STRAY_IDS = st.lists(st.integers(0, 400), max_size=3)
TURNS = st.tuples(TEXTS.map("<search>{}".format), STRAY_IDS, st.sampled_from(["", "</search>", "</answer>"]))
PLAYED = ["<search> who </search>", "hm", "<calculator>1 + 1</calculator>", "<search>é</search>", "<answer>b</answer>"]


@settings(max_examples=50)
@given(
    st.sampled_from(CODECS),
    st.lists(TURNS, min_size=5, max_size=5),
    st.lists(TEXTS, max_size=2),
    st.sampled_from(["", "", "timeout"]),
    st.sampled_from(TokenMode),
    st.integers(30, 400),
    st.booleans(),
)
@example(CODECS[0], [(text, [], "") for text in PLAYED], ["Paris 🚀"], "", TokenMode.append, 600, True)
@example(CODECS[1], [(text, [], "") for text in PLAYED], ["Paris 🚀"], "", TokenMode.retokenize, 600, True)
def test_interrupted_episode_ends_like_one_that_ran_through(
    codec: Codec,
    said: list[tuple[str, list[int], str]],
    passages: list[str],
    error: str,
    mode: TokenMode,
    total: int,
    eos: bool,
) -> None:
    ids = [[*codec.encode(text), *stray, *codec.encode(end)] for text, stray, end in said]
    limits = {"max_total_tokens": total, "max_turn_tokens": 40, "max_observation_tokens": 40, "max_turns": 4}
    config = task(token_mode=mode, train_eos=eos, tools=[CALCULATOR], **limits)
    expected = asyncio.run(prove(codec, ids, config, result_of(*passages, error=error)))
    if [text for text, *_ in said] == PLAYED:
        assert [turn.action for turn in expected.turns] == ["search", "invalid", "tool", "search", "answer"]


ANSWERS = ["<search>b</search>", "<answer>c</answer>"]


def group(script: Script, samples: Sequence[int] = range(4), begun: Sequence[EpisodeProgress] = ()) -> EpisodeGroup:
    return EpisodeGroup(QUESTION, samples, tools_of(script, task()), DRAWN, begun)


async def test_episode_that_ignores_its_time_out_frees_its_slot() -> None:
    class Stubborn(Script):
        async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
            del input_ids, sampling, rid
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return await asyncio.Future()  # The future ends when it is cancelled again.

    slots, stubborn = asyncio.Semaphore(1), group(Stubborn([]), samples=range(1))
    await asyncio.wait_for(stubborn.play(slots, timeout_s=0.05), 600)
    assert not slots.locked()
    assert [one.finish for one in stubborn.trajectories()] == [Finish.ABORTED]


async def test_error_in_one_episode_ends_the_others_of_its_group() -> None:
    class Failing(Script):
        async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
            if "#1." in rid:
                raise RunError("refused")
            try:
                return await super().generate(input_ids, sampling, rid)
            finally:
                ended.append(rid)

    ended: list[str] = []
    with pytest.raises(RunError):
        await group(Failing(ANSWERS, halt=(0, "say"))).play(asyncio.Semaphore(4), timeout_s=600)
    assert sorted(ended) == ["q#0.0", "q#2.0", "q#3.0"]


async def test_progress_of_another_group_is_refused() -> None:
    halting = Script(ANSWERS, halt=(1, "say"))
    begun = await interrupted(halting, tools_of(halting, task()))
    ended = await run_episode(QUESTION, 0, tools_of(Script(ANSWERS), task()), DRAWN)
    assert begun is not None
    strange: list[EpisodeProgress] = [replace(ended, question_uid="r"), replace(begun, question_uid="r")]
    for samples, progress in ((range(3), [begun]), (range(4), [ended, ended]), *((range(4), [one]) for one in strange)):
        with pytest.raises(ValueError, match="question"):
            group(halting, samples, progress)
