"""The policy's loss as a weighted sum over trained tokens, and its statistics.

Contract: a loss is sum_t w_t l_t and its statistics are sums, maxima and minima; whoever accumulates
micro-batches divides once, by the sum of their divisors over all ranks (`aggregation.py`). So the result is
that of one batch for any split into micro-batches and ranks, and for any cut of a sequence over ranks; only
`gspo`, whose ratio is the sequence's, needs all of a sequence's trained tokens in one call.

Invariant: a masked token adds nothing to the loss and gets a gradient of exactly zero, whatever stands in its
place in any input, NaN and infinity included. A trained token that is NaN makes the loss NaN: it is not
hidden here, nor in the maxima and minima.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlsys.algorithms import surrogates
from rlsys.algorithms.kl import K1, K3, estimate, importance_weights
from rlsys.config.algorithm import FULL_KL, AlgorithmConfig, KlPlace
from rlsys.config.algorithm import PolicyLoss as Kind

TOKENS = "tokens"
"""The statistic that counts trained tokens; every mean is over it."""
DIVISOR = "divisor"
"""The statistic that whoever computes a loss adds to it: what the micro-batch adds to the divisor."""
LOSS_SUFFIX = "_loss"
"""Statistics with this suffix are weighted sums, as the loss is, and become what was minimised."""
MAX_SUFFIX = "_max"
MIN_SUFFIX = "_min"
"""Statistics with these suffixes are maxima and minima; all others are sums over trained tokens."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the loss needs besides the policy's own output; no gradient flows into it but by `divergence`.

    All are [rows, width].
    """

    old_logprobs: Tensor
    """Log-probs of the policy that the update sets out from (the proximal policy)."""
    ref_logprobs: Tensor | None
    """Log-probs of the reference policy; None if there is none."""
    advantages: Tensor
    mask: Tensor
    """Bool, True where a token is trained."""
    weights: Tensor
    """What a token's loss counts for: `aggregation.token_weights`, spread over the tokens."""
    sequences: Tensor
    """int64 number of the token's sequence within the micro-batch, -1 for padding."""
    divergence: Tensor | None = None
    """KL to the reference in nats, from whole distributions; it then stands for the estimator."""


Stats = dict[str, Tensor]
PolicyLoss = Callable[[Tensor, Tensor | None, LossInputs], tuple[Tensor, Stats]]
"""(logprobs [rows, width], entropy [rows, width] or None, inputs) -> (weighted sum, scalar statistics)."""


@dataclass(frozen=True, slots=True)
class ConfiguredLoss:
    """The policy loss of a config, a KL penalty to the reference, and an entropy bonus:

        sum_t w_t (surrogate_t + kl_coef KL_t - entropy_coef H_t)

    Decoupled PPO (arXiv 2505.24298) is `ppo` with advantages that off-policy weights were multiplied into.
    """

    config: AlgorithmConfig

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Stats]:
        """The weighted sum over trained tokens (scalar), and its statistics (detached scalars).

        Statistics, sums over trained tokens but for the suffixes above: `tokens`; of the tokens' ratios to
        the old policy `ratio`, `ratio_max`, `ratio_min` and `ratio_dev_max`, the largest |ratio - 1|;
        `clip_fraction_low`, `clip_fraction_high`, `clip_fraction` (both) and `dual_clip_fraction`, the tokens
        that the loss clips; `approx_kl` from the old policy (k3); `policy_loss`. With a reference `kl` by the
        estimator in use; with a KL term `kl_loss`; with an entropy `entropy`.

        Raises ValueError if a term with a coefficient lacks its input.
        """
        self._require(entropy, inputs)
        logprobs, inputs = _filled(logprobs, inputs.mask), _all_filled(inputs)
        surrogate = self._surrogate(logprobs, inputs)
        loss = (inputs.weights * surrogate.loss).sum()
        stats = {
            **_ratio_stats(logprobs, inputs),
            **_clip_stats(surrogate),
            **self._kl_stats(logprobs.detach(), inputs),
            "policy_loss": loss,
        }
        if self._penalises:
            stats["kl_loss"] = (inputs.weights * self._penalty(logprobs, inputs)).sum()
            loss = loss + self.config.kl_coef * stats["kl_loss"]
        if entropy is not None:
            entropy = _filled(entropy, inputs.mask)
            stats["entropy"] = entropy.sum()
            if self.config.entropy_coef:
                loss = loss - self.config.entropy_coef * (inputs.weights * entropy).sum()
        return loss, {name: value.detach() for name, value in stats.items()}

    @property
    def _penalises(self) -> bool:
        """Whether the loss has a KL term."""
        return self.config.kl_coef > 0 and self.config.kl_in is KlPlace.loss

    def _surrogate(self, logprobs: Tensor, inputs: LossInputs) -> surrogates.Surrogate:
        config, old, advantages = self.config, inputs.old_logprobs, inputs.advantages
        bounds = config.clip_low, config.clip_high
        if config.policy_loss is Kind.ppo:
            ratio = surrogates.token_ratios(logprobs, old)
            return surrogates.clipped(ratio, advantages, *bounds, config.dual_clip)
        if config.policy_loss is Kind.gspo:
            ratio = surrogates.sequence_ratios(logprobs, old, inputs.mask, inputs.sequences)
            return surrogates.clipped(ratio, advantages, *bounds, None)
        if config.policy_loss is Kind.cispo:
            return surrogates.cispo(logprobs, surrogates.token_ratios(logprobs, old), advantages, *bounds)
        return surrogates.policy_gradient(logprobs, advantages)

    def _penalty(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """The KL term of each token. A divergence has its importance weights inside already."""
        if inputs.divergence is not None:
            return inputs.divergence
        assert inputs.ref_logprobs is not None
        config = self.config
        value = estimate(config.kl_estimator, logprobs, inputs.ref_logprobs)
        if not config.use_kl_iw:
            return value
        lower, upper = config.kl_iw_clip_lower, config.kl_iw_clip_upper
        return value * importance_weights(logprobs, inputs.old_logprobs, lower, upper)

    def _kl_stats(self, logprobs: Tensor, inputs: LossInputs) -> Stats:
        if inputs.divergence is not None:
            return {"kl": inputs.divergence.sum()}
        if inputs.ref_logprobs is None or self._compares_distributions:
            return {}
        return {"kl": estimate(self.config.kl_estimator, logprobs, inputs.ref_logprobs).sum()}

    @property
    def _compares_distributions(self) -> bool:
        return self.config.kl_estimator in FULL_KL

    def _require(self, entropy: Tensor | None, inputs: LossInputs) -> None:
        config = self.config
        if self._penalises and inputs.divergence is None:
            if self._compares_distributions:
                raise ValueError(f"kl_estimator is {config.kl_estimator} but the batch has no divergence.")
            if inputs.ref_logprobs is None:
                raise ValueError(f"kl_coef is {config.kl_coef} but the batch has no reference log-probs.")
        if config.entropy_coef and entropy is None:
            raise ValueError(f"entropy_coef is {config.entropy_coef} but the policy returned no entropy.")


def policy_loss(config: AlgorithmConfig) -> PolicyLoss:
    """The loss that `config` describes; picklable, so that it can be sent to the actor's workers.

    Raises ValueError for a KL term in the loss by k1, whose gradient is zero on average, and for a dual
    clip of another loss than ppo.
    """
    if config.kl_coef > 0 and config.kl_in is KlPlace.loss and config.kl_estimator is K1:
        raise ValueError("kl_estimator=k1 in the loss has no gradient on average; take another, or kl_in=reward.")
    if config.dual_clip is not None and config.policy_loss is not Kind.ppo:
        raise ValueError(
            f"dual_clip is {config.dual_clip} but policy_loss={config.policy_loss} has none: set it to null."
        )
    return ConfiguredLoss(config)


def join_stats(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Statistics of several micro-batches or ranks as one: sums added, maxima maxed, minima likewise."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            number = float(value)
            totals[name] = _join(name, totals[name], number) if name in totals else number
    return totals


def reduce_stats(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Join statistics, turn sums into means: losses over `divisor`, which is left out, others over `tokens`.

    `tokens` itself is the sum. With no trained token at all everything else is NaN: there is nothing it
    could say. Raises ValueError if there are losses and nobody has added a divisor.
    """
    totals = {TOKENS: 0.0, **join_stats(parts)}
    tokens, divisor = totals[TOKENS], totals.pop(DIVISOR, None)

    def reduced(name: str, total: float) -> float:
        if name == TOKENS:
            return total
        if name.endswith((MAX_SUFFIX, MIN_SUFFIX)):
            return total if tokens else math.nan
        if not name.endswith(LOSS_SUFFIX):
            return total / tokens if tokens else math.nan
        if divisor is None:
            raise ValueError(f"The statistics hold {name} but no {DIVISOR} to divide it by.")
        return total / divisor if divisor else math.nan

    return {name: reduced(name, total) for name, total in totals.items()}


def _join(name: str, one: float, other: float) -> float:
    """Of two NaN is kept: Python's own max and min may drop it."""
    if name.endswith(MAX_SUFFIX):
        return float(np.maximum(one, other))
    return float(np.minimum(one, other)) if name.endswith(MIN_SUFFIX) else one + other


def _filled(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`values` where a token is trained. Before any arithmetic: 0 * NaN, by the mask afterwards, is NaN."""
    return values.masked_fill(~mask, fill)


def _all_filled(inputs: LossInputs) -> LossInputs:
    def optional(values: Tensor | None) -> Tensor | None:
        return None if values is None else _filled(values, inputs.mask)

    return replace(
        inputs,
        old_logprobs=_filled(inputs.old_logprobs, inputs.mask),
        ref_logprobs=optional(inputs.ref_logprobs),
        advantages=_filled(inputs.advantages, inputs.mask),
        weights=_filled(inputs.weights, inputs.mask).to(inputs.advantages.dtype),
        divergence=optional(inputs.divergence),
    )


def _ratio_stats(logprobs: Tensor, inputs: LossInputs) -> Stats:
    """A micro-batch without a trained token has the extrema of nothing, which the others' outdo."""
    current, old, mask = logprobs.detach(), inputs.old_logprobs, inputs.mask
    ratio = surrogates.token_ratios(current, old)

    def largest(values: Tensor, least: float) -> Tensor:
        """`least` if nothing is trained, also without any token."""
        candidates = _filled(values, mask, least).flatten()
        return torch.cat([candidates, candidates.new_full((1,), least)]).max()

    return {
        TOKENS: mask.sum(),
        "ratio": _filled(ratio, mask).sum(),
        "ratio_max": largest(ratio, -math.inf),
        "ratio_min": -largest(-ratio, -math.inf),
        "ratio_dev_max": largest((ratio - 1.0).abs(), 0.0),
        "approx_kl": estimate(K3, old, current).sum(),
    }


def _clip_stats(surrogate: surrogates.Surrogate) -> Stats:
    low, high = surrogate.low.sum(), surrogate.high.sum()
    return {
        "clip_fraction": low + high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "dual_clip_fraction": surrogate.dual.sum(),
    }
