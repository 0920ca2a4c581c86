"""Which advantages leave the policy gradient unbiased: expectations by enumeration of a world of two choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from rlsys.algorithms.advantages import RewardedEpisode, batch_advantages, group_estimates
from rlsys.config.algorithm import AlgorithmConfig
from tests.algorithms.exact import setting

SAMPLES = 3
PATHS = list(product((0, 1), repeat=2))
"""A first choice, and a second one that depends on it; each is one turn of one token."""
LOGITS = np.array([0.3, -0.7, 1.1])
"""Of choosing 1: at first, and after 0 and after 1."""
REWARDS = {(0, 0): (0.5, 1.0), (0, 1): (0.5, -2.0), (1, 0): (-1.0, 3.0), (1, 1): (-1.0, 0.25)}
Values = Callable[[Sequence[int]], float]


def chances(logits: np.ndarray, path: Sequence[int]) -> list[float]:
    """Probability of each choice on the path."""
    of_one = 1 / (1 + np.exp(-logits[[0, 1 + path[0]]]))
    return [float(p if choice else 1 - p) for p, choice in zip(of_one, path, strict=True)]


def expected_return(logits: np.ndarray) -> float:
    return sum(float(np.prod(chances(logits, path))) * sum(REWARDS[path]) for path in PATHS)


def true_gradient() -> np.ndarray:
    steps = np.eye(3) * 1e-5
    return np.array([(expected_return(LOGITS + one) - expected_return(LOGITS - one)) / 2e-5 for one in steps])


def score_gradients(path: Sequence[int]) -> np.ndarray:
    """[choice, logit] d log pi(choice) / d logit."""
    gradients = np.zeros((2, 3))
    for at, (logit, choice) in enumerate(zip((0, 1 + path[0]), path, strict=True)):
        gradients[at, logit] = choice - 1 / (1 + np.exp(-LOGITS[logit]))
    return gradients


def expected_gradient(config: AlgorithmConfig, values: Values = lambda _: 0.0) -> np.ndarray:
    """The mean over every group that may be drawn, of the group's mean of sum_t A_t grad log pi_t."""
    total = np.zeros(3)
    for paths in product(PATHS, repeat=SAMPLES):
        group = [
            RewardedEpisode(REWARDS[path], np.array([0, 1]), None, np.array([values(()), values(path[:1])]))
            for path in paths
        ]
        [advantages] = batch_advantages([[one.units for one in group_estimates(group, config)]], config)
        chance = np.prod([chances(LOGITS, path) for path in paths])
        for path, own in zip(paths, advantages, strict=True):
            total += chance * own @ score_gradients(path) / SAMPLES
    return total


def true_value(known: Sequence[int]) -> float:
    """Expected rewards to come after the choices made; the first turn's reward is paid with its token."""
    reach = [path for path in PATHS if path[: len(known)] == tuple(known)]
    weights = [np.prod(chances(LOGITS, path)[len(known) :]) for path in reach]
    return float(sum(w * sum(REWARDS[path][len(known) :]) for w, path in zip(weights, reach, strict=True)))


def wrong_value(known: Sequence[int]) -> float:
    return 5.0 - 3.0 * sum(known) - len(known)


@pytest.mark.parametrize(
    ("credit", "baseline"),
    [
        ("trajectory", "none"),
        ("trajectory", "leave_one_out"),
        ("turn", "none"),
        ("turn", "leave_one_out"),
        ("token", "none"),
    ],
)
def test_unbiased(credit: str, baseline: str) -> None:
    found = expected_gradient(setting(credit, baseline, "none"))
    np.testing.assert_allclose(found, true_gradient(), atol=1e-8)


@pytest.mark.parametrize("baseline", ["group", "batch"])
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_a_mean_that_holds_the_episode_itself_only_shrinks_the_gradient(credit: str, baseline: str) -> None:
    found = expected_gradient(setting(credit, baseline, "none"))
    np.testing.assert_allclose(found, true_gradient() * (SAMPLES - 1) / SAMPLES, atol=1e-8)


@pytest.mark.parametrize(("values", "gae_lambda"), [(wrong_value, 1.0), (true_value, 0.0), (true_value, 0.7)])
def test_a_critic_is_unbiased_if_it_is_right_or_not_bootstrapped_from(values: Values, gae_lambda: float) -> None:
    config = replace(setting("token", "critic", "none"), gae_lambda=gae_lambda)
    np.testing.assert_allclose(expected_gradient(config, values), true_gradient(), atol=1e-8)


def test_the_enumeration_can_tell_a_bias() -> None:
    config = replace(setting("token", "critic", "none"), gae_lambda=0.0)
    assert np.abs(expected_gradient(config, wrong_value) - true_gradient()).max() > 0.1
    assert np.abs(expected_gradient(setting("trajectory", "group", "group")) - true_gradient()).max() > 0.1
