"""The policy loss as a sum over trained tokens.

Contract: a loss is a SUM and its statistics are sums and counts; whoever accumulates micro-batches
divides once, by the token count of the whole mini-batch over all ranks. A token-mean is then exact for
any split into micro-batches and ranks.

Invariant: a masked token adds nothing to the loss and gets a gradient of exactly zero, whatever stands
in its log-prob, advantage or entropy, NaN and infinity included. A trained token that is NaN makes the
loss NaN: it is not hidden here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.algorithms.kl import LOG_RATIO_LIMIT, k3
from rlsys.config.schema import AlgorithmConfig

TOKENS = "tokens"
"""The statistic that counts trained tokens; every mean is over it."""
MAX_SUFFIX = "_max"
"""Statistics with this suffix are maxima; all others are sums over trained tokens."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the loss needs besides the policy's own output. Constants: no gradient flows into them."""

    old_logprobs: Tensor
    """[batch, seq] log-probs of the policy that the update sets out from (the proximal policy)."""
    ref_logprobs: Tensor | None
    """[batch, seq] log-probs of the reference policy; None without a KL term."""
    advantages: Tensor
    """[batch, seq]"""
    mask: Tensor
    """[batch, seq] bool, True where a token is trained."""


Stats = dict[str, Tensor]
PolicyLoss = Callable[[Tensor, Tensor | None, LossInputs], tuple[Tensor, Stats]]
"""(logprobs [batch, seq], entropy [batch, seq] or None, inputs) -> (loss sum, scalar statistics)."""


@dataclass(frozen=True, slots=True)
class ClippedPolicyLoss:
    """Clipped ratio with separate bounds, a k3 penalty to the reference, and an entropy bonus.

        r = exp(logprob - old_logprob)
        loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef k3 - entropy_coef H

    Sources: PPO (arXiv 1707.06347), eq. 7; KL in the loss: GRPO (arXiv 2402.03300), eq. 3; separate
    bounds: DAPO (arXiv 2503.14476).
    """

    clip_low: float
    clip_high: float
    kl_coef: float
    entropy_coef: float

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Stats]:
        """The loss summed over trained tokens (scalar), and sums of its statistics (detached scalars).

        Raises ValueError if a term with a coefficient lacks its input.
        """
        self._require(entropy, inputs)

        def trained(values: Tensor) -> Tensor:
            # Filled before any arithmetic: multiplying by the mask afterwards would turn NaN into 0 * NaN.
            return values.masked_fill(~inputs.mask, 0.0)

        current, old = trained(logprobs), trained(inputs.old_logprobs)
        advantages = trained(inputs.advantages)
        log_ratio = (current - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = log_ratio.exp()
        clipped_ratio = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        policy_loss = torch.maximum(-ratio * advantages, -clipped_ratio * advantages).sum()
        stats = {
            TOKENS: inputs.mask.sum(),
            "ratio": trained(ratio).sum(),
            "ratio_dev_max": _max_or_zero(trained((ratio - 1.0).abs())),
            "clipped": (ratio * advantages > clipped_ratio * advantages).sum(),
            "approx_kl": k3(old, current).sum(),
            "policy_loss": policy_loss,
        }
        loss = policy_loss
        if inputs.ref_logprobs is not None:
            stats["kl_loss"] = k3(current, trained(inputs.ref_logprobs)).sum()
            loss = loss + self.kl_coef * stats["kl_loss"] if self.kl_coef else loss
        if entropy is not None:
            stats["entropy"] = trained(entropy).sum()
            loss = loss - self.entropy_coef * stats["entropy"] if self.entropy_coef else loss
        return loss, {name: value.detach() for name, value in stats.items()}

    def _require(self, entropy: Tensor | None, inputs: LossInputs) -> None:
        if self.kl_coef and inputs.ref_logprobs is None:
            raise ValueError(f"kl_coef is {self.kl_coef} but the batch has no reference log-probs.")
        if self.entropy_coef and entropy is None:
            raise ValueError(f"entropy_coef is {self.entropy_coef} but the policy returned no entropy.")


def grpo_loss(config: AlgorithmConfig) -> PolicyLoss:
    """The loss that `config` describes; picklable, so that it can be sent to the actor's workers."""
    return ClippedPolicyLoss(config.clip_low, config.clip_high, config.kl_coef, config.entropy_coef)


def join_stats(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Statistics of several micro-batches or ranks as one: sums added, maxima maxed."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            number = float(value)
            if name.endswith(MAX_SUFFIX):
                totals[name] = max(totals.get(name, number), number)
            else:
                totals[name] = totals.get(name, 0.0) + number
    return totals


def reduce_stats(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Join statistics, `tokens` summed, maxima maxed, and turn the other sums into token-means.

    With no trained token at all the means are NaN: there is nothing they could say.
    """
    totals = {TOKENS: 0.0, **join_stats(parts)}
    tokens = totals[TOKENS]
    return {
        name: total
        if name == TOKENS or name.endswith(MAX_SUFFIX)
        else total / tokens
        if tokens
        else float("nan")
        for name, total in totals.items()
    }


def _max_or_zero(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.sum()
