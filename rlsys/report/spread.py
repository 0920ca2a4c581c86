"""The few figures by which differences of log-probs are told, of numbers that are held or of tallies of them.

A `Tally` has the same figures of numbers that are not held: tallies of parts are joined to that of the whole. Its
quantiles are of a histogram with edges in a geometric series (as DDSketch, Masson et al. 2019), all else is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlsys.algorithms.corrections import LOG_RATIO_LIMIT

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
ERROR = 0.01
"""Of a tally's quantiles: each number that they are interpolated between is off by at most this share of itself."""
LEAST = 1e-7  # Smaller magnitudes count as 0 in them
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
    largest: float | None = None  # Of |difference|
    quantiles: tuple[float, ...] | None = None  # At `QUANTILES`, interpolated linearly


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
    """The spread of `values` [n], with exact quantiles; those that are not finite do not count."""
    finite = _finite(values)
    figures = tally(finite).spread()
    return replace(figures, quantiles=tuple(np.quantile(finite, QUANTILES).tolist())) if finite.size else figures


def tally(values: ArrayLike) -> Tally:
    """The tally of `values` [n]; those that are not finite do not count."""
    finite = _finite(values)
    magnitudes = np.abs(finite)
    places = np.ceil(np.log(np.maximum(magnitudes, LEAST) / LEAST) / math.log(_RATIO)) + 1
    signed = np.where(magnitudes < LEAST, 0, np.sign(finite) * places).astype(np.int32)
    bins, counts = np.unique(signed, return_counts=True)
    return Tally(
        count=finite.size,
        total=float(finite.sum()),
        total_abs=float(magnitudes.sum()),
        total_square=float((finite**2).sum()),
        total_exp=float(np.exp(np.clip(finite, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).sum()),
        lowest=float(finite.min(initial=math.inf)),
        highest=float(finite.max(initial=-math.inf)),
        bins=bins,
        counts=counts,
    )


def joined(parts: Sequence[Tally]) -> Tally:
    """The tally of the numbers of all `parts`."""
    if not parts:
        return tally([])
    bins, places = np.unique(np.concatenate([part.bins for part in parts]), return_inverse=True)
    counts = np.zeros(len(bins), np.int64)
    np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
    names = ("count", "total", "total_abs", "total_square", "total_exp")
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    lowest, highest = min(part.lowest for part in parts), max(part.highest for part in parts)
    return Tally(**sums, lowest=lowest, highest=highest, bins=bins, counts=counts)


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    given = np.asarray(values, np.float64)
    return given[np.isfinite(given)]
