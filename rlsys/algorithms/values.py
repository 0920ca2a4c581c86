"""The critic's loss as a sum over trained tokens, and how much its values know of the returns.

Contract: as the policy's, the loss is a SUM and its statistics are sums and counts; whoever accumulates
micro-batches divides once, by the number of trained tokens of the whole mini-batch over all ranks.

Invariant: a masked token adds nothing to the loss and gets a gradient of exactly zero, whatever stands in its
value, old value or return, NaN and infinity included. A trained token that is NaN makes the loss NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.algorithms.losses import DIVISOR, TOKENS, Stats


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Squared distance of a value from its return, which an update larger than `clip` cannot lower.

        loss = 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)

    Source: the public code of PPO (arXiv 1707.06347), described in arXiv 2006.05990, sec. B.2.
    """

    clip: float | None
    """c, in units of the return; None does not clip."""

    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Stats]:
        """The loss summed over trained tokens (scalar), and sums of its statistics (detached scalars).

        All [rows, width]; gradient flows into `values` alone. `vf_clipfrac` counts tokens whose loss the clip has
        raised, whose gradient is zero; `value_error` is return less value. The names are veRL's.
        """

        def trained(tensor: Tensor) -> Tensor:
            # Filled before any arithmetic: multiplying by the mask afterwards would turn NaN into 0 * NaN.
            return tensor.masked_fill(~mask, 0.0)

        values, old, returns = trained(values), trained(old_values), trained(returns)
        squared = (values - returns).square()
        clipped = squared
        if self.clip is not None:
            near = torch.clamp(values, old - self.clip, old + self.clip)
            clipped = (near - returns).square()
        loss = 0.5 * torch.maximum(squared, clipped).sum()
        return loss, {
            TOKENS: mask.sum(),
            DIVISOR: mask.sum(),
            "vf_loss": loss.detach(),
            "vf_clipfrac": (clipped > squared).sum(),
            "vpred_mean": values.detach().sum(),
            "value_error": (returns - values.detach()).sum(),
        }


def explained_variance(values: NDArray[np.floating], returns: NDArray[np.floating]) -> float:
    """1 - Var(returns - values) / Var(returns), over [n] tokens, at least one; NaN where all returns are equal.

    1 where the critic knows the returns, 0 where it knows no more than their mean, below where it misleads.
    """
    if np.ptp(returns) == 0:
        return float("nan")
    values, returns = values.astype(np.float64), returns.astype(np.float64)
    return 1.0 - float((returns - values).var() / returns.var())
