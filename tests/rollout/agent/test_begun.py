"""An episode that is interrupted after any turn and goes on elsewhere ends as one that ran through."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TaskConfig, TokenMode
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.errors import RunError
from rlsys.rollout.agent.episode import Episode, EpisodeGroup, EpisodeTools, Generation, TurnSampling, run_episode
from rlsys.rollout.agent.tokens import Codec, EpisodeProgress, PartialEpisode
from rlsys.search.retrieval import SearchResult
from tests.support.bpe import build_tokenizer
from tests.support.search_results import result_of

CODECS = [Codec(build_tokenizer(words=words)) for words in (True, False)]
QUESTION = Question(uid="q", prompt="Who? 東京\n", answers=("a",))
DRAWN = TurnSampling(temperature=1.0, stop=("</search>", "</answer>"))


@dataclass
class World:
    """Says `ids[turn]` at each turn, cut to the budget; its log-probs and versions depend on every input token.

    The turn is read off the request's name, so that any episode may call it in any order. `halt` is where it
    stops for ever: (turn, "say" or "find"); the search of a turn follows its generation.
    """

    codec: Codec
    ids: list[list[int]]
    found: SearchResult = field(default_factory=lambda: result_of("T\nParis 🚀"))
    halt: tuple[int, str] = (-1, "")
    calls: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)
    halted: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        turn = int(rid.rpartition(".")[2])
        await self._pass(turn, "say")
        self.calls.append((rid, tuple(input_ids), sampling.max_new_tokens))
        kept = self.ids[turn][: sampling.max_new_tokens]
        finish = "stop" if len(kept) == len(self.ids[turn]) else "length"
        base = hash((tuple(input_ids), sampling.max_new_tokens))
        logprobs = [-((base + 37 * place) % 1009) / 97 for place in range(len(kept))]
        versions = [turn + place // 3 for place in range(len(kept))]
        return Generation(kept, logprobs, finish, len(input_ids) // 2, versions)

    async def search(self, query: str) -> SearchResult:
        await self._pass(int(self.calls[-1][0].rpartition(".")[2]), "find")
        return result_of(*(f"{query}\n{hit.contents}" for hit in self.found.passages), error=self.found.error)

    async def _pass(self, turn: int, what: str) -> None:
        if (turn, what) == self.halt:
            self.halted.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


def task(**changes: Any) -> TaskConfig:
    return TaskConfig(train_path="", eval_path="", **{"max_turns": 3, **changes})


def same(one: EpisodeProgress, other: EpisodeProgress) -> bool:
    """All fields but timings; numbers bit for bit."""
    if type(one) is not type(other):
        return False
    for name in (each.name for each in fields(one)):
        left, right = getattr(one, name), getattr(other, name)
        if name == "turns":
            left, right = (
                [replace(turn, generate_s=0.0, tool_s=0.0, began_ns=0) for turn in turns] for turns in (left, right)
            )
        if isinstance(left, np.ndarray):
            if left.dtype != right.dtype or left.tobytes() != right.tobytes():
                return False
        elif left != right:
            return False
    return True


async def interrupted(world: World, tools: EpisodeTools, begun: PartialEpisode | None) -> Episode:
    """An episode that is cut off where `world` halts, or has ended before."""
    world.halted.clear()
    episode = Episode(QUESTION, 3, tools, DRAWN, begun)
    running = asyncio.ensure_future(episode.run())
    halted = asyncio.ensure_future(world.halted.wait())
    await asyncio.wait({running, halted}, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    halted.cancel()
    await asyncio.gather(running, halted, return_exceptions=True)
    return episode


async def prove(codec: Codec, ids: list[list[int]], config: TaskConfig, found: SearchResult) -> Trajectory:
    """Interrupt one episode at every turn, before and during its search, and another at all of them.

    Returns the trajectory of the episode that ran through.
    """
    through = World(codec, ids, found)
    expected = await run_episode(QUESTION, 3, EpisodeTools(through, through, codec, config), DRAWN)
    taken: PartialEpisode | None = None
    for turn, planned in enumerate(expected.turns):
        searches = planned.action is Action.SEARCH and bool(planned.observation)
        for what in ("say", "find") if searches else ("say",):
            world = World(codec, ids, found, (turn, what))
            tools = EpisodeTools(world, world, codec, config)
            taken = (await interrupted(world, tools, taken)).progress()
            once = (await interrupted(world, tools, None)).progress()
            assert world.halted.is_set()
            assert (taken is None) == (once is None) == (turn == 0)
            if once is None or taken is None:
                continue
            assert same(once, taken)
            assert len(once.turns) == turn, "what was cut off is not kept"
            rest = World(codec, ids, found)
            again = Episode(QUESTION, 3, EpisodeTools(rest, rest, codec, config), DRAWN, _moved(once))
            begun = again.progress()
            assert begun is not None
            assert same(begun, once), "putting back changes nothing"
            # The world says what the calls are given, so this is what the rest of the episode was given.
            rest.calls += through.calls[:turn]
            assert same(again.trajectory(await again.run()), expected)
            assert rest.calls == through.calls
    return expected


def _moved(begun: PartialEpisode) -> PartialEpisode:
    moved: PartialEpisode = pickle.loads(pickle.dumps(begun))
    return moved


@pytest.mark.parametrize("mode", TokenMode)
@pytest.mark.parametrize("codec", CODECS, ids=["words", "any"])
def test_searches_a_call_a_telling_off_and_an_answer(codec: Codec, mode: TokenMode) -> None:
    said = [
        "<search> who </search>",
        "hm",
        "<calculator>1 + 1</calculator>",
        "<search>é</search>",
        "<answer>b</answer>",
    ]
    config = task(token_mode=mode, max_turns=4, tools=["rlsys.rollout.tools.calculator.Calculator"])
    expected = asyncio.run(prove(codec, [codec.encode(text) for text in said], config, result_of("Paris 🚀")))
    assert [turn.action for turn in expected.turns] == [
        Action.SEARCH, Action.INVALID, Action.TOOL, Action.SEARCH, Action.ANSWER,
    ]  # fmt: skip


PIECES = ["<search>", "</search>", "<answer>", "</answer>", "東京", "🚀", " ", "\n", "Paris", "é", "</se"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
STRAY_IDS = st.lists(st.integers(0, 400), max_size=3)
TURNS = st.tuples(TEXTS, STRAY_IDS, st.sampled_from(["", "</search>", "</answer>"]))


@settings(max_examples=50)
@given(
    st.sampled_from(CODECS),
    st.lists(TURNS, min_size=4, max_size=4),
    st.lists(TEXTS, max_size=2),
    st.sampled_from(["", "", "timeout"]),
    st.sampled_from(TokenMode),
    st.integers(30, 400),
    st.booleans(),
)
def test_any_episode_goes_on_as_if_it_had_not_been_interrupted(
    codec: Codec,
    said: list[tuple[str, list[int], str]],
    passages: list[str],
    error: str,
    mode: TokenMode,
    total: int,
    eos: bool,
) -> None:
    ids = [[*codec.encode(f"<search>{text}"), *stray, *codec.encode(end)] for text, stray, end in said]
    config = task(token_mode=mode, max_total_tokens=total, max_turn_tokens=25, max_observation_tokens=40, train_eos=eos)
    asyncio.run(prove(codec, ids, config, result_of(*passages, error=error)))


def group(world: World, samples: Sequence[int] = range(4), begun: Sequence[EpisodeProgress] = ()) -> EpisodeGroup:
    return EpisodeGroup(QUESTION, samples, EpisodeTools(world, world, CODECS[0], task()), DRAWN, begun)


class Uneven(World):
    """Sample 0 ends at once, 1 halts at its second turn, the others at their first."""

    async def _pass(self, turn: int, what: str) -> None:
        del turn, what

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        sample, turn = (int(part) for part in rid.partition("#")[2].split("."))
        if (sample, turn) in ((1, 1), (2, 0), (3, 0)):
            if sample == 1:
                self.halted.set()
            await asyncio.Event().wait()
        self.ids[turn] = CODECS[0].encode("<answer>a</answer>" if sample == 0 else "<search>b</search>")
        return await super().generate(input_ids, sampling, rid)


class Deaf(World):
    """Goes on where it is cancelled, until it is let go."""

    let_go: asyncio.Event

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        while True:
            with suppress(asyncio.CancelledError):
                await self.let_go.wait()
                return await super().generate(input_ids, sampling, rid)


async def test_an_episode_that_ignores_its_time_out_keeps_no_slot() -> None:
    world, slots = Deaf(CODECS[0], [[], []]), asyncio.Semaphore(1)
    world.let_go = asyncio.Event()
    deaf = group(world, samples=range(1))
    await asyncio.wait_for(deaf.play(slots, timeout_s=0.05), 60)
    assert not slots.locked()
    assert [one.finish for one in deaf.trajectories()] == [Finish.ABORTED]
    world.let_go.set()


ANSWERS = [CODECS[0].encode(text) for text in ("<search>b</search>", "<answer>c</answer>")]


async def test_a_group_goes_on_from_what_has_ended_and_what_has_begun() -> None:
    slots, uneven = asyncio.Semaphore(3), Uneven(CODECS[0], [[], []])
    first = group(uneven)
    assert first.progress() == ()
    playing = asyncio.ensure_future(first.play(slots, timeout_s=600))
    await asyncio.wait_for(uneven.halted.wait(), 60)
    while len(begun := first.progress()) < 2:
        await asyncio.sleep(0)
    assert [(type(one), one.sample) for one in begun] == [(Trajectory, 0), (PartialEpisode, 1)]
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not slots.locked()
    assert [one.finish for one in first.trajectories()] == [Finish.ANSWER] + [Finish.ABORTED] * 3
    assert [len(one.turns) for one in first.trajectories()] == [1, 1, 0, 0]

    world = World(CODECS[0], ANSWERS)
    second = group(world, begun=tuple(reversed(begun)))
    assert [one.sample for one in second.progress()] == [0, 1], "before it is played"
    await second.play(asyncio.Semaphore(3), timeout_s=600)
    found = second.trajectories()
    assert found[0] is begun[0]
    assert [one.sample for one in found] == [0, 1, 2, 3]
    assert {one.finish for one in found} == {Finish.ANSWER}
    assert [rid for rid, *_ in sorted(world.calls)] == ["q#1.1", "q#2.0", "q#2.1", "q#3.0", "q#3.1"]


async def test_an_error_in_one_episode_ends_its_siblings() -> None:
    class Failing(World):
        async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
            if "#1." in rid:
                raise RunError("refused")
            try:
                return await super().generate(input_ids, sampling, rid)
            finally:
                ended.append(rid)

    ended: list[str] = []
    failing = group(Failing(CODECS[0], ANSWERS, halt=(0, "say")))
    with pytest.raises(RunError):
        await failing.play(asyncio.Semaphore(4), timeout_s=600)
    assert sorted(ended) == ["q#0.0", "q#2.0", "q#3.0"]


async def test_progress_of_another_group_is_refused() -> None:
    world = World(CODECS[0], ANSWERS)
    done = group(world)
    await done.play(asyncio.Semaphore(4), timeout_s=600)
    zero, *_, three = done.trajectories()
    for samples, begun in (
        (range(2), [three]),
        (range(4), [zero, zero]),
        (range(4), [replace(zero, question_uid="r")]),
    ):
        with pytest.raises(ValueError, match=r"question q|none of q"):
            group(world, samples, begun)
    halting = World(CODECS[0], ANSWERS, halt=(1, "say"))
    tools = EpisodeTools(halting, halting, CODECS[0], task())
    partial = (await interrupted(halting, tools, None)).progress()
    assert partial is not None
    for question, sample in ((QUESTION, 2), (replace(QUESTION, uid="r"), 3)):
        with pytest.raises(ValueError, match="sample 3 of question q"):
            Episode(question, sample, tools, DRAWN, partial)
