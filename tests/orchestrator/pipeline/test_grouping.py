"""Tests of group handling between the stages: rewards, advantages, scaling over a mini-batch, correction weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rlsys.algorithms.kl import KlController
from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionKind,
    CorrectionLevel,
    GaeAdvantage,
    KlPlace,
    SampledKl,
)
from rlsys.data.question import Question
from rlsys.data.trajectory import Group, Sample, Scores, Trajectory, response_tokens, trained_tokens
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.pipeline.grouping import finish, mean_kl, turns_of
from rlsys.orchestrator.rewards.reward import Scored, reward_group
from tests.support.trajectories import question, rewarded, trajectory

GRPO = AlgorithmConfig(kl_coef=0.0)
TRUNCATE = CorrectionConfig(CorrectionKind.truncate, CorrectionLevel.token, high=2.0)
# Prompt, a turn of two tokens, an observation of two, a turn of one.
TURNS = [-1, 0, 0, -1, -1, 1]
MASK = [turn >= 0 for turn in TURNS]


def test_episodes_of_a_group_are_rewarded_at_the_same_time_and_in_order() -> None:
    episodes = [trajectory(range(6), MASK, sample=number) for number in range(3)]
    given = [Scored(0.5 * n, (0.2 * n, 0.3 * n), {"exact_match": float(n)}) for n in range(3)]

    async def score(asked: Question, one: Trajectory) -> Scored:
        assert asked == question(1)
        await asyncio.sleep(10 * (one.sample + 1))
        return given[one.sample]

    async def timed() -> tuple[Group, float]:
        return await reward_group(question(1), episodes, score, Tracer("driver")), now()

    group, seconds = run_virtually(timed())
    assert seconds == 30, "as long as the slowest"
    assert [one.trajectory for one in group.samples] == episodes
    assert [Scored(one.reward, one.turn_rewards, one.parts) for one in group.samples] == given


def of_rewards(*rewards: float) -> Group:
    """Return a group of scored samples with these rewards and one trained token each."""
    return Group(
        question(1),
        tuple(rewarded(trajectory(), one).with_scores(Scores(np.zeros(2, np.float32))) for one in rewards),
    )


def of_turns() -> Sample:
    """Return a sample of two turns with the rewards 1 and 2."""
    one = trajectory(range(6), MASK, turn_of_token=TURNS)
    return Sample(one, 3.0, (1.0, 2.0), {}, np.zeros(6, np.float32))


def test_observation_tokens_belong_to_the_turn_before_them() -> None:
    one = trajectory(range(6), MASK, turn_of_token=TURNS)
    assert_array_equal(turns_of(one, trained_tokens), TURNS)
    assert_array_equal(turns_of(one, response_tokens), [-1, 0, 0, 0, 0, 1])
    three = trajectory(range(6), [False, True] * 3, turn_of_token=[-1, 0, -1, 1, -1, 2])
    assert_array_equal(turns_of(three, response_tokens), [-1, 0, 0, 1, 1, 2])
    # No token of the first turn is trained.
    late = trajectory(range(4), [False, False, False, True], turn_of_token=[-1, -1, -1, 1])
    assert_array_equal(turns_of(late, response_tokens), [-1, 0, 0, 1])


@pytest.mark.parametrize(("observations", "in_reward"), [(False, True), (True, False)])
def test_critic_returns_sum_later_rewards_and_penalties(observations: bool, in_reward: bool) -> None:
    """`observations` gives values to observed tokens too (`compat.observations_in_values`). There is no discount."""
    random = np.random.default_rng(5)
    old, reference, values = (random.normal(size=6).astype(np.float32) for _ in range(3))
    config = replace(
        GRPO,
        advantage=GaeAdvantage(whiten=False),
        kl_coef=0.1,
        kl_in=KlPlace.reward if in_reward else KlPlace.loss,
        kl_estimator=SampledKl("k1"),
    )
    sample = of_turns().with_scores(Scores(old, reference, values=values))
    mask_of = response_tokens if observations else trained_tokens
    (found,) = finish(Group(question(1), (sample,)), config, KlController(0.25), mask_of).samples
    # The first turn's reward is on its last token or, with observations, on the last token of its observation.
    rewards = np.array([0, 0, 0, 0, 1, 2] if observations else [0, 0, 1, 0, 0, 2], dtype=float)
    divergence = np.where(MASK, old.astype(float) - reference, 0.0)
    if in_reward:
        rewards -= 0.25 * divergence
    part = np.arange(6) > 0 if observations else np.array(MASK)
    later = np.cumsum(rewards[::-1])[::-1]
    assert found.returns is not None
    assert_allclose(found.returns, np.where(part, later, 0.0), rtol=1e-5, atol=1e-5)
    assert_allclose(found.advantages, np.where(part, later - values, 0.0), rtol=1e-5, atol=1e-5)
    assert found.kl_sum == (pytest.approx(float(divergence.sum())) if in_reward else None)


def test_mean_kl_weighs_episodes_alike() -> None:
    long, short = trajectory(range(5)), trajectory(range(2))
    untrained = trajectory(range(3), [False] * 3)
    samples = [replace(rewarded(one, 0.0), kl_sum=kl) for one, kl in ((long, 2.0), (short, 0.25), (untrained, 0.0))]
    # The first sample has 2 nats over four tokens, the second 1/4 over one.
    assert mean_kl([Group(question(1), tuple(samples))]) == pytest.approx((0.5 + 0.25) / 2)
    assert mean_kl([of_rewards(1, 0)]) is None


def sampled_and_scored(old: list[float], rollout: list[float]) -> Sample:
    """Return a sample; its tokens have the probabilities `old` in training and `rollout` in sampling."""
    one = trajectory(range(len(old)), rollout_logprobs=np.log(rollout).tolist())
    return rewarded(one, 1.0).with_scores(Scores(np.log(old).astype(np.float32)))


def test_every_sample_of_a_group_gets_its_correction_weights() -> None:
    unknown = float("nan")
    # The first token is untrained; the others have the ratios 1.5 and 3, then 0.5 and an unknown one.
    samples = (
        sampled_and_scored([0.9, 0.6, 0.6], [0.1, 0.4, 0.2]),
        sampled_and_scored([0.9, 0.2, 0.5], [0.1, 0.4, unknown]),
    )
    weighed = finish(Group(question(1), samples), replace(GRPO, correction=TRUNCATE), KlController(0.0))
    for sample, before, expected in zip(weighed.samples, samples, ([1, 1.5, 2], [1, 0.5, 1]), strict=True):
        assert sample.weights is not None
        assert_allclose(sample.weights, expected, rtol=1e-6)
        assert sample.trajectory is before.trajectory
    assert finish(Group(question(1), samples), GRPO, KlController(0.0)).samples[0].weights is None


@pytest.mark.parametrize(
    ("episodes", "spread"),
    [
        # (reward, reward by term) of each episode.
        ([(1.0, {"exact_match": 1.0, "overlong": 0.0}), (0.5, {"exact_match": 1.0, "overlong": 0.5})], False),
        # Equal rewards: one answer is right and long, the other wrong and short.
        ([(0.0, {"exact_match": 1.0, "overlong": 1.0}), (0.0, {"exact_match": 0.0, "overlong": 0.0})], True),
        ([(1.0, {"mine.own": 1.0}), (0.0, {"mine.own": 0.0})], True),
        ([(1.0, {"search_penalty": 1.0}), (1.0, {"search_penalty": 1.0})], False),
    ],
)
def test_group_has_spread_if_its_answers_earned_different_amounts(
    episodes: list[tuple[float, dict[str, float]]], spread: bool
) -> None:
    samples = tuple(replace(rewarded(trajectory(), reward), parts=parts) for reward, parts in episodes)
    assert Group(question(1), samples).has_spread is spread
