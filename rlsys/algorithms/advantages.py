"""Advantages of one group: how much better an episode did than its siblings of the same question.

Pure numpy. A group is scored alone, so its advantages are known the moment its last episode is in;
they do not depend on which other groups share the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def group_normalized(rewards: Sequence[float], normalize_std: bool, eps: float = 1e-6) -> NDArray[np.float64]:
    """[group] rewards -> [group] advantages, (r - mean) / (std + eps) with the sample standard deviation.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300), outcome supervision. Without `normalize_std` only the
    mean is taken off, as in Dr. GRPO (arXiv 2503.20783). A group whose rewards are all equal, a group
    of one among them, carries no signal and gets exact zeros.

    Raises ValueError if a reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"A group's rewards must be finite, got {list(rewards)}; check the reward function.")
    # Compared exactly: the mean of equal floats may be off by one rounding, and eps would magnify that.
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred / (values.std(ddof=1) + eps) if normalize_std else centred
