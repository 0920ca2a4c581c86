"""Scores answers (exact match, F1, cover exact match) and computes 95 % confidence intervals of mean scores. Pure.

Scores compare normalised text (SQuAD; `rlsys.data.answers.normalize`) and use the best accepted answer. Invariant: each
score is within [0, 1]; an exact match scores 1 on all three, and a missing answer 0.

Intervals:
- Shares: Wilson's interval (J. Am. Stat. Assoc. 22, 1927), which keeps its confidence level for few questions and for
  shares near 0 or 1. Equal values use it too, because their bootstrap means have no spread.
- Other means: percentile bootstrap over questions (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
  chapter 13), with a fixed seed so that equal answers give equal estimates.
- Mean over data sets: the method of variance estimates recovery (Zou and Donner, Stat. Med. 27, 2008) combines the
  intervals of the data sets. It accepts independent estimates with any kind of interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean

import numpy as np

from rlsys.data.answers import exact_match, f1, normalize, sub_exact_match

LEVEL = 0.95
_RESAMPLES = 2000
_SEED = 20250921
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
_CLOSED = frozenset({"yes", "no", "noanswer"})


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """Scores of one answer; the defaults are the scores of a missing answer."""

    em: float = 0.0
    """1 if the answer equals an accepted answer."""
    f1: float = 0.0
    sub_em: float = 0.0
    """1 if the answer contains an accepted answer."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean with its confidence interval; low <= mean <= high."""

    mean: float
    low: float
    high: float


def scores_of(answer: str | None, accepted: Sequence[str]) -> AnswerScores:
    """Return the scores of `answer` against the `accepted` answers; `answer` is None if it is missing.

    Word F1 follows the script of HotpotQA and FlashRAG: it is the F1 of SQuAD (arXiv 1606.05250), except that yes, no
    and noanswer match only themselves. For example, "no" scores 0 against "no one".
    """
    if answer is None:
        return AnswerScores()
    said = normalize(answer)
    comparable = [gold for gold in accepted if said == (norm := normalize(gold)) or not {said, norm} & _CLOSED]
    return AnswerScores(
        em=float(exact_match(answer, accepted)),
        f1=f1(answer, comparable),
        sub_em=float(sub_exact_match(answer, accepted)),
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of question scores within [0, 1], with its interval. Needs at least one value."""
    if all(value in (0.0, 1.0) for value in values) or len(set(values)) == 1:
        return wilson(sum(values), len(values))
    return bootstrap(values)


def wilson(right: float, asked: int) -> Estimate:
    """Return the share p = `right / asked` with Wilson's interval, where n is `asked`.

        centre      (p + z^2 / 2n) / (1 + z^2 / n)
        half width  z sqrt(p(1-p)/n + z^2 / 4n^2) / (1 + z^2 / n)

    `right` may be fractional: the mean of n values in [0, 1] has at most the
    variance of a proportion with the same mean and n.
    """
    share, spread = right / asked, _Z**2 / asked
    centre = (share + spread / 2) / (1 + spread)
    half = _Z * sqrt(share * (1 - share) / asked + spread / (4 * asked)) / (1 + spread)
    # Clamp rounding errors: at p = 0 and p = 1 the bounds are exactly 0 and 1.
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def bootstrap(values: Sequence[float]) -> Estimate:
    """Return the mean of `values` with the percentile interval of 2000 bootstrap means."""
    known = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(_SEED)
    means = [known[draws.integers(len(known), size=len(known))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mean = fmean(values)
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Return the unweighted mean of independent estimates."""
    count, mean = len(estimates), fmean(part.mean for part in estimates)
    below = sqrt(sum((part.mean - part.low) ** 2 for part in estimates)) / count
    above = sqrt(sum((part.high - part.mean) ** 2 for part in estimates)) / count
    return Estimate(mean, mean - below, mean + above)


def pass_at(k: int, samples: int, right: int) -> float:
    """Return pass@k: the chance of a correct one among `k` answers drawn from `samples`, of which `right` are correct.

    With n = `samples` and c = `right`: 1 - C(n - c, k) / C(n, k), unbiased for independent answers (arXiv 2107.03374,
    equation 1).
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)
