"""Returns compared with those of their peers: centring, leaving one out, spread, whitening.

Pure numpy in float64. Invariants: values that do not differ by more than rounding have deviations of exactly zero,
and so has one alone; where nothing differs, nothing is divided, so that rounding is never magnified. Every standard
deviation is the sample one, with n - 1.
"""

from __future__ import annotations

import numpy as np

from rlsys.algorithms.returns import Floats, Ints

EPS = 1e-6
"""Added to a standard deviation before dividing by it."""
ROUNDING = 1e-12
"""What sums of the same rewards may differ by, in units of the largest: the mean of equal floats is off by less."""


def centred(values: Floats, peers: Ints, *, leave_one_out: bool = False) -> Floats:
    """[n] values -> [n] value - mean, where only those with the same number in `peers` [n] are compared.

    With `leave_one_out` the mean is that of the others (RLOO, arXiv 2402.14740):
    x - mean(others) = (x - mean(all)) n / (n - 1).
    """
    deviations = np.zeros_like(values)
    for peer in np.unique(peers):
        among = peers == peer
        deviations[among] = _deviations(values[among])
        count = int(among.sum())
        if leave_one_out and count > 1:
            deviations[among] *= count / (count - 1)
    return deviations


def spreads(values: Floats, peers: Ints) -> Floats:
    """[n] `spread` of those that share a number in `peers` [n]."""
    found = np.ones_like(values)
    for peer in np.unique(peers):
        among = peers == peer
        found[among] = spread(values[among])
    return found


def spread(values: Floats) -> float:
    """Sample standard deviation of `values` + EPS; 1 where they do not differ."""
    return float(values.std(ddof=1)) + EPS if _differ(values) else 1.0


def whitened(values: Floats) -> Floats:
    """[n] (x - mean) / (std + EPS) over all of `values`; zeros where they do not differ.

    As in REINFORCE++ (arXiv 2501.03262) and codes of PPO, which vary in trifles: veRL and TRL, which Search-R1
    follows, take the sample standard deviation as here, OpenRLHF the population's; all bound the variance by 1e-8.
    """
    return _deviations(values) / spread(values)


def _deviations(values: Floats) -> Floats:
    return values - values.mean() if _differ(values) else np.zeros_like(values)


def _differ(values: Floats) -> bool:
    return bool(values.size) and bool(np.ptp(values) > ROUNDING * np.abs(values).max())
