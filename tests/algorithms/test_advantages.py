"""Tests of advantages: named algorithms by hand, and every setting against exact arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.advantages import AdvantageEstimate, RewardedEpisode, batch_advantages, group_estimates
from rlsys.config.algorithm import AdvantageBaseline, AdvantageScale, AlgorithmConfig, GaeAdvantage
from rlsys.config.derived import needs_whole_mini_batch
from tests.algorithms.exact import GAMMAS, SETTINGS, ExactEpisode, Settings, mini_batches, oracle, scale_of, setting

EPS = 1e-6
GRPO = setting("trajectory", "group", "group")
DR_GRPO = setting("trajectory", "group", "none")
RLOO = setting("trajectory", "leave_one_out", "none")
REINFORCE = setting("trajectory", "batch", "none")
LITE_PPO = setting("trajectory", "group", "batch")
PPO = GaeAdvantage(whiten=False)


def episode(
    rewards: Sequence[float],
    turns: Sequence[int],
    penalties: Sequence[float] | None = None,
    values: Sequence[float] | None = None,
) -> RewardedEpisode:
    return RewardedEpisode(
        tuple(rewards),
        np.array(turns, dtype=np.int32),
        None if penalties is None else np.array(penalties, dtype=np.float64),
        None if values is None else np.array(values, dtype=np.float32),
    )


def single(*rewards: float) -> list[RewardedEpisode]:
    """A group of episodes of one turn, with a prompt token and one trained token."""
    return [episode([reward], [-1, 0]) for reward in rewards]


def estimated(groups: Sequence[Sequence[RewardedEpisode]], config: Settings) -> list[list[AdvantageEstimate]]:
    alone = [group_estimates(group, config) for group in groups]
    found = batch_advantages([[one.units for one in group] for group in alone], config)
    return [
        [replace(one, advantages=own) for one, own in zip(*both, strict=True)]
        for both in zip(alone, found, strict=True)
    ]


def advantages(groups: Sequence[Sequence[RewardedEpisode]], config: Settings) -> list[list[list[float]]]:
    return [[one.advantages.tolist() for one in group] for group in estimated(groups, config)]


def scores(groups: Sequence[Sequence[RewardedEpisode]], config: Settings) -> list[float]:
    """The advantage of each episode's last token."""
    return [own[-1] for group in advantages(groups, config) for own in group]


@pytest.mark.parametrize(
    ("config", "rewards", "expected"),
    [
        # Mean 1/4, squared deviations 3/16 + 9/16 = 3/4, sample variance 1/4, deviation 1/2.
        (GRPO, [[1.0, 0.0, 0.0, 0.0]], [0.75 / (0.5 + EPS), *[-0.25 / (0.5 + EPS)] * 3]),
        (DR_GRPO, [[1.0, 0.0, 0.2]], [0.6, -0.4, -0.2]),
        # 1 - (0 + 0.2) / 2; 0 - (1 + 0.2) / 2; 0.2 - (1 + 0) / 2.
        (RLOO, [[1.0, 0.0, 0.2]], [0.9, -0.6, -0.3]),
        (REINFORCE, [[1.0], [0.0, 0.5]], [0.5, -0.5, 0.0]),
        # Centred: 1/2, -1/2 | 0, 0. Squares sum to 1/2, over 4 - 1: deviation sqrt(1/6).
        (LITE_PPO, [[1.0, 0.0], [1.0, 1.0]], [0.5 / (6**-0.5 + EPS), -0.5 / (6**-0.5 + EPS), 0.0, 0.0]),
        # Rewards that differ in the last bit count as equal.
        (GRPO, [[0.1 + 0.2, 0.3]], [0.0, 0.0]),
        (GRPO, [[1.0 + 1e-9, 1.0]], [5e-10 / (5e-10 * 2**0.5 + EPS), -5e-10 / (5e-10 * 2**0.5 + EPS)]),
    ],
)
def test_advantages_of_named_algorithms_by_hand(
    config: Settings, rewards: list[list[float]], expected: list[float]
) -> None:
    np.testing.assert_allclose(scores([single(*group) for group in rewards], config), expected, rtol=1e-6, atol=1e-15)


def test_gae_skips_untrained_tokens_by_hand() -> None:
    config = replace(PPO, gamma=0.5, gae_lambda=0.5)
    one = episode([0.0, 1.0], [-1, 0, -1, 0, -1, 1], [9.0, 0.0, 9.0, 0.1, 9.0, 0.0], [7.0, 0.1, 7.0, 0.2, 7.0, 0.4])
    # Errors: 0.5 * 0.2 - 0.1 = 0; -0.1 + 0.5 * 0.4 - 0.2 = -0.1; 1 - 0.4 = 0.6. Gamma lambda is 1/4.
    last, middle = 0.6, -0.1 + 0.6 / 4
    found = estimated([[one]], config)[0][0]
    np.testing.assert_allclose(found.advantages, [0, middle / 4, 0, middle, 0, last], atol=1e-7)
    assert found.returns is not None
    np.testing.assert_allclose(found.returns, [0, 0.1 + middle / 4, 0, 0.2 + middle, 0, 1.0], atol=1e-7)
    whitened = estimated([[one]], replace(config, whiten=True))[0][0]
    assert whitened.returns is not None
    assert whitened.returns.tolist() == found.returns.tolist(), "whitening must not change the critic's targets"


@settings(max_examples=100)
@given(setting=st.sampled_from(SETTINGS), gamma=GAMMAS, gae_lambda=GAMMAS, batch=mini_batches())
def test_every_setting_equals_exact_arithmetic_token_by_token(
    setting: Settings, gamma: Fraction, gae_lambda: Fraction, batch: list[list[ExactEpisode]]
) -> None:
    config = replace(setting, gamma=float(gamma))
    if isinstance(config, GaeAdvantage):
        config = replace(config, gae_lambda=float(gae_lambda))
    groups = [[one.episode() for one in group] for group in batch]
    expected, targets = oracle(batch, config)
    found = estimated(groups, config)
    for group, group_expected, group_targets in zip(found, expected, targets, strict=True):
        for one, own, target in zip(group, group_expected, group_targets, strict=True):
            assert one.advantages.dtype == np.float64
            np.testing.assert_allclose(one.advantages, own, rtol=1e-7, atol=1e-7)
            if isinstance(config, GaeAdvantage):
                np.testing.assert_allclose(one.returns, target, rtol=1e-7, atol=1e-7)
            else:
                assert one.returns is None


@settings(max_examples=50)
@given(config=st.sampled_from(SETTINGS), batch=mini_batches())
def test_untrained_tokens_and_other_groups_change_no_bit(config: Settings, batch: list[list]) -> None:
    groups = [[one.episode() for one in group] for group in batch]
    junk = [[one.episode(elsewhere=math.nan) for one in group] for group in batch]
    found = advantages(groups, config)
    assert advantages(junk, config) == found
    if not needs_whole_mini_batch(AlgorithmConfig(advantage=config)):
        alone = [[one.advantages.tolist() for one in group_estimates(group, config)] for group in reversed(groups)]
        assert alone[::-1] == found


@pytest.mark.parametrize(("config", "reward"), list(zip(SETTINGS, cycle([0.1, -1e6 - 0.1]), strict=False)))
def test_equal_rewards_give_zero_advantages_with_a_mean_baseline(config: Settings, reward: float) -> None:
    groups = [[episode([reward], [-1, 0, 0], values=[0.0] * 3)] * size for size in (1, 3, 7)]
    found = {value for group in advantages(groups, config) for own in group for value in own}
    no_mean = isinstance(config, GaeAdvantage) or config.baseline is AdvantageBaseline.none
    assert found == ({0.0, reward} if no_mean and scale_of(config) is not AdvantageScale.whiten else {0.0})


def test_empty_groups_and_untrained_episodes_have_zero_advantages() -> None:
    untrained, empty = episode([1.0], [-1, -1], values=[0.0, 0.0]), episode([], [], values=[])
    for config in SETTINGS:
        assert group_estimates([], config) == batch_advantages([], config) == []
        assert batch_advantages([[]], config) == [[]]
        assert advantages([[untrained], [empty]], config) == [[[0.0, 0.0]], [[]]]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (episode([math.nan], [0]), "rewards"),
        (episode([0.0, 0.0], [1, 0]), "turn"),
        (episode([0.0], [0], [math.nan]), "penalties"),
        (episode([0.0], [0], values=[math.inf]), "values"),
        (episode([0.0], [0]), "values"),
        (episode([0.0], [0, 1]), "turn"),
        (episode([0.0], [0], [0.0, 0.0]), "penalties"),
        (episode([0.0], [0], values=[]), "values"),
    ],
)
def test_invalid_episode_is_refused_by_its_field(wrong: RewardedEpisode, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        group_estimates([wrong], PPO)
