"""Centring, leaving one out, spread and whitening against Python's own statistics."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.advantages import centred, spread, spreads, whitened

# Hundredths, so that no spread is so small that rounding is all there is of it.
hundredths = st.integers(-100, 100).map(lambda value: value / 100)
members = st.lists(st.tuples(hundredths, st.integers(0, 3)), max_size=10)


def split(pairs: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([value for value, _ in pairs]), np.array([peer for _, peer in pairs], dtype=np.int64)


@given(pairs=members)
def test_peers_alone_are_compared(pairs: list[tuple[float, int]]) -> None:
    values, numbers = split(pairs)
    means, others, spreads_by_hand = [], [], []
    for place, (value, number) in enumerate(pairs):
        alike = [other for other, its in pairs if its == number]
        rest = [other for at, (other, its) in enumerate(pairs) if its == number and at != place]
        means.append(value - fmean(alike))
        others.append(value - fmean(rest) if rest else 0.0)
        spreads_by_hand.append(stdev(alike) + 1e-6 if len(set(alike)) > 1 else 1.0)
    np.testing.assert_allclose(centred(values, numbers), means, atol=1e-12)
    np.testing.assert_allclose(centred(values, numbers, leave_one_out=True), others, atol=1e-12)
    np.testing.assert_allclose(spreads(values, numbers), spreads_by_hand, rtol=1e-9)


@given(values=st.lists(hundredths, max_size=10))
def test_whitened_values_are_over_their_own_deviation(values: list[float]) -> None:
    deviation = stdev(values) if len(values) > 1 else 0.0
    expected = [(value - fmean(values)) / (deviation + 1e-6) for value in values]
    np.testing.assert_allclose(whitened(np.array(values)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e6 - 0.1, 1e-300])
def test_equal_values_have_exact_zeros_and_are_not_divided(value: float, size: int) -> None:
    # 0.1 three times has a mean that differs from 0.1 in the last bit: no eps may magnify that.
    values, peers = np.full(size, value), np.zeros(size, dtype=np.int64)
    assert centred(values, peers).tolist() == [0.0] * size
    assert centred(values, peers, leave_one_out=True).tolist() == [0.0] * size
    assert whitened(values).tolist() == [0.0] * size
    assert spread(values) == 1.0


def test_rounding_is_no_difference() -> None:
    values = np.array([0.1 + 0.2, 0.3])
    assert values[0] != values[1]
    assert spread(values) == 1.0
    assert whitened(values).tolist() == [0.0, 0.0]


def test_small_differences_are_differences() -> None:
    values = np.array([1.0, 1.0 + 1e-9])
    assert whitened(values)[1] == pytest.approx(5e-10 / (1e-9 / math.sqrt(2) + 1e-6))
