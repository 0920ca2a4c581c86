"""Whole episodes with an engine and a search tool that follow a script."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TaskConfig, TokenMode
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.errors import UserError
from rlsys.rollout.agent.episode import EpisodeTools, Generation, TurnSampling, run_episode, within
from rlsys.rollout.agent.tokens import Codec
from rlsys.search.retrieval import SearchResult
from tests.rollout.agent.bpe import build_tokenizer
from tests.rollout.agent.found import result_of

CODEC = Codec(build_tokenizer(words=True))
QUESTION = Question(uid="q", prompt="Who? 東京\n", answers=("a",))
GREEDY = TurnSampling(temperature=0.0, stop=("</search>", "</answer>"))


@dataclass
class Script:
    """Says one text a turn, cut to the tokens allowed; finds one passage for every query."""

    texts: list[str]
    result: SearchResult = field(default_factory=lambda: result_of("T\nParis 🚀"))
    delay_s: float = 0.0
    inputs: list[list[int]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    cancelled: bool = False

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        self.inputs.append(input_ids)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        ids = CODEC.encode(self.texts[len(self.inputs) - 1])
        kept = ids[: sampling.max_new_tokens]
        finish = "stop" if len(kept) == len(ids) else "length"
        assert rid.startswith("q#3.")
        return Generation(kept, [-0.5] * len(kept), finish, cached_tokens=len(input_ids) // 2, versions=[4] * len(kept))

    async def search(self, query: str) -> SearchResult:
        self.queries.append(query)
        return self.result


def task(**changes: object) -> TaskConfig:
    return TaskConfig(train_path="", eval_path="", **{"max_turns": 2, **changes})  # type: ignore[arg-type]


def run(script: Script, config: TaskConfig, timeout_s: float | None = None) -> Trajectory:
    tools = EpisodeTools(script, script, CODEC, config)
    return asyncio.run(run_episode(QUESTION, 3, tools, GREEDY, timeout_s))


@pytest.mark.parametrize("mode", TokenMode)
def test_search_then_answer(mode: TokenMode) -> None:
    script = Script(["<search> who </search>", "<answer> me </answer>"])
    trajectory = run(script, task(token_mode=mode))
    observation = "\n\n<information>Doc 1(Title: T) Paris 🚀</information>\n\n"
    response = f"<search> who </search>{observation}<answer> me </answer>"
    assert trajectory.response == response
    assert CODEC.decode(trajectory.tokens.tolist()) == QUESTION.prompt + response
    assert trajectory.tokens[-1] == CODEC.eos_id
    assert (trajectory.finish, trajectory.answer, trajectory.searches) == (Finish.ANSWER, "me", 1)
    assert script.queries == ["who"]
    trained = CODEC.decode(trajectory.tokens[trajectory.loss_mask].tolist())
    assert trained == "<search> who </search><answer> me </answer>"
    first, second = trajectory.turns
    assert first.observation == observation
    assert (first.prompt_tokens, second.prompt_tokens) == tuple(map(len, script.inputs))
    assert set(trajectory.versions[trajectory.loss_mask]) == {4, -1}


def test_the_last_generation_may_not_search() -> None:
    script = Script(["<search>a</search>", "hm", "<search>c</search>"])
    trajectory = run(script, task())
    assert script.queries == ["a"]
    assert trajectory.finish is Finish.TURN_LIMIT
    assert [turn.action for turn in trajectory.turns] == [Action.SEARCH, Action.INVALID, Action.SEARCH]
    assert trajectory.turns[1].observation == task().invalid_message
    assert trajectory.turns[2].observation == ""
    assert trajectory.searches == 1
    assert trajectory.answer is None
    assert trajectory.tokens[-1] != CODEC.eos_id


def test_a_failed_search_is_an_observation() -> None:
    script = Script(["<search>a</search>", "<answer>b</answer>"], result_of(error="timeout"))
    trajectory = run(script, task())
    assert trajectory.turns[0].observation == "\n\n<information>Search failed: timeout</information>\n\n"
    assert trajectory.turns[0].tool_error == "timeout"
    assert trajectory.finish is Finish.ANSWER


def test_an_episode_out_of_time_returns_what_it_has_and_cancels() -> None:
    script = Script(["<search>a</search>"] * 3, delay_s=30.0)
    trajectory = run(script, task(), timeout_s=0.05)
    assert script.cancelled
    assert trajectory.finish is Finish.ABORTED
    assert not trajectory.loss_mask.any()
    assert len(trajectory.tokens) == trajectory.prompt_length > 0


def test_a_generator_that_ignores_its_cancellation_does_not_keep_the_episode() -> None:
    class Deaf(Script):
        async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
            while True:
                try:
                    await let_go.wait()
                    return await super().generate(input_ids, sampling, rid)
                except asyncio.CancelledError:
                    self.cancelled = True

    async def play() -> Trajectory:
        trajectory = await run_episode(QUESTION, 3, EpisodeTools(script, script, CODEC, task()), GREEDY, 0.05)
        let_go.set()
        return trajectory

    let_go, script = asyncio.Event(), Deaf(["<answer>a</answer>"])
    trajectory = asyncio.run(play())
    assert script.cancelled
    assert trajectory.finish is Finish.ABORTED
    assert trajectory.turns == ()


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
    assert await within(answer(), timeout_s=5.0) == 7
    with pytest.raises(ZeroDivisionError):
        await within(fail())
    assert await within(wait(), timeout_s=0.01) is None
    assert cancelled == [True]


def test_the_budget_of_a_turn_and_of_the_whole() -> None:
    script = Script(["x " * 200, "x " * 200, "x " * 200])
    trajectory = run(script, task(max_turn_tokens=7))
    assert [turn.generated_tokens for turn in trajectory.turns] == [7, 7, 7]
    short = run(Script(["x " * 200]), task(max_total_tokens=30))
    assert short.finish is Finish.TOKEN_LIMIT
    assert len(short.tokens) <= 30


TEXTS = st.lists(
    st.sampled_from(["<search>", "</search>", "<answer>", "</answer>", "東京", "🚀", " ", "\n", "Paris", "é"]),
    max_size=12,
).map("".join)


@settings(max_examples=150, deadline=None)
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
    config = task(
        token_mode=mode,
        max_total_tokens=total,
        max_observation_tokens=observation,
        train_eos=eos,
        max_turn_tokens=9,
    )
    script = Script(texts, result_of(*[passage] * 3))
    trajectory = run(script, config)
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
        if turn.action is Action.SEARCH and turn.observation:
            assert turn.observation.endswith("</information>\n\n")


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match=r"task\.max_observation_tokens=3"):
        run(Script([]), task(max_observation_tokens=3))
    with pytest.raises(UserError, match=r"task\.max_prompt_tokens=2"):
        run(Script([]), task(max_prompt_tokens=2))
