"""The critic's loss as a sum over trained tokens, and what its statistics say.

Contract: as the policy's, the loss is a SUM and its statistics are sums and counts; whoever accumulates
micro-batches divides once, by the number of trained tokens of the whole mini-batch over all ranks.

Invariant: a masked token adds nothing to the loss and gets a gradient of exactly zero, whatever stands in its
value, old value or return, NaN and infinity included. A trained token that is NaN makes the loss NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.algorithms.losses import TOKENS, Stats, join_stats

ERROR, ERROR_SQUARED = "value_error", "value_error_squared"
RETURN, RETURN_SQUARED = "value_return", "value_return_squared"


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Squared distance of a value from its return, which an update larger than `clip` cannot lower.

        loss = 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)

    Source: the public code of PPO (arXiv 1707.06347), described in arXiv 2006.05990, sec. B.2.
    """

    clip: float | None
    """c, in units of the return; None does not clip."""

    def __call__(
        self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor
    ) -> tuple[Tensor, Stats]:
        """The loss summed over trained tokens (scalar), and sums of its statistics (detached scalars).

        All [rows, width]; gradient flows into `values` alone. `value_clipped` counts tokens whose loss the clip
        has raised, whose gradient is zero. Errors are return less value.
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
        # In float64, because a variance is the small difference of these.
        exact = returns.detach().double()
        error = exact - values.detach().double()
        return loss, {
            TOKENS: mask.sum(),
            "value_loss": loss.detach(),
            "value_clipped": (clipped > squared).sum(),
            "value_mean": values.detach().sum(),
            ERROR: error.sum(),
            ERROR_SQUARED: error.square().sum(),
            RETURN: exact.sum(),
            RETURN_SQUARED: exact.square().sum(),
        }


def value_figures(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Statistics of `ValueLoss` joined over micro-batches and ranks, as means over trained tokens.

    `tokens` stays a sum. Instead of the squares there is `value_explained`, the explained variance
    1 - Var(R - v) / Var(R): 1 of perfect values, 0 of constant ones, below that of worse; it is left out where
    all returns are equal, of which it says nothing. Without a trained token there are no means either.
    """
    totals = {TOKENS: 0.0, **join_stats(parts)}
    tokens = totals[TOKENS]
    if not tokens:
        return {TOKENS: 0.0}
    means = {name: total / tokens for name, total in totals.items() if name != TOKENS}
    left = _variance(means[ERROR], means.pop(ERROR_SQUARED))
    whole = _variance(means[RETURN], means.pop(RETURN_SQUARED))
    explained = {"value_explained": 1.0 - left / whole} if whole else {}
    return {TOKENS: tokens, **means, **explained}


def _variance(mean: float, mean_square: float) -> float:
    """0 where what is left is rounding alone."""
    variance = mean_square - mean * mean
    return variance if variance > 1e-12 * mean_square else 0.0
