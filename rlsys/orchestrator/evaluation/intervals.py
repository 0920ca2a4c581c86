"""How sure a mean over questions is: 95 % confidence intervals, and the estimator of pass@k. Pure.

Shares have Wilson's interval (J. Am. Stat. Assoc. 22, 1927), which keeps its level for few questions and for shares
near 0 or 1, and so have values that are all the same, of which no sample tells how they vary. Other means have the
percentile bootstrap over questions (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13), with a
fixed seed, so that the same answers give the same figures. The mean over sets has the interval that follows from theirs
by the method of variance estimates recovery (Zou and Donner, Stat. Med. 27, 2008; for independent estimates with
intervals of their own, whatever these are).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
_SEED = 20250921
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval; low <= mean <= high."""

    mean: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of `values`, one a question and each within [0, 1]; there must be one at least."""
    if all(value in (0.0, 1.0) for value in values) or len(set(values)) == 1:
        return wilson(sum(values), len(values))
    return bootstrap(values)


def wilson(right: float, asked: int) -> Estimate:
    """The share `right / asked`: centre (p + z^2 / 2n) / (1 + z^2 / n), half width z sqrt(p(1-p)/n + z^2 / 4n^2) / (1 + z^2/n).

    `right` need not be whole: no mean of values within [0, 1] varies more than a share of the same size.
    """
    share, spread = right / asked, _Z**2 / asked
    centre = (share + spread / 2) / (1 + spread)
    half = _Z * sqrt(share * (1 - share) / asked + spread / (4 * asked)) / (1 + spread)
    # At the ends the formula gives exactly 0 and 1, rounding aside.
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def bootstrap(values: Sequence[float]) -> Estimate:
    """The mean of `values`, and the quantiles of the means of `RESAMPLES` samples drawn from them."""
    known = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(_SEED)
    means = [known[draws.integers(len(known), size=len(known))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mean = fmean(values)
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates, all weighing the same."""
    count, mean = len(estimates), fmean(one.mean for one in estimates)
    below = sqrt(sum((one.mean - one.low) ** 2 for one in estimates)) / count
    above = sqrt(sum((one.high - one.mean) ** 2 for one in estimates)) / count
    return Estimate(mean, mean - below, mean + above)


def pass_at(k: int, samples: int, right: int) -> float:
    """Chance that one of `k` answers is right, drawn without replacement from `samples` of which `right` are.

    1 - C(n - c, k) / C(n, k), unbiased for answers drawn independently (arXiv 2107.03374, equation 1).
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)
