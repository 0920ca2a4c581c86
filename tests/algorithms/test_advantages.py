"""Advantages by hand and against the formula written out in Python's own statistics."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.advantages import batch_normalized, centred, group_normalized


def test_hand_computed_group() -> None:
    # mean 0.25, squared deviations 3 * 0.0625 + 0.5625 = 0.75, sample variance 0.75 / 3 = 0.25, std 0.5.
    np.testing.assert_allclose(
        group_normalized([1.0, 0.0, 0.0, 0.0]), np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6)
    )


def test_a_small_number_is_added_to_the_deviation() -> None:
    np.testing.assert_allclose(
        group_normalized([2.0, 0.0]), [1 / (math.sqrt(2) + 1e-6), -1 / (math.sqrt(2) + 1e-6)], rtol=1e-12
    )


def test_centred_only() -> None:
    np.testing.assert_allclose(centred([1.0, 0.0, 0.2]), [0.6, -0.4, -0.2])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exact_zeros(reward: float, size: int) -> None:
    # 0.1 three times has a mean that differs from 0.1 in the last bit: no eps may magnify that.
    assert group_normalized([reward] * size).tolist() == [0.0] * size
    assert centred([reward] * size).tolist() == [0.0] * size


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_normalized([0.0, float("nan")])


def test_hand_computed_batch() -> None:
    # Centred: 1/2, -1/2 | 0, 0. Squares sum to 1/2, over 4 - 1: std sqrt(1/6).
    found = batch_normalized([centred([1.0, 0.0]), centred([1.0, 1.0])])
    np.testing.assert_allclose(np.concatenate(found), [math.sqrt(1.5), -math.sqrt(1.5), 0, 0], rtol=1e-5)
    assert [len(group) for group in found] == [2, 2]


def test_a_batch_without_any_spread_within_groups_gives_exact_zeros() -> None:
    found = batch_normalized([centred([0.1] * 3), centred([0.7] * 3), centred([1.0])])
    assert [group.tolist() for group in found] == [[0.0] * 3, [0.0] * 3, [0.0]]
    assert batch_normalized([]) == []
    assert batch_normalized([centred([1.0])])[0].tolist() == [0.0]


# Hundredths, so that no spread is so small that rounding is all there is of it.
rewards = st.integers(0, 100).map(lambda value: value / 100)


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=1, max_size=6))
def test_any_batch_equals_the_formula(batch: list[list[float]]) -> None:
    flat = [reward - fmean(group) for group in batch for reward in group]
    spread = stdev(flat) if len(flat) > 1 else 0.0
    found = batch_normalized([centred(group) for group in batch])
    assert [len(group) for group in found] == [len(group) for group in batch]
    np.testing.assert_allclose(
        np.concatenate(found), [value / (spread + 1e-6) for value in flat], rtol=1e-9, atol=1e-9
    )
