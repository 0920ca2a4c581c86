"""Scores of an answer (exact match, F1, cover exact match), and how sure a mean of them is: 95 % confidence intervals. Pure.

The scores compare after SQuAD's normalisation (`rlsys.data.answers.normalize`) and take the best accepted answer.
Invariant: each is within [0, 1], an exact match has 1 by all of them, and no answer has 0.

Shares have Wilson's interval (J. Am. Stat. Assoc. 22, 1927), which keeps its level for few questions and for shares
near 0 or 1, and so have values that are all the same, of which no sample tells how they vary. Other means have the
percentile bootstrap over questions (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13), with a
fixed seed, so that the same answers give the same estimates. The mean over sets has the interval that follows from theirs
by the method of variance estimates recovery (Zou and Donner, Stat. Med. 27, 2008; for independent estimates with
intervals of their own, whatever these are).
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
    """Scores of one answer; those of no answer by default."""

    em: float = 0.0
    """1 where it equals an accepted answer."""
    f1: float = 0.0
    sub_em: float = 0.0
    """1 where it contains an accepted answer."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval; low <= mean <= high."""

    mean: float
    low: float
    high: float


def scores_of(answer: str | None, accepted: Sequence[str]) -> AnswerScores:
    """The scores of `answer`, None for none, against the `accepted` ones.

    F1 of words as HotpotQA's script has it, and FlashRAG after it: SQuAD's (1606.05250), but an answer of yes or no
    shares nothing with any other, so that "no" earns nothing from "no one".
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
    """The mean of `values`, and the quantiles of the means of 2000 samples drawn from them."""
    known = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(_SEED)
    means = [known[draws.integers(len(known), size=len(known))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mean = fmean(values)
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates, all weighing the same."""
    count, mean = len(estimates), fmean(part.mean for part in estimates)
    below = sqrt(sum((part.mean - part.low) ** 2 for part in estimates)) / count
    above = sqrt(sum((part.high - part.mean) ** 2 for part in estimates)) / count
    return Estimate(mean, mean - below, mean + above)


def pass_at(k: int, samples: int, right: int) -> float:
    """Chance that one of `k` answers is right, drawn without replacement from `samples` of which `right` are.

    1 - C(n - c, k) / C(n, k), unbiased for answers drawn independently (arXiv 2107.03374, equation 1).
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)
