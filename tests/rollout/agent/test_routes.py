"""Tests of recorded routes with an engine whose experts name the token and all tokens before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TokenMode
from rlsys.data.trajectory import Action, Finish, Routes
from rlsys.rollout.agent.recorder import Generation, Parsed, Recorder, TurnSampling
from rlsys.rollout.agent.tokens import PartialEpisode
from rlsys.weights.checkpoint.state_file import load_values, save_values
from tests.rollout.agent.drawn_texts import CODEC, OUTPUTS, TEXTS
from tests.rollout.agent.scripted import QUESTION, routes_of, task

UNKNOWN = 255
T = TypeVar("T")


class Said(NamedTuple):
    """Output of a turn and the observation after it."""

    output: list[int]
    observation: str


class Call(NamedTuple):
    """Tokens that the engine read and sampled, and the first whose experts it returned."""

    ids: list[int]
    outputs: int
    first: int


@dataclass
class Engine:
    """Says the given turns, and returns the experts that it is asked for."""

    turns: Sequence[Said]
    calls: list[Call] = field(default_factory=list)

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        output = list(self.turns[int(rid.rpartition(".")[2])].output)
        assert sampling.routes_from is not None
        call = Call([*input_ids, *output], len(output), sampling.routes_from)
        self.calls.append(call)
        routes = routes_of(call.ids, call.first)
        return Generation(output, [-1.0] * len(output), "stop", 0, [0] * len(output), routes)


def recorded(
    mode: TokenMode, turns: Sequence[Said], progress: PartialEpisode | None = None
) -> tuple[Recorder, list[Call]]:
    """Play the turns that `progress` lacks."""
    engine = Engine(turns)
    limits = {"max_turn_tokens": 4000, "max_total_tokens": 4096}
    sampling = TurnSampling(1.0, routes_from=0)
    config = task(token_mode=mode, train_eos=True, **limits)
    recorder = Recorder(QUESTION, 0, engine, CODEC, config, sampling, progress)

    async def play() -> None:
        for said in turns[len(recorder.turns) :]:
            await recorder.generate(lambda text, _: Parsed(text, Action.MESSAGE, text))
            recorder.observe(said.observation)

    asyncio.run(play())
    return recorder, engine.calls


EPISODES = st.lists(st.builds(Said, OUTPUTS.filter(bool), st.one_of(TEXTS, st.just(""))), min_size=1, max_size=4)


@settings(max_examples=60)
@given(st.sampled_from(TokenMode), EPISODES)
def test_only_tokens_that_re_tokenisation_changed_and_the_last_lack_the_experts_of_the_engine(
    mode: TokenMode, said: list[Said]
) -> None:
    recorder, calls = recorded(mode, said)
    one = recorder.trajectory(Finish.TURN_LIMIT)
    tokens = one.tokens.tolist()
    assert one.routes is not None
    assert len(one.routes) == len(tokens)
    if mode is TokenMode.append:
        assert sum(len(call.ids) - 1 - call.first for call in calls) == len(calls[-1].ids) - 1, "each token once"
    # What the last call read, it read after the same tokens, up to the first that the final text has otherwise.
    read = calls[-1].ids
    same = next((at for at, pair in enumerate(zip(read, tokens, strict=False)) if pair[0] != pair[1]), len(read))
    sure = min(same, len(read) - 1)
    assert np.array_equal(one.routes[:sure], routes_of(tokens)[:sure])
    # Behind it, a token keeps the experts with which the last turn sampled it, if only tokens before it changed.
    own = np.flatnonzero(one.turn_of_token == len(said) - 1)
    kept = 0
    while kept < min(len(own), calls[-1].outputs) and tokens[own[-1 - kept]] == read[-1 - kept]:
        kept += 1
    sampled = routes_of(read)
    for back in range(1, len(own) + 1):
        place = own[-back]
        if place >= same and 1 < back <= kept:
            assert np.array_equal(one.routes[place], sampled[len(read) - back])
        elif place >= sure:
            assert (one.routes[place] == UNKNOWN).all()


def test_experts_are_those_of_the_turn_that_read_the_changed_tokens() -> None:
    """The text of "<search>" by character becomes one token or two before the next turn, which reads those."""
    letters = [token for letter in "<search> x </search>" for token in CODEC.encode(letter)]
    recorder, calls = recorded(TokenMode.retokenize, [Said(letters, "Paris"), Said(CODEC.encode("Paris"), "")])
    one = recorder.trajectory(Finish.TURN_LIMIT)
    changed = next(at for at in count() if calls[0].ids[at] != calls[1].ids[at])
    assert one.routes is not None
    assert one.tokens_differing
    assert [call.first for call in calls] == [0, changed], "from the first changed token on, they are asked for again"
    assert np.array_equal(one.routes[:-1], routes_of(one.tokens.tolist()))


@settings(max_examples=20)
@given(st.sampled_from(TokenMode), EPISODES, st.data())
def test_an_episode_that_is_saved_and_resumed_keeps_its_experts(
    mode: TokenMode, said: list[Said], data: st.DataObject
) -> None:
    whole, calls = recorded(mode, said)
    kept = data.draw(st.integers(1, len(said)))
    progress = recorded(mode, said[:kept])[0].progress()
    assert progress is not None
    again, later = recorded(mode, said, _saved(progress))
    assert later == calls[kept:], "no token is asked for again"
    one, other = (each.trajectory(Finish.ANSWER) for each in (whole, again))
    assert one.routes is not None
    assert np.array_equal(one.routes, _required(other.routes))
    assert np.array_equal(one.routes, _required(_saved(other).routes))


def _required(routes: Routes | None) -> Routes:
    assert routes is not None
    assert routes.dtype == np.uint8, "one byte for each choice"
    return routes


def _saved(value: T) -> T:
    """The value, through a checkpoint's file of partial episodes and waiting groups."""
    with TemporaryDirectory() as folder:
        save_values(Path(folder) / "state.npz", value)
        return load_values(Path(folder) / "state.npz", type(value))
