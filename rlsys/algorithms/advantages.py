"""Advantages: how much better an episode did than its siblings of the same question.

Pure numpy. A group is centred alone, so that much is known the moment its last episode is in. What it is
divided by may be its own spread, that of the mini-batch, or nothing. Rewards that do not differ carry no
signal: their advantages are exact zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EPS = 1e-6
"""Added to a standard deviation before dividing by it."""


def centred(rewards: Sequence[float]) -> Floats:
    """[group] rewards -> [group] r - mean, as in Dr. GRPO (arXiv 2503.20783).

    Raises ValueError if a reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"A group's rewards must be finite, got {list(rewards)}; check the reward function.")
    # Compared exactly: the mean of equal floats may be off by one rounding, and EPS would magnify that.
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    deviations: Floats = values - values.mean()
    return deviations


def group_normalized(rewards: Sequence[float]) -> Floats:
    """[group] rewards -> [group] (r - mean) / (std + EPS) with the group's sample standard deviation.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300), outcome supervision. Raises as `centred`.
    """
    return _divided(centred(rewards))


def batch_normalized(groups: Sequence[Floats]) -> list[Floats]:
    """Centred rewards of each group of a mini-batch, divided by (std + EPS) over all of them.

    The standard deviation is the sample one, of the centred rewards: the spread among siblings, not that
    between easy and hard questions. Sources: Lite PPO (arXiv 2508.08221), group mean and batch deviation,
    whose authors' code takes it of the rewards as they are; REINFORCE++ with baseline (arXiv 2501.03262)
    takes it, as here, of the centred ones.
    """
    if not groups:
        return []
    ends = np.cumsum([len(group) for group in groups])
    return np.split(_divided(np.concatenate(groups)), ends[:-1])


def _divided(values: Floats) -> Floats:
    """`values`, centred, over their own spread. All zeros stay so: also one value alone, without a spread."""
    return values / (values.std(ddof=1) + EPS) if values.any() else values
