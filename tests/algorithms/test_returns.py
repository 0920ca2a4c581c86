"""Rewards on tokens, returns to go and GAE against the definitions written out token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.advantages import generalised_advantages, placed, to_go

numbers = st.floats(-1e3, 1e3)
shares = st.sampled_from([0.0, 0.5, 0.95, 1.0]) | st.floats(0, 1)


def turns_of(*turns: int) -> np.ndarray:
    return np.array(turns, dtype=np.int64)


@pytest.mark.parametrize(
    ("rewards", "turns", "expected"),
    [
        ([1.0, 2.0, 4.0], [0, 0, 1, 2, 2], [0, 1, 2, 0, 4]),
        ([1.0, 2.0, 4.0], [0, 0, 2], [0, 3, 4]),
        ([1.0, 2.0, 4.0], [1, 1, 2], [1, 2, 4]),
        ([1.0, 2.0, 4.0], [2, 2], [3, 4]),
        ([1.0, 2.0, 4.0], [0, 0], [0, 7]),
        ([1.0, 2.0, 4.0], [1], [7]),
        ([1.0, 2.0, 4.0], [], []),
        ([], [], []),
    ],
    ids=[
        "each on the last token of its turn",
        "an untrained turn hands it to the token before",
        "with none before, to the first after",
        "two turns before the first trained one",
        "turns that were cut away",
        "one token takes all",
        "nobody to take it",
        "no turns",
    ],
)
def test_where_rewards_stand(rewards: list[float], turns: list[int], expected: list[float]) -> None:
    assert placed(rewards, turns_of(*turns)).tolist() == expected


@given(
    rewards=st.lists(st.integers(-9, 9), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 3), max_size=6),
)
def test_no_reward_is_lost_and_each_stands_where_a_search_finds_it(rewards: list[int], lengths: list[int]) -> None:
    turns = [turn for turn, length in enumerate(lengths[: len(rewards)]) for _ in range(length)]
    expected = [0.0] * len(turns)
    for turn, reward in enumerate(rewards):
        earlier = [token for token, own in enumerate(turns) if own <= turn]
        later = [token for token, own in enumerate(turns) if own > turn]
        if earlier or later:
            expected[earlier[-1] if earlier else later[0]] += reward
    found = placed(rewards, turns_of(*turns)).tolist()
    assert found == expected
    assert not turns or sum(found) == sum(rewards)


@given(rewards=st.lists(numbers, max_size=8), discount=shares)
def test_a_return_is_the_discounted_sum_of_what_follows(rewards: list[float], discount: float) -> None:
    expected = [
        math.fsum(discount ** (later - now) * rewards[later] for later in range(now, len(rewards)))
        for now in range(len(rewards))
    ]
    np.testing.assert_allclose(to_go(np.array(rewards), discount), expected, rtol=1e-12, atol=1e-9)


def test_gae_by_hand() -> None:
    # d2 = 1 - 0.4; d1 = 0.5 * 0.4 - 0.2; d0 = 0.5 * 0.2 - 0.1, all over with gamma lambda = 0.25.
    found = generalised_advantages(np.array([0.0, 0.0, 1.0]), np.array([0.1, 0.2, 0.4]), 0.5, 0.5)
    np.testing.assert_allclose(found, [0.0 + 0.25 * 0.15, 0.0 + 0.25 * 0.6, 0.6], atol=1e-15)


@settings(max_examples=200)
@given(
    steps=st.lists(st.tuples(numbers, numbers), max_size=8),
    gamma=shares,
    gae_lambda=shares,
)
def test_gae_is_the_weighted_sum_of_the_errors_to_come(
    steps: list[tuple[float, float]], gamma: float, gae_lambda: float
) -> None:
    rewards, values = [reward for reward, _ in steps], [value for _, value in steps]
    after = [*values, 0.0]
    errors = [rewards[t] + gamma * after[t + 1] - values[t] for t in range(len(steps))]
    expected = [
        math.fsum((gamma * gae_lambda) ** (s - t) * errors[s] for s in range(t, len(steps))) for t in range(len(steps))
    ]
    found = generalised_advantages(np.array(rewards), np.array(values), gamma, gae_lambda)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@given(steps=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), gamma=shares)
def test_limits_of_gae(steps: list[tuple[float, float]], gamma: float) -> None:
    rewards, values = np.array(steps).T
    # Lambda 1 telescopes to the return less the value, lambda 0 keeps the next error alone, gamma 0 the next reward.
    np.testing.assert_allclose(
        generalised_advantages(rewards, values, gamma, 1.0), to_go(rewards, gamma) - values, atol=1e-8
    )
    one_step = [
        reward + gamma * (values[at + 1] if at + 1 < len(values) else 0.0) - values[at]
        for at, reward in enumerate(rewards)
    ]
    np.testing.assert_allclose(generalised_advantages(rewards, values, gamma, 0.0), one_step, atol=1e-9)
    np.testing.assert_allclose(generalised_advantages(rewards, values, 0.0, 1.0), rewards - values, atol=1e-9)
