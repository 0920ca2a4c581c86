"""Computes policy and critic losses as sums over trained tokens, with statistics and aggregation weights.

A loss is a weighted sum over tokens, divided once by a sum of divisors (for the critic, all weights are 1):

    loss = sum_t w_t l_t / sum of divisors

A micro-batch contributes its part of both sums. The caller accumulates micro-batches and divides once, by the sum of
`divisor` over all micro-batches and ranks (for the critic, by the number of trained tokens). Example: `token-mean` over
micro-batches with token losses (1, 2) and (6) gives (1 + 2 + 6) / (2 + 1) = 3, not the mean of means, 3.75.

    aggregation            w_t                              divisor
    token-mean             1                                trained tokens
    seq-mean-token-mean    1 / trained tokens of sequence   sequences
    seq-mean-token-sum     1                                sequences
    fixed-length           1                                sequences * loss_length

A token's weight depends only on its own sequence. Up to rounding, any split into micro-batches and ranks therefore
gives the same loss as a single batch. A sequence may also be cut over ranks, except with `gspo`, whose ratio needs the
whole sequence. The caller then takes the weight from the whole sequence and counts the sequence's divisor once. A
sequence without a trained token contributes nothing.

Invariant: an untrained token adds nothing to a loss and has a gradient of exactly zero, even with NaN or infinite
inputs. A NaN that enters the loss at a trained token makes the loss NaN. Maxima and minima propagate NaN as well.

Let r be the ratio pi / pi_old with its logarithm clamped to +-20, A the advantage, and sg(x) x without gradient. The
policy losses are

    ppo              max(-r A, -clip(r, 1 - low, 1 + high) A); with `dual_clip` c, at most -c A where A < 0
    gspo             as ppo without c, with the ratio of the sequence: exp(mean of log r over its trained tokens)
    cispo            -sg(clip(r, 1 - low, 1 + high)) A log pi
    policy_gradient  -A log pi
    sapo             -(4 / tau) sigmoid(tau (r - 1)) A, with tau_positive as tau where A > 0, else tau_negative

The option `llds` adds a penalty that keeps the log-probs of good trajectories from falling; see `displacement`.

Sources: PPO (arXiv 1707.06347), eq. 7; unequal bounds: DAPO (arXiv 2503.14476); dual clip: Ye et al. (arXiv
1912.09729); GSPO (arXiv 2507.18071); CISPO: MiniMax-M1 (arXiv 2506.13585); SAPO (arXiv 2511.20347); REINFORCE (Williams, 1992). Aggregations:
`token-mean`: DAPO, over the mini-batch instead of the group. `seq-mean-token-mean`: GRPO (arXiv 2402.03300), eq. 3.
`seq-mean-token-sum`: the log-prob of the whole sequence, REINFORCE and RLOO (arXiv 2402.14740). `fixed-length`: Dr.
GRPO (arXiv 2503.20783); its constant keeps the scale of a mean without favouring short or long sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.algorithms.kl import (
    LOG_RATIO_LIMIT,
    KlEstimator,
    call_own,
    check_own,
    importance_weights,
    k3,
    sampled_estimator,
)
from rlsys.config.algorithm import Aggregation, AlgorithmConfig, FullKl, KlPlace, LldsGate
from rlsys.config.custom import OwnComponent, bound, described

TOKEN_MEAN = Aggregation("token-mean")
TOKENS = "tokens"
"""Statistic that counts trained tokens. All means except the means of losses are divided by it."""
DIVISOR = "divisor"
"""Statistic with the micro-batch's part of the loss's divisor; for a policy loss, the caller adds this statistic."""
LOSS_SUFFIX = "_loss"
"""Suffix of weighted sums, which `reduce_stats` divides by `divisor` like the loss itself."""
CORRECT = "correct"
"""Statistic that counts correct trajectories: sequences whose advantages sum to more than 0."""
CORRECT_PREFIX = "correct_"
"""Prefix of sums over correct trajectories, which `reduce_stats` divides by their number."""
MAX_SUFFIX = "_max"
MIN_SUFFIX = "_min"
"""Suffixes of maxima and minima. All other statistics are sums over trained tokens."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the loss besides the policy's outputs, all [rows, width]; only `divergence` carries a gradient."""

    old_logprobs: Tensor
    """Log-probs under the policy before the update (the proximal policy)."""
    ref_logprobs: Tensor | None
    """Log-probs under the reference policy; None without a reference."""
    advantages: Tensor
    mask: Tensor
    """Bool, True where a token is trained."""
    weights: Tensor
    """Weight of each token: the `token_weights` of its sequence."""
    sequences: Tensor
    """int64 index of the token's sequence within the micro-batch, -1 for padding."""
    divergence: Tensor | None = None
    """KL to the reference in nats, computed from distributions; replaces the KL estimator's value."""
    turns: Tensor | None = None
    """int64 index of a trained token's turn within the micro-batch; read where `mask` is True."""


Stats = dict[str, Tensor]
LossFunction = Callable[[Tensor, Tensor | None, LossInputs], tuple[Tensor, Stats]]
"""(logprobs [rows, width], entropy [rows, width] or None, inputs) -> (weighted sum, scalar statistics)."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Loss of each token, and masks of ratios clipped at the lower, upper and dual bound. All [rows, width]."""

    loss: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    dual: Tensor | None = None


SurrogateFunction = Callable[[Tensor, LossInputs], Surrogate]
"""(logprobs [rows, width], inputs) -> surrogate. Untrained tokens hold zeros in all inputs; gradients flow into the
log-probs. A row holds whole sequences, whatever the parallel layout."""


@dataclass(frozen=True, slots=True)
class ConfiguredLoss:
    """Policy loss of a config, with the KL penalty of `kl_in=loss`, an entropy bonus and the penalty D of `llds`:

    sum_t w_t (surrogate_t + kl_coef KL_t - entropy_coef H_t + llds.coef D_t)
    """

    config: AlgorithmConfig
    surrogate: SurrogateFunction
    kl: KlEstimator | None
    """KL estimator of the sampled token; None if the KL compares distributions."""

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Stats]:
        """Return the weighted sum over trained tokens (scalar) and its statistics (detached scalars).

        Statistics: `ratio` is the ratio of each token, also for gspo. `ratio_dev_max` is the largest |ratio - 1|.
        `approx_kl` is the k3 estimate of KL(old policy || policy). `clip_fraction*` and `dual_clip_fraction` count
        clipped tokens. `kl` is the value of the configured estimator, if its inputs are given. `kl_loss` exists if the
        loss has a KL term, `llds_loss` if it has that penalty, and `entropy` if it is given. `correct_*` describe
        correct trajectories: log-prob and its change since the old policy, in nats a token, and how many have fallen.

        Raises ValueError if a term with a non-zero coefficient lacks its input.
        """
        self._require(entropy, inputs)
        logprobs, inputs = _filled(logprobs, inputs.mask), _all_filled(inputs)
        surrogate = self.surrogate(logprobs, inputs)
        loss = (inputs.weights * surrogate.loss).sum()
        stats = {
            **_ratio_stats(logprobs, inputs),
            **_correct_stats(logprobs.detach(), inputs),
            **_clip_stats(surrogate),
            **self._kl_stats(logprobs.detach(), inputs),
            "policy_loss": loss,
        }
        if self._penalises:
            stats["kl_loss"] = (inputs.weights * self._penalty(logprobs, inputs)).sum()
            loss = loss + self.config.kl_coef * stats["kl_loss"]
        if self.config.llds.coef:
            stats["llds_loss"] = (inputs.weights * displacement(logprobs, inputs, self.config.llds.gate)).sum()
            loss = loss + self.config.llds.coef * stats["llds_loss"]
        if entropy is not None:
            entropy = _filled(entropy, inputs.mask)
            stats["entropy"] = entropy.sum()
            if self.config.entropy_coef:
                loss = loss - self.config.entropy_coef * (inputs.weights * entropy).sum()
        return loss, {name: value.detach() for name, value in stats.items()}

    @property
    def _penalises(self) -> bool:
        """True if the loss has a KL term."""
        return self.config.kl_coef > 0 and self.config.kl_in is KlPlace.loss

    def _penalty(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """Return the KL term of each token. `inputs.divergence`, if given, already includes importance weights."""
        if inputs.divergence is not None:
            return inputs.divergence
        assert inputs.ref_logprobs is not None
        assert self.kl is not None
        config = self.config
        value = self.kl(logprobs, inputs.ref_logprobs)
        if not config.use_kl_iw:
            return value
        lower, upper = config.kl_iw_clip_lower, config.kl_iw_clip_upper
        return value * importance_weights(logprobs, inputs.old_logprobs, lower, upper)

    def _kl_stats(self, logprobs: Tensor, inputs: LossInputs) -> Stats:
        if inputs.divergence is not None:
            return {"kl": inputs.divergence.sum()}
        if inputs.ref_logprobs is None or self.kl is None:
            return {}
        return {"kl": _filled(self.kl(logprobs, inputs.ref_logprobs), inputs.mask).sum()}

    def _require(self, entropy: Tensor | None, inputs: LossInputs) -> None:
        config = self.config
        if self._penalises and inputs.divergence is None:
            if self.kl is None:
                raise ValueError(f"kl_estimator is {config.kl_estimator.kind} but the batch has no divergence.")
            if inputs.ref_logprobs is None:
                raise ValueError(f"kl_coef is {config.kl_coef} but the batch has no reference log-probs.")
        if config.entropy_coef and entropy is None:
            raise ValueError(f"entropy_coef is {config.entropy_coef} but the policy returned no entropy.")
        if config.llds.coef and config.llds.gate is LldsGate.turn and inputs.turns is None:
            raise ValueError(f"llds.gate is {config.llds.gate} but the batch has no turns.")


def policy_loss(config: AlgorithmConfig) -> LossFunction:
    """Return the loss that `config` describes; picklable, so it can be sent to the actor's workers.

    Raises ValueError for `kl_estimator=k1` in the loss, whose gradient is zero on average.
    """
    if config.kl_coef > 0 and config.kl_in is KlPlace.loss and config.kl_estimator.kind == "k1":
        raise ValueError("kl_estimator=k1 in the loss has no gradient on average: take another, or kl_in=reward.")
    surrogate = bound(config.policy_loss, POLICY_LOSSES)
    if isinstance(surrogate, OwnComponent):
        surrogate = partial(_checked, surrogate)
    kl = None if isinstance(config.kl_estimator, FullKl) else sampled_estimator(config.kl_estimator)
    return ConfiguredLoss(config, surrogate, kl)


def ppo(
    logprobs: Tensor, inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """Clip the ratio of each token; `dual_clip`, above 1, bounds the loss where A < 0 by -dual_clip A."""
    ratio = _exp(logprobs - inputs.old_logprobs)
    return _clipped(ratio, inputs.advantages, 1.0 - clip_low, 1.0 + clip_high, dual_clip)


def gspo(logprobs: Tensor, inputs: LossInputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Clip the ratio of each sequence."""
    ratio = sequence_ratios(logprobs, inputs.old_logprobs, inputs.mask, inputs.sequences)
    return _clipped(ratio, inputs.advantages, 1.0 - clip_low, 1.0 + clip_high, None)


def cispo(logprobs: Tensor, inputs: LossInputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Weight the log-prob by the clipped ratio, which has no gradient: a clipped token keeps that of its log-prob."""
    low, high = 1.0 - clip_low, 1.0 + clip_high
    ratio = _exp(logprobs - inputs.old_logprobs).detach()
    return Surrogate(-ratio.clamp(low, high) * inputs.advantages * logprobs, ratio < low, ratio > high)


def policy_gradient(logprobs: Tensor, inputs: LossInputs) -> Surrogate:
    """Weight the log-prob by the advantage alone."""
    return Surrogate(-inputs.advantages * logprobs)


def sapo(logprobs: Tensor, inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """Weight the advantage by a sigmoid of the ratio, with value 2 / tau and slope 1 at ratio 1."""
    ratio, gains = _exp(logprobs - inputs.old_logprobs), inputs.advantages > 0
    tau = torch.full_like(ratio, tau_negative).masked_fill(gains, tau_positive)
    return Surrogate(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * inputs.advantages)


POLICY_LOSSES: Mapping[str, Callable[..., Surrogate]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
    "sapo": sapo,
}
"""Kind of `algorithm.policy_loss` -> function; its keyword arguments are the kind's keys."""


def _checked(loss: OwnComponent, logprobs: Tensor, inputs: LossInputs) -> Surrogate:
    """Call a policy loss from outside of the package and check its result, which may also be the loss alone."""
    found = call_own(loss, logprobs, inputs)
    surrogate = Surrogate(found) if isinstance(found, Tensor) else found
    if not isinstance(surrogate, Surrogate):
        raise loss.error(f"returned {described(found)} instead of a tensor or a Surrogate")
    for name in ("loss", "low", "high", "dual"):
        if (value := getattr(surrogate, name)) is not None or name == "loss":
            check_own(loss, value, logprobs, name, differentiable=name == "loss")
    if not surrogate.loss.detach()[inputs.mask].isfinite().all():
        raise loss.error("returned a loss that is not finite at a trained token")
    return replace(surrogate, loss=_filled(surrogate.loss, inputs.mask))


def _clip_stats(surrogate: Surrogate) -> Stats:
    none = torch.zeros((), dtype=torch.int64, device=surrogate.loss.device)
    low, high, dual = (
        none if clipped is None else clipped.sum() for clipped in (surrogate.low, surrogate.high, surrogate.dual)
    )
    return {
        "clip_fraction": low + high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "dual_clip_fraction": dual,
    }


def sequence_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:
    """Return for each trained token the ratio s of its sequence: the geometric mean of pi / pi_old over the sequence.

    All are [rows, width]; the result is 1 at untrained tokens. `sequences` holds each token's sequence index, below
    rows x width; it is read where `mask` is True. All tokens of a sequence have the same value, but the gradient of
    each flows only into the token itself: s_t = sg(s) pi_t / sg(pi_t). If all tokens of a sequence have the same
    advantage, this is GSPO; otherwise it is GSPO-token (arXiv 2507.18071). Requires all trained tokens of a sequence: a
    sequence must not be cut over ranks.
    """
    numbers = sequences.masked_fill(~mask, 0)  # Untrained tokens add zeros to sequence 0.
    log_ratios = (logprobs - old_logprobs).detach().masked_fill(~mask, 0.0)
    sums, counts = _sums(log_ratios, numbers), _sums(mask.to(log_ratios), numbers)
    means = (sums / counts.clamp(min=1.0))[numbers].masked_fill(~mask, 0.0)
    # The brackets matter: added to a log-prob first, a small mean would lose its last digits.
    return _exp(means + (logprobs - logprobs.detach()))


def displacement(logprobs: Tensor, inputs: LossInputs, gate: LldsGate) -> Tensor:
    """Return the penalty of LLDS for each token, [rows, width]: how far its log-prob has fallen, in nats.

    Lazy likelihood displacement is a fall of the log-likelihood of good trajectories, which updates on bad ones cause.
    With d = log pi_old - log pi, the penalty of a token with an advantage of at least 0 is

        max(0, d)    if the sum of d over such tokens of the same `gate` (turn, sequence or the token itself) is above 0

    and 0 otherwise. The sum has no gradient. Like every token loss, the penalty has the weight and divisor of the
    aggregation, as in the authors' code; their formula divides by the tokens of the penalised trajectories alone.
    Untrained tokens hold zeros in all inputs. Source: LLDS (arXiv 2512.04220), eq. 4, 9 and 10; their action is a turn.
    """
    # A correction that drops a token multiplies its advantage by 0, which keeps the sign: -0 is not at least 0 here.
    kept = inputs.mask & ~inputs.advantages.signbit()
    fallen = _filled(inputs.old_logprobs - logprobs, kept)
    if gate is not LldsGate.token:
        numbers = inputs.sequences if gate is LldsGate.trajectory else inputs.turns
        assert numbers is not None
        numbers = numbers.masked_fill(~kept, 0)
        fallen = fallen.masked_fill(_sums(fallen.detach(), numbers)[numbers] <= 0, 0.0)
    return torch.relu(fallen)  # Unlike a clamp, it has no gradient where nothing has fallen.


def _sums(values: Tensor, numbers: Tensor) -> Tensor:
    """Return the sum of `values` over the tokens with each number, [rows x width]: entry i is the sum for number i.

    `numbers` are int64 below rows x width; both arguments are [rows, width]. The result has one entry per token, an upper
    bound of the numbers, because reading the largest would need a copy from the device to the host.
    """
    return torch.zeros_like(values).flatten().index_add(0, numbers.flatten(), values.flatten())


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Surrogate:
    """Return PPO's clipped surrogate for token or sequence ratios, with the clip range [`low`, `high`].

    `dual`, above 1, bounds the loss of tokens with A < 0 by -dual A; None for no bound.
    """
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    against = advantages < 0
    beyond = torch.zeros_like(against)
    if dual is not None:
        loss = torch.where(against, torch.minimum(loss, -dual * advantages), loss)
        beyond = against & (ratio > dual)
    return Surrogate(loss, against & (ratio < low), (advantages > 0) & (ratio > high), beyond)


def _exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def token_weights(aggregation: Aggregation, trained_lengths: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the weight of each trained token of a sequence, [sequences]; 0 for a sequence without trained tokens.

    `trained_lengths` [sequences] counts the trained tokens of each whole sequence.
    """
    lengths = np.asarray(trained_lengths)
    weights = (lengths > 0).astype(np.float64)
    return weights / np.maximum(lengths, 1) if aggregation is Aggregation("seq-mean-token-mean") else weights


def divisor(aggregation: Aggregation, trained_lengths: NDArray[np.integer], loss_length: int) -> int:
    """Return the part that these sequences contribute to the mini-batch's divisor.

    `trained_lengths` [sequences] is as in `token_weights`. `loss_length`, in tokens, is the constant of `fixed-length`.
    Raises ValueError if `loss_length` is needed and not positive.
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
    """Squared error of the value against the return, clipped around the old value.

        loss = 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)

    Source: the public code of PPO (arXiv 1707.06347), described in arXiv 2006.05990, sec. B.2.
    """

    clip: float | None
    """c, in units of the return; None for no clipping."""

    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Stats]:
        """Return the loss summed over trained tokens (scalar) and sums of its statistics (detached scalars).

        All tensors are [rows, width]; gradients flow only into `values`. `vf_clipfrac` counts the tokens whose loss the
        clip raises; their gradient is zero. veRL uses the names `vf_loss`, `vf_clipfrac` and `vpred_mean` too.
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
    """Return 1 - Var(returns - values) / Var(returns) over [n] tokens, n >= 1; NaN if all returns are equal.

    1 for a perfect critic, 0 for one that predicts a constant, negative for a critic that is worse than a constant.
    """
    if np.ptp(returns) == 0:
        return float("nan")
    values, returns = values.astype(np.float64), returns.astype(np.float64)
    return 1.0 - float((returns - values).var() / returns.var())


def join_stats(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Join the statistics of micro-batches or ranks: add sums, take the maximum of maxima and the minimum of minima."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            number = float(value)
            totals[name] = _join(name, totals[name], number) if name in totals else number
    return totals


def reduce_stats(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Join statistics and turn sums into means: losses are divided by `divisor`, sums over correct trajectories by their
    number, other sums by `tokens`.

    The result keeps the sum `tokens`, and omits `divisor`, `correct`, and means over correct trajectories if there are
    none. Without trained tokens, all other values are NaN. Raises ValueError for losses without a divisor.
    """
    totals = {TOKENS: 0.0, **join_stats(parts)}
    tokens, divisor, correct = totals[TOKENS], totals.pop(DIVISOR, None), totals.pop(CORRECT, 0.0)

    def reduced(name: str, total: float) -> float:
        if name == TOKENS:
            return total
        if name.endswith((MAX_SUFFIX, MIN_SUFFIX)):
            return total if tokens else math.nan
        if name.startswith(CORRECT_PREFIX):
            return total / correct
        if not name.endswith(LOSS_SUFFIX):
            return total / tokens if tokens else math.nan
        if divisor is None:
            raise ValueError(f"The statistics contain {name} but no {DIVISOR} to divide it by.")
        return total / divisor if divisor else math.nan

    kept = (name for name in totals if correct or not name.startswith(CORRECT_PREFIX))
    return {name: reduced(name, totals[name]) for name in kept}


def _join(name: str, one: float, other: float) -> float:
    # Python's built-in max and min can drop a NaN.
    if name.endswith(MAX_SUFFIX):
        return float(np.maximum(one, other))
    return float(np.minimum(one, other)) if name.endswith(MIN_SUFFIX) else one + other


def _filled(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return `values` where a token is trained, else `fill`. Apply before any arithmetic, because 0 * NaN is NaN."""
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
    """Return statistics of the ratios. Without a trained token, extrema are the neutral elements of max and min."""
    current, old, mask = logprobs.detach(), inputs.old_logprobs, inputs.mask
    ratio = _exp(current - old)

    def largest(values: Tensor, least: float) -> Tensor:
        """Return the largest of `values` over trained tokens; `least` without trained tokens."""
        candidates = _filled(values, mask, least).flatten()
        return torch.cat([candidates, candidates.new_full((1,), least)]).max()

    return {
        TOKENS: mask.sum(),
        "ratio": _filled(ratio, mask).sum(),
        "ratio_max": largest(ratio, -math.inf),
        "ratio_min": -largest(-ratio, -math.inf),
        "ratio_dev_max": largest((ratio - 1.0).abs(), 0.0),
        "approx_kl": k3(old, current).sum(),
    }


def _correct_stats(logprobs: Tensor, inputs: LossInputs) -> Stats:
    """Return statistics of correct trajectories, without a gradient; log-likelihoods are means over their tokens."""
    numbers = inputs.sequences.masked_fill(~inputs.mask, 0)
    lengths = _sums(inputs.mask.to(logprobs), numbers).clamp(min=1.0)
    correct = _sums(inputs.advantages, numbers) > 0
    change = _filled(_sums(logprobs - inputs.old_logprobs, numbers) / lengths, correct)
    return {
        CORRECT: correct.sum(),
        "correct_logprob": _filled(_sums(logprobs, numbers) / lengths, correct).sum(),
        "correct_change": change.sum(),
        "correct_displaced": (change < 0).sum(),
    }
