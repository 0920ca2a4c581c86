"""Figures of numbers that are not held, against those of all of them."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.report.drift import ERROR, LEAST, QUANTILES, Spread, joined, spread, tally

NUMBERS = st.lists(st.floats(-30.0, 30.0) | st.just(float("nan")) | st.floats(-1e-6, 1e-6), max_size=30)


@given(st.lists(NUMBERS, max_size=5))
def test_a_joined_tally_has_the_figures_of_all_numbers(parts: list[list[float]]) -> None:
    numbers = [value for part in parts for value in part]
    found, exact = joined([tally(part) for part in parts]).spread(), spread(numbers)
    if not exact.count:
        assert found == exact
        return
    *figures, quantiles = astuple(found)
    *expected, of_all = astuple(exact)
    assert figures == pytest.approx(expected, rel=1e-9, abs=1e-9)
    known = np.sort(np.array(numbers)[np.isfinite(numbers)])
    sizes = np.abs(known)
    assert (exact.mean, exact.mean_abs, exact.largest) == pytest.approx((known.mean(), sizes.mean(), sizes.max()))
    assert (exact.rms, exact.exp_mean) == pytest.approx(
        (np.sqrt((known**2).mean()), np.exp(np.clip(known, -20, 20)).mean())
    )
    assert of_all == pytest.approx(np.quantile(known, QUANTILES).tolist())
    for share, quantile, value in zip(QUANTILES, quantiles, of_all, strict=True):
        rank = share * (len(known) - 1)
        largest = max(abs(known[int(np.floor(rank))]), abs(known[int(np.ceil(rank))]))
        assert abs(quantile - value) <= ERROR * largest * 1.001 + LEAST


def test_nothing_has_no_figures() -> None:
    assert tally([]).spread() == joined([]).spread() == Spread(0)


def test_a_tally_of_a_million_numbers_is_small() -> None:
    numbers = np.random.default_rng(0).normal(size=1_000_000)
    found = tally(numbers)
    assert len(found.bins) < 3000
    assert found.spread().quantiles == pytest.approx(np.quantile(numbers, QUANTILES).tolist(), rel=ERROR, abs=1e-3)
