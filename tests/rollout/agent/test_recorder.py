"""Tests of the recorder with random engines and agents: token in, token out."""

from __future__ import annotations

import asyncio
import pickle
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TokenMode
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.rollout.agent.recorder import EpisodeOver, FurtherCall, Generation, Parsed, Recorder, TurnSampling
from rlsys.rollout.tools.calls import ToolResult
from tests.rollout.agent.scripted import CODEC, QUESTION, task

CONFIG = task(token_mode=TokenMode.append, train_eos=False)
DRAWN = TurnSampling(1.0, stop=("x",))
NOTHING = Parsed("", Action.INVALID, "")


class Said(NamedTuple):
    """A generation, and what the agent does after it."""

    ids: list[int]
    versions: list[int]
    observation: str | None
    """None to generate again at once."""
    further: list[str]


class Engine:
    """Says the given turns, whatever the input."""

    def __init__(self, turns: list[Said], finish: str = "stop") -> None:
        self.turns, self.finish = list(turns), finish
        self.calls: list[tuple[list[int], TurnSampling, str]] = []

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        self.calls.append((input_ids, sampling, rid))
        said = self.turns.pop(0)
        logprobs = [-float(token) / 7 for token in said.ids]
        return Generation(said.ids, logprobs, self.finish, 0, said.versions)  # type: ignore[arg-type]


def whole(text: str, _generation: Generation) -> Parsed:
    return Parsed(text, Action.TOOL, text, "tool")


async def play(recorder: Recorder, turns: list[Said]) -> None:
    for said in turns:
        await recorder.generate(whole)
        if said.observation is not None:
            further = [FurtherCall(NOTHING, text, ToolResult("", "late", 2.0)) for text in said.further]
            recorder.observe(said.observation, ToolResult("", "", 3.0), further)


TEXTS = st.text(" ab東\n<", max_size=6)


@st.composite
def turns(draw: st.DrawFn) -> list[Said]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        # Ids of any kind, special ones and broken characters too: most are not what their text tokenises to.
        ids = draw(st.lists(st.integers(0, 400), max_size=8))
        versions = draw(st.lists(st.integers(0, 9), min_size=len(ids), max_size=len(ids)))
        found.append(Said(ids, versions, draw(st.none() | TEXTS), draw(st.lists(TEXTS, max_size=2))))
    return found


@settings(max_examples=50)
@given(turns(), TEXTS.map("Q{}".format), st.integers(0, 5))
def test_sampled_tokens_are_never_altered_and_the_mask_covers_exactly_them(
    said: list[Said], prompt: str, interrupted: int
) -> None:
    engine = Engine(said)

    async def record() -> tuple[Trajectory, Trajectory]:
        recorder = Recorder(QUESTION, 3, engine, CODEC, CONFIG, DRAWN)
        recorder.begin(prompt)
        await play(recorder, said[:interrupted])
        progress = pickle.loads(pickle.dumps(recorder.progress()))
        rest = said[0 if progress is None else sum(bool(turn.prompt_tokens) for turn in progress.turns) :]
        again = Recorder(QUESTION, 3, Engine(rest), CODEC, CONFIG, DRAWN, progress)
        again.begin(prompt)
        await play(recorder, said[interrupted:])
        await play(again, rest)
        return recorder.trajectory(Finish.TURN_LIMIT), again.trajectory(Finish.TURN_LIMIT)

    for one in asyncio.run(record()):
        tokens, sampled, versions = CODEC.encode(prompt), list[int](), list[int]()
        mask = [False] * len(tokens)
        for turn in said:
            observed = CODEC.encode("".join((turn.observation, *turn.further))) if turn.observation is not None else []
            tokens += [*turn.ids, *observed]
            mask += [True] * len(turn.ids) + [False] * len(observed)
            sampled += turn.ids
            versions += turn.versions
        assert one.tokens.tolist() == tokens
        assert one.loss_mask.tolist() == mask
        assert one.sampled_ids.tolist() == one.tokens[one.loss_mask].tolist() == sampled
        assert one.versions[one.loss_mask].tolist() == versions
        assert np.array_equal(one.rollout_logprobs[one.loss_mask], one.sampled_logprobs)
        assert one.tokens_differing == 0
        assert one.response == "".join(turn.text + turn.observation for turn in one.turns)
        assert len(one.turns) == len(said) + sum(len(turn.further) for turn in said if turn.observation is not None)
    for inputs, sampling, _ in engine.calls:
        assert tokens[: len(inputs)] == inputs
        assert sampling.stop == ("x",)
    assert [rid for *_, rid in engine.calls] == [f"q#3.{number}" for number in range(len(said))]


async def test_limits_and_aborts_end_the_episode() -> None:
    ids = CODEC.encode("a b")
    length = len(CODEC.encode(QUESTION.prompt)) + len(ids)
    said = Said(ids, [0] * len(ids), None, [])
    for finish, limit, expected in (("abort", 1000, Finish.ABORTED), ("stop", length, Finish.TOKEN_LIMIT)):
        config = task(token_mode=TokenMode.append, train_eos=False, max_total_tokens=limit)
        recorder = Recorder(QUESTION, 3, Engine([said, said], finish), CODEC, config, DRAWN)
        with pytest.raises(EpisodeOver) as over:
            await play(recorder, [said, said])
        assert (over.value.finish, len(recorder.turns)) == (expected, 1)
        assert recorder.trajectory(expected).loss_mask.sum() == len(ids)
        with pytest.raises(EpisodeOver):
            recorder.observe("b" * 2000)
        assert (recorder.turns[0].observation, recorder.progress()) == ("", None)
