"""Tests of the reward of an episode: weights, turns, limits, and random text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import CompatConfig, RewardConfig
from rlsys.data.trajectory import Trajectory
from rlsys.orchestrator.rewards.reward import PENALTIES, Rewards, Scored, pure_terms
from tests.support.written_episodes import TASK, Said, episode, question, task_of, terms, think

SEARCH = (think("search", "capital of Mali"), "Doc 1(Title: Mali) Its capital is Bamako.")
RIGHT, WRONG = think("answer", "Bamako"), think("answer", "Ségou")
ARTICLE = terms(correct_answer=10.0, search_penalty=-0.1, invalid_format=-5.0)


async def scored(
    config: RewardConfig, trajectory: Trajectory, over_prompt: bool = False, answer: str = "Bamako"
) -> Scored:
    rewards = Rewards(config, TASK, CompatConfig(answer_over_prompt=over_prompt))
    try:
        return await rewards.score(question(answer), trajectory)
    finally:
        await rewards.close()


@pytest.mark.parametrize(
    ("said", "turn_rewards"),
    [
        ((SEARCH, SEARCH, RIGHT), [-0.1, -0.1, 10.0]),
        ((SEARCH, WRONG), [-0.1, 0.0]),
        ((SEARCH, "<answer>Bamako</answer>"), [-0.1, 5.0]),
        ((SEARCH, "what?", WRONG), [-0.1, 0.0, -5.0]),
        ((SEARCH, SEARCH, SEARCH), [-0.1, -0.1, -5.1]),
        ((), [-5.0]),
    ],
)
async def test_reward_falls_on_the_turn_that_earned_it(said: tuple[Said, ...], turn_rewards: list[float]) -> None:
    result = await scored(ARTICLE, episode(*said))
    assert result.turn_rewards == pytest.approx(turn_rewards)
    assert result.reward == pytest.approx(sum(turn_rewards))


async def test_equal_totals_are_bitwise_equal_rewards() -> None:
    """The sums differ in the last bit, which must not make a group look as if its rewards differed."""
    blind = (think("search", "Mali"), "nothing")
    config = terms(exact_match=1.0, search_penalty=-0.3, retrieval=0.1)
    first = await scored(config, episode(SEARCH, blind, blind, RIGHT))
    second = await scored(config, episode(blind, blind, SEARCH, RIGHT))
    assert sum(first.turn_rewards) != sum(second.turn_rewards)
    assert first.reward == second.reward


MANY = "<answer>Bamako</answer>" * 11 + "<search></search>"


async def test_episode_with_too_many_answers_gets_the_configured_score() -> None:
    names = dict.fromkeys(("exact_match", "sub_em", "f1", "format"), 1.0)
    config = RewardConfig(terms=names, max_answer_tags=10, many_answers_score=0.25)
    assert (await scored(config, episode(MANY))).parts == dict.fromkeys(names, 0.25)
    for config.max_answer_tags in (11, None):
        assert (await scored(config, episode(MANY))).parts == {**names, "format": 0.8}


async def test_limit_of_answers_raises_no_wrong_answer_and_softens_no_penalty() -> None:
    names = {"exact_match": 1.0, "invalid_format": -5.0}
    config = RewardConfig(terms=names, max_answer_tags=10, many_answers_score=0.25)
    assert (await scored(config, episode(MANY), answer="Ségou")).parts == {"exact_match": 0.0, "invalid_format": 1.0}


PIECES = st.sampled_from([f"<{end}{tag}>" for tag in ("think", "search", "answer", "information") for end in ("", "/")])
TEXTS = st.lists(PIECES | st.text(st.characters(), max_size=5), max_size=8).map("".join)
EVERY_TERM = {
    name: -0.3 if name in PENALTIES else 0.3 for name in pure_terms(RewardConfig(), TASK) if name != "correct_answer"
}


@settings(max_examples=40)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=5), TEXTS, st.booleans(), st.integers(0, 4), st.integers(1, 9000))
async def test_random_text_is_scored(
    said: list[tuple[str, str]], answer: str, over_prompt: bool, max_turns: int, tokens: int
) -> None:
    task = task_of(max_turns=max_turns)
    trajectory = episode(*said, task=task, response_tokens=tokens)
    config = RewardConfig(terms=EVERY_TERM, max_answer_tags=3)
    result = await scored(config, trajectory, over_prompt, answer)
    assert len(result.turn_rewards) == max(1, len(trajectory.turns))
    assert sum(result.turn_rewards) == pytest.approx(result.reward, abs=1e-9)
    assert result.reward == pytest.approx(sum(EVERY_TERM[name] * part for name, part in result.parts.items()), abs=1e-9)
    assert result.parts["exact_match"] <= result.parts["f1"]
    assert result.parts["exact_match"] <= result.parts["sub_em"]
