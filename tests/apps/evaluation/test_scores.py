"""Tests of scores, intervals and pass@k: by hand and against SciPy."""

from itertools import combinations, product
from math import comb
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from rlsys.orchestrator.evaluation.scores import bootstrap, mean_of, pass_at, scores_of, wilson


@pytest.mark.parametrize(
    ("answer", "accepted", "em", "f1", "sub_em"),
    [
        ("Nile", ["the River Nile", "Amazon"], 0, 2 / 3, 0),
        ("no", ["no one"], 0, 0, 0),
        ("yes it is", ["yes", "it is"], 0, 0.8, 1),
        (None, ["", "the"], 0, 0, 0),
    ],
)
def test_scores_by_hand(answer: str | None, accepted: list[str], em: float, f1: float, sub_em: float) -> None:
    got = scores_of(answer, accepted)
    assert (got.em, got.f1, got.sub_em) == pytest.approx((em, f1, sub_em))


@pytest.mark.parametrize(("right", "asked"), [(0, 1), (1, 1), (0, 20), (3, 20), (1611, 3610)])
def test_wilson_equals_scipy(right: int, asked: int) -> None:
    expected = stats.binomtest(right, asked).proportion_ci(method="wilson")
    got = wilson(right, asked)
    assert (got.mean, got.low, got.high) == pytest.approx((right / asked, expected.low, expected.high), abs=1e-12)


def test_bootstrap_is_close_to_scipy_and_deterministic() -> None:
    values = np.random.default_rng(3).beta(0.5, 0.7, size=300).tolist()
    expected = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=2000, rng=np.random.default_rng(1)
    ).confidence_interval
    got = bootstrap(values)
    assert got.mean == pytest.approx(fmean(values))
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=0.006)
    assert bootstrap(values) == got


def test_the_interval_of_a_mean_of_two_sets_covers_95_percent() -> None:
    """Sums the coverage over all outcomes of two sets of different sizes."""
    sizes = (15, 40)
    known = [[wilson(right, size) for right in range(size + 1)] for size in sizes]
    for shares in ((0.1, 0.5), (0.3, 0.3), (0.05, 0.9)):
        weights = [stats.binom.pmf(range(size + 1), size, p) for size, p in zip(sizes, shares, strict=True)]
        covered = 0.0
        for a, b in product(range(sizes[0] + 1), range(sizes[1] + 1)):
            one = mean_of([known[0][a], known[1][b]])
            covered += weights[0][a] * weights[1][b] * (one.low <= fmean(shares) <= one.high)
        assert 0.93 < covered < 0.98, shares


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer() -> None:
    for samples in range(1, 6):
        for right, k in product(range(samples + 1), range(1, samples + 1)):
            drawn = list(combinations([True] * right + [False] * (samples - right), k))
            assert pass_at(k, samples, right) == pytest.approx(sum(map(any, drawn)) / comb(samples, k))
