"""Losses of policy and critic as sums over trained tokens, their statistics, and their aggregation.

Both losses are sums over tokens, divided once by a divisor that is itself a sum (the critic's weights are 1):

    loss = sum_t w_t l_t / sum of divisors

A micro-batch contributes its part of both sums; the caller that accumulates micro-batches divides once, by the divisors
of all micro-batches and ranks (`divisor`; for the critic, the number of trained tokens). Example, `token-mean` over two
micro-batches of 2 and 1 trained tokens with losses (1, 2) and (6): (1 + 2 + 6) / (2 + 1) = 3, not the mean 3.75 of means.

A token's weight depends on its own sequence alone, so the result equals that of a single batch for any split into
micro-batches and ranks, and for any cut of a sequence over ranks, except with `gspo`, whose ratio belongs to the whole
sequence. Code that cuts a sequence takes its weight from the whole sequence and counts its divisor once. A sequence
without a trained token contributes nothing.

Invariant: a masked token adds nothing to a loss and gets a gradient of exactly zero whatever its inputs are, NaN and
infinity included. A NaN at a trained token makes the loss NaN: neither the loss nor maxima and minima hide it.

With r the ratio of new to old policy, its logarithm clamped to +-20, and A the advantage, the policy losses are

    ppo              max(-r A, -clip(r, 1 - low, 1 + high) A), and at most -c A where A < 0
    gspo             ppo without c; r is the sequence's: exp(mean of its trained tokens' log r)
    cispo            -sg(clip(r, 1 - low, 1 + high)) A log pi
    policy_gradient  -A log pi

Sources: PPO (arXiv 1707.06347), eq. 7; unequal bounds: DAPO (arXiv 2503.14476); the bound c, dual clip: Ye et al.
(arXiv 1912.09729); GSPO (arXiv 2507.18071); CISPO: MiniMax-M1 (arXiv 2506.13585); REINFORCE (Williams, 1992).
Aggregations: `token-mean`: DAPO, over the mini-batch instead of the group. `seq-mean-token-mean`: GRPO (arXiv
2402.03300), eq. 3. `seq-mean-token-sum`: the log-prob of the whole sequence, REINFORCE and RLOO (arXiv 2402.14740).
`fixed-length`: Dr. GRPO (arXiv 2503.20783), whose constant keeps the scale of a mean and favours no length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.algorithms.kl import K1, K3, LOG_RATIO_LIMIT, estimate, importance_weights
from rlsys.config.algorithm import FULL_KL, Aggregation, AlgorithmConfig, KlPlace, PolicyLoss

TOKEN_MEAN = Aggregation("token-mean")
TOKENS = "tokens"
"""The statistic that counts trained tokens; every mean is over it."""
DIVISOR = "divisor"
"""The statistic that whoever computes a loss adds: the micro-batch's part of the divisor."""
LOSS_SUFFIX = "_loss"
"""Statistics with this suffix are weighted sums, as the loss is, and become what was minimised."""
MAX_SUFFIX = "_max"
MIN_SUFFIX = "_min"
"""Statistics with these suffixes are maxima and minima; all others are sums over trained tokens."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the loss besides the policy's output, all [rows, width]; gradient flows only into `divergence`."""

    old_logprobs: Tensor
    """Log-probs of the policy that the update sets out from (the proximal policy)."""
    ref_logprobs: Tensor | None
    """Log-probs of the reference policy; None if there is none."""
    advantages: Tensor
    mask: Tensor
    """Bool, True where a token is trained."""
    weights: Tensor
    """`token_weights`, spread over the tokens."""
    sequences: Tensor
    """int64 number of the token's sequence within the micro-batch, -1 for padding."""
    divergence: Tensor | None = None
    """KL to the reference in nats, from whole distributions; it then stands for the estimator."""


Stats = dict[str, Tensor]
LossFunction = Callable[[Tensor, Tensor | None, LossInputs], tuple[Tensor, Stats]]
"""(logprobs [rows, width], entropy [rows, width] or None, inputs) -> (weighted sum, scalar statistics)."""


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """The loss of each token, and whether the lower, the upper or the dual bound met its ratio. All [rows, width]."""

    loss: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


@dataclass(frozen=True, slots=True)
class ConfiguredLoss:
    """The policy loss of a config, a KL penalty to the reference, and an entropy bonus:

    sum_t w_t (surrogate_t + kl_coef KL_t - entropy_coef H_t)
    """

    config: AlgorithmConfig

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Stats]:
        """The weighted sum over trained tokens (scalar), and its statistics (detached scalars).

        `ratio` is the tokens' to the old policy, `ratio_dev_max` the largest |ratio - 1|, `approx_kl` from the old policy
        (k3); `clip_fraction*` and `dual_clip_fraction` count the tokens that the loss clips. With a reference there is `kl`
        by the estimator in use; with a KL term `kl_loss`; with an entropy `entropy`.

        Raises ValueError if a term with a coefficient lacks its input.
        """
        self._require(entropy, inputs)
        logprobs, inputs = _filled(logprobs, inputs.mask), _all_filled(inputs)
        surrogate = self._surrogate(logprobs, inputs)
        loss = (inputs.weights * surrogate.loss).sum()
        stats = {
            **_ratio_stats(logprobs, inputs),
            "clip_fraction": surrogate.low.sum() + surrogate.high.sum(),
            "clip_fraction_low": surrogate.low.sum(),
            "clip_fraction_high": surrogate.high.sum(),
            "dual_clip_fraction": surrogate.dual.sum(),
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
        """The loss has a KL term."""
        return self.config.kl_coef > 0 and self.config.kl_in is KlPlace.loss

    def _surrogate(self, logprobs: Tensor, inputs: LossInputs) -> _Surrogate:
        config, old, advantages = self.config, inputs.old_logprobs, inputs.advantages
        low, high, kind = 1.0 - config.clip_low, 1.0 + config.clip_high, config.policy_loss
        if kind is PolicyLoss.ppo:
            return _clipped(_exp(logprobs - old), advantages, low, high, config.dual_clip)
        if kind is PolicyLoss.gspo:
            ratio = sequence_ratios(logprobs, old, inputs.mask, inputs.sequences)
            return _clipped(ratio, advantages, low, high, None)
        none = torch.zeros_like(logprobs, dtype=torch.bool)
        if kind is PolicyLoss.policy_gradient:
            return _Surrogate(-advantages * logprobs, none, none, none)
        # A clipped token still has its gradient, because the ratio is a constant.
        ratio = _exp(logprobs - old).detach()
        return _Surrogate(-ratio.clamp(low, high) * advantages * logprobs, ratio < low, ratio > high, none)

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
        if inputs.ref_logprobs is None or self.config.kl_estimator in FULL_KL:
            return {}
        return {"kl": estimate(self.config.kl_estimator, logprobs, inputs.ref_logprobs).sum()}

    def _require(self, entropy: Tensor | None, inputs: LossInputs) -> None:
        config = self.config
        if self._penalises and inputs.divergence is None:
            if config.kl_estimator in FULL_KL:
                raise ValueError(f"kl_estimator is {config.kl_estimator} but the batch has no divergence.")
            if inputs.ref_logprobs is None:
                raise ValueError(f"kl_coef is {config.kl_coef} but the batch has no reference log-probs.")
        if config.entropy_coef and entropy is None:
            raise ValueError(f"entropy_coef is {config.entropy_coef} but the policy returned no entropy.")


def policy_loss(config: AlgorithmConfig) -> LossFunction:
    """The loss that `config` describes; picklable, so that it can be sent to the actor's workers.

    Raises ValueError for a KL term in the loss by k1, whose gradient is zero on average, and for a dual
    clip of another loss than ppo.
    """
    if config.kl_coef > 0 and config.kl_in is KlPlace.loss and config.kl_estimator is K1:
        raise ValueError("kl_estimator=k1 in the loss has no gradient on average; take another, or kl_in=reward.")
    if config.dual_clip is not None and config.policy_loss is not PolicyLoss.ppo:
        raise ValueError(
            f"dual_clip is {config.dual_clip} but policy_loss={config.policy_loss} has none: set it to null."
        )
    return ConfiguredLoss(config)


def sequence_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:
    """The geometric mean of pi / pi_old over a sequence's trained tokens, at each of them; else 1.

    All are [rows, width]; `sequences`, a token's sequence, is below rows x width and read where `mask` is True. The value
    is the sequence's, the gradient goes to the token alone: s_t = sg(s) pi_t / sg(pi_t). With one advantage for all of a
    sequence's tokens loss and gradient are those of GSPO; otherwise each token keeps its own advantage (GSPO-token, arXiv
    2507.18071). All trained tokens of a sequence must be there: a sequence is not to be cut over ranks.
    """
    # A token that is not trained adds zeros to number 0. There are no more sequences than tokens, so that
    # their number need not be fetched from the device.
    numbers = sequences.masked_fill(~mask, 0).flatten()
    log_ratios = (logprobs - old_logprobs).detach().masked_fill(~mask, 0.0).flatten()
    sums = torch.zeros_like(log_ratios).index_add(0, numbers, log_ratios)
    counts = torch.zeros_like(log_ratios).index_add(0, numbers, mask.flatten().to(log_ratios))
    means = (sums / counts.clamp(min=1.0))[numbers].view_as(logprobs).masked_fill(~mask, 0.0)
    # In brackets: beside a log-prob a small mean would lose its last digits.
    return _exp(means + (logprobs - logprobs.detach()))


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> _Surrogate:
    """PPO's surrogate, also of sequence ratios, bounded to [`low`, `high`]. `dual`, above 1, bounds what A < 0 costs."""
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    against = advantages < 0
    beyond = torch.zeros_like(against)
    if dual is not None:
        loss = torch.where(against, torch.minimum(loss, -dual * advantages), loss)
        beyond = against & (ratio > dual)
    return _Surrogate(loss, against & (ratio < low), (advantages > 0) & (ratio > high), beyond)


def _exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def token_weights(aggregation: Aggregation, trained_lengths: NDArray[np.integer]) -> NDArray[np.float64]:
    """[sequences] weight of each trained token of a sequence; 0 for a sequence that has none.

    `trained_lengths` [sequences] counts the trained tokens of each whole sequence.
    """
    lengths = np.asarray(trained_lengths)
    weights = (lengths > 0).astype(np.float64)
    return weights / np.maximum(lengths, 1) if aggregation is Aggregation("seq-mean-token-mean") else weights


def divisor(aggregation: Aggregation, trained_lengths: NDArray[np.integer], loss_length: int) -> int:
    """The part of the mini-batch's divisor that sequences of these [sequences] trained lengths add.

    `loss_length`, in tokens, is the constant of `fixed-length`. Raises ValueError if it is needed and not positive.
    """
    lengths = np.asarray(trained_lengths)
    sequences = int(np.count_nonzero(lengths))
    if aggregation is TOKEN_MEAN:
        return int(lengths.sum())
    if aggregation is Aggregation("fixed-length"):
        if loss_length < 1:
            raise ValueError(
                f"algorithm.loss_length is {loss_length}; fixed-length divides by it, set it to 1 or more."
            )
        return sequences * loss_length
    return sequences


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
        raised, whose gradient is zero. The names are veRL's.
        """
        values, old, returns = (_filled(tensor, mask) for tensor in (values, old_values, returns))
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

    `tokens` itself is the sum; without any, all else is NaN. Raises ValueError for losses without a divisor.
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
    # Python's own max and min may drop a NaN.
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
    """Statistics of the ratios; a micro-batch without a trained token has extrema that any other's outdo."""
    current, old, mask = logprobs.detach(), inputs.old_logprobs, inputs.mask
    ratio = _exp(current - old)

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
