"""How numbers are spread: the few figures by which differences of log-probs are told.

A `Tally` has the same figures of numbers that are not held: tallies of parts are joined to that of the whole. Its
quantiles are of a histogram with edges in a geometric series (as DDSketch, Masson et al. 2019), all else is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlsys.algorithms.corrections import LOG_RATIO_LIMIT

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
ERROR = 0.01
"""Of a tally's quantiles: each number that they are interpolated between is off by at most this share of itself."""
LEAST = 1e-7
"""Smaller magnitudes count as 0 in them."""
_RATIO = (1 + ERROR) / (1 - ERROR)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of differences of natural log-probs, in nats. All figures but `count` are None where there are none."""

    count: int
    mean: float | None = None
    mean_abs: float | None = None
    rms: float | None = None
    exp_mean: float | None = None
    """Mean of exp(difference), the ratio that it stands for; differences are clamped to +-20 for it."""
    largest: float | None = None
    """Of |difference|."""
    quantiles: tuple[float, ...] | None = None
    """At `QUANTILES`, interpolated linearly."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Numbers added up. `bins` [k] are in order, and `counts` [k] of them."""

    count: int
    total: float
    total_abs: float
    total_square: float
    total_exp: float
    lowest: float
    highest: float
    bins: NDArray[np.int32]
    """Sign times 1 + n for magnitudes in (LEAST * _RATIO**(n - 1), LEAST * _RATIO**n]; 0 below `LEAST`."""
    counts: NDArray[np.int64]

    def spread(self) -> Spread:
        """The figures."""
        if not self.count:
            return Spread(0)
        return Spread(
            count=self.count,
            mean=self.total / self.count,
            mean_abs=self.total_abs / self.count,
            rms=math.sqrt(self.total_square / self.count),
            exp_mean=self.total_exp / self.count,
            largest=max(abs(self.lowest), abs(self.highest)),
            quantiles=self._quantiles(),
        )

    def _quantiles(self) -> tuple[float, ...]:
        magnitudes = LEAST * 2 * _RATIO ** (np.abs(self.bins) - 1.0) / (_RATIO + 1)
        values = np.clip(np.sign(self.bins) * magnitudes, self.lowest, self.highest)
        reached = np.cumsum(self.counts)
        ranks = np.array(QUANTILES) * (self.count - 1)
        low, high = (values[np.searchsorted(reached, end(ranks), "right")] for end in (np.floor, np.ceil))
        return tuple((low + (high - low) * (ranks % 1)).tolist())


def spread(values: ArrayLike) -> Spread:
    """The spread of `values` [n]; those that are not finite do not count."""
    found = _finite(values)
    if not found.size:
        return Spread(0)
    magnitudes = np.abs(found)
    return Spread(
        count=found.size,
        mean=float(found.mean()),
        mean_abs=float(magnitudes.mean()),
        rms=float(np.sqrt(np.mean(found**2))),
        exp_mean=float(_ratios(found).mean()),
        largest=float(magnitudes.max()),
        quantiles=tuple(float(one) for one in np.quantile(found, QUANTILES)),
    )


def tally(values: ArrayLike) -> Tally:
    """The tally of `values` [n]; those that are not finite do not count."""
    found = _finite(values)
    magnitudes = np.abs(found)
    places = np.ceil(np.log(np.maximum(magnitudes, LEAST) / LEAST) / math.log(_RATIO)) + 1
    signed = np.where(magnitudes < LEAST, 0, np.sign(found) * places).astype(np.int32)
    bins, counts = np.unique(signed, return_counts=True)
    return Tally(
        count=found.size,
        total=float(found.sum()),
        total_abs=float(magnitudes.sum()),
        total_square=float((found**2).sum()),
        total_exp=float(_ratios(found).sum()),
        lowest=float(found.min(initial=math.inf)),
        highest=float(found.max(initial=-math.inf)),
        bins=bins,
        counts=counts,
    )


def joined(parts: Sequence[Tally]) -> Tally:
    """The tally of the numbers of all `parts`."""
    if not parts:
        return tally([])
    bins, places = np.unique(np.concatenate([one.bins for one in parts]), return_inverse=True)
    counts = np.zeros(len(bins), np.int64)
    np.add.at(counts, places, np.concatenate([one.counts for one in parts]))
    return Tally(
        count=sum(one.count for one in parts),
        total=sum(one.total for one in parts),
        total_abs=sum(one.total_abs for one in parts),
        total_square=sum(one.total_square for one in parts),
        total_exp=sum(one.total_exp for one in parts),
        lowest=min(one.lowest for one in parts),
        highest=max(one.highest for one in parts),
        bins=bins,
        counts=counts,
    )


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    given = np.asarray(values, np.float64)
    return given[np.isfinite(given)]


def _ratios(differences: NDArray[np.float64]) -> NDArray[Any]:
    return np.exp(np.clip(differences, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
