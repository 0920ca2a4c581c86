"""What each policy loss makes of the ratio of new to old policy and of the advantage. Pure torch.

All tensors are [rows, width] and finite where nothing is trained: `losses.py` fills those places. Log-ratios
are clamped to +-20 before they are raised; past that the gradient is zero.

With r the ratio and A the advantage, to be minimised:

    ppo              max(-r A, -clip(r, 1 - low, 1 + high) A), and no more than -c A where A < 0
    gspo             that without c; r is the sequence's: exp(mean of its trained tokens' log r)
    cispo            -sg(clip(r, 1 - low, 1 + high)) A log pi
    policy_gradient  -A log pi

Sources: PPO (arXiv 1707.06347), eq. 7; bounds that differ: DAPO (arXiv 2503.14476); the bound c, dual clip:
Ye et al. (arXiv 1912.09729); GSPO (arXiv 2507.18071); CISPO: MiniMax-M1 (arXiv 2506.13585);
REINFORCE (Williams, 1992).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.algorithms.kl import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The loss of each token, and which bounds it met."""

    loss: Tensor
    """[rows, width], to be minimised."""
    low: Tensor
    """[rows, width] bool: the lower bound of the ratio stood in for it."""
    high: Tensor
    """[rows, width] bool: the upper bound did."""
    dual: Tensor
    """[rows, width] bool: the dual clip's bound did."""


def token_ratios(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old of each token, [rows, width]."""
    return _raised(logprobs - old_logprobs)


def sequence_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:
    """The geometric mean of pi / pi_old over a sequence's trained tokens, at each of them; else 1.

    [rows, width], as are `mask`, bool, and `sequences`, int64: the number of a token's sequence, below
    rows x width, read where `mask` is True. The value is the sequence's, the gradient goes to the token
    alone: s_t = sg(s) pi_t / sg(pi_t). With one advantage for all of a sequence's tokens loss and gradient
    are those of GSPO; otherwise each token keeps its own advantage (GSPO-token, arXiv 2507.18071).

    All trained tokens of a sequence must be there: a sequence is not to be cut over ranks.
    """
    # A token that is not trained adds zeros to number 0. There are no more sequences than tokens, so that
    # their number need not be fetched from the device.
    numbers = sequences.masked_fill(~mask, 0).flatten()
    log_ratios = (logprobs - old_logprobs).detach().masked_fill(~mask, 0.0).flatten()
    sums = torch.zeros_like(log_ratios).index_add(0, numbers, log_ratios)
    counts = torch.zeros_like(log_ratios).index_add(0, numbers, mask.flatten().to(log_ratios))
    means = (sums / counts.clamp(min=1.0))[numbers].view_as(logprobs).masked_fill(~mask, 0.0)
    # In brackets: beside a log-prob a small mean would lose its last digits.
    return _raised(means + (logprobs - logprobs.detach()))


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Surrogate:
    """PPO's surrogate, also of sequence ratios. `dual`, above 1, bounds what A < 0 costs; None does not."""
    within = ratio.clamp(1.0 - low, 1.0 + high)
    loss = torch.maximum(-ratio * advantages, -within * advantages)
    against = advantages < 0
    beyond = torch.zeros_like(against)
    if dual is not None:
        loss = torch.where(against, torch.minimum(loss, -dual * advantages), loss)
        beyond = against & (ratio > dual)
    return Surrogate(loss, against & (ratio < 1.0 - low), (advantages > 0) & (ratio > 1.0 + high), beyond)


def cispo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """The log-prob weighted by the clipped ratio as a constant: a clipped token still has its gradient."""
    weight = ratio.detach().clamp(1.0 - low, 1.0 + high)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(-weight * advantages * logprobs, ratio < 1.0 - low, ratio > 1.0 + high, none)


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Surrogate:
    """The log-prob alone, whatever the old policy was."""
    none = torch.zeros_like(logprobs, dtype=torch.bool)
    return Surrogate(-advantages * logprobs, none, none, none)


def _raised(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
