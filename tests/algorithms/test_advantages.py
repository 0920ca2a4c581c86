import math

import numpy as np
import pytest

from rlsys.algorithms.advantages import group_normalized


def test_hand_computed_group() -> None:
    # mean 0.25, squared deviations 3 * 0.0625 + 0.5625 = 0.75, sample variance 0.75 / 3 = 0.25, std 0.5.
    advantages = group_normalized([1.0, 0.0, 0.0, 0.0], normalize_std=True, eps=0.0)
    np.testing.assert_allclose(advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-12)


def test_default_eps_is_added_to_the_deviation() -> None:
    advantages = group_normalized([2.0, 0.0], normalize_std=True)
    np.testing.assert_allclose(
        advantages, [1 / (math.sqrt(2) + 1e-6), -1 / (math.sqrt(2) + 1e-6)], rtol=1e-12
    )


def test_centred_only() -> None:
    np.testing.assert_allclose(group_normalized([1.0, 0.0, 0.2], normalize_std=False), [0.6, -0.4, -0.2])


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exact_zeros(reward: float, size: int, normalize_std: bool) -> None:
    # 0.1 three times has a mean that differs from 0.1 in the last bit: no eps may magnify that.
    assert group_normalized([reward] * size, normalize_std).tolist() == [0.0] * size


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_normalized([0.0, float("nan")], normalize_std=True)
