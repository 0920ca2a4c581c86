"""Intervals against SciPy, by exhaustive resampling and by the coverage that they promise; pass@k by drawing every subset."""

from __future__ import annotations

from itertools import combinations, product
from math import comb
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rlsys.orchestrator.evaluation.scores import bootstrap, estimate, mean_of, pass_at, wilson


@pytest.mark.parametrize(("right", "asked"), [(0, 1), (1, 1), (0, 20), (3, 20), (20, 20), (57, 125), (1611, 3610)])
def test_wilson_is_scipys(right: int, asked: int) -> None:
    expected = stats.binomtest(right, asked).proportion_ci(method="wilson")
    got = wilson(right, asked)
    assert (got.mean, got.low, got.high) == pytest.approx((right / asked, expected.low, expected.high), abs=1e-12)


def test_bootstrap_is_near_scipys_and_repeats() -> None:
    values = np.random.default_rng(3).beta(0.5, 0.7, size=300).tolist()
    expected = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=2000, rng=np.random.default_rng(1)
    ).confidence_interval
    got = bootstrap(values)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=0.006)
    assert bootstrap(values) == got


@settings(max_examples=50)
@given(st.lists(st.sampled_from([0.0, 1.0, 0.5, 1 / 3]), min_size=1, max_size=12))
def test_an_interval_holds_its_mean(values: list[float]) -> None:
    got = estimate(values)
    assert 0 <= got.low <= got.mean <= got.high <= 1
    assert got.mean == pytest.approx(fmean(values))


def test_the_mean_of_two_sets_covers_what_it_promises() -> None:
    """The exact coverage, over all outcomes of two sets of different sizes."""
    sizes = (15, 40)
    known = [[wilson(right, size) for right in range(size + 1)] for size in sizes]
    covered = []
    for shares in ((0.1, 0.5), (0.3, 0.3), (0.05, 0.9), (0.6, 0.4)):
        weights = [stats.binom.pmf(range(size + 1), size, p) for size, p in zip(sizes, shares, strict=True)]
        truth, total = fmean(shares), 0.0
        for a, b in product(range(sizes[0] + 1), range(sizes[1] + 1)):
            one = mean_of([known[0][a], known[1][b]])
            total += weights[0][a] * weights[1][b] * (one.low <= truth <= one.high)
        covered.append(total)
    assert all(0.93 < one < 0.98 for one in covered), covered


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for samples in range(1, 6):
        for right in range(samples + 1):
            answers = [True] * right + [False] * (samples - right)
            for k in range(1, samples + 1):
                hits = sum(any(drawn) for drawn in combinations(answers, k))
                assert pass_at(k, samples, right) == pytest.approx(hits / comb(samples, k))
