"""Computes KL divergences from sampled tokens, from distributions or from their top k tokens.

Also controls the KL coefficient of the reward.

Estimators are elementwise. For a token sampled from the policy, let w = other / policy be the ratio of the token's
probabilities, and let sg(x) be x without gradient. The factor r = policy / sg(policy) has value 1 and carries a
gradient.

    estimator   form                  of                  value unbiased   gradient unbiased
    k1:         -log w                KL(policy, other)   yes              no, zero on average
    k2:         (log w)^2 / 2         KL(policy, other)   no               yes
    k3:         w - 1 - log w         KL(policy, other)   yes              no, that of KL(other, policy)
    k3++:       r (w - 1 - log w)     KL(policy, other)   yes              yes
    k4:         r sg(-log w)          KL(policy, other)   yes              yes
    k5:         sg(w) log w + log r   KL(other, policy)   yes              yes
    abs:        abs(log w)            neither             no               no

Example, w = 0.5: k1 and k4 give 0.69, k2 0.24, k3 and k3++ 0.19, k5 -0.35, abs 0.69 nats.

Clamps, as in EMA-PG: k3, k3++ and k5, which grow like w, clamp log w to +-20. k3, and the k3 in k3++, is also at most
10 nats, as in Search-R1, which it reaches at w = 13.6 and at log w = -11. Beyond that, k3 has no gradient, and k3++ has
only that of r. "Unbiased" holds below the clamps. The value of k5 has no clamp: with one of 10 nats, tokens above
w = 5.7 would lose their gradient, and these are the tokens that diverge most.

Distributions are compared in one of two directions: reverse, KL(policy || reference), or forward, KL(reference ||
policy). Log-probs are finite and computed at the sampling temperature; log-probs of the reference carry no gradient.
For a set q of tokens and the sampled token y,

    KL = L1 + s L2        L1 = sum of `shares` over q, exact
                          L2 = `tail`: 0 if y is in q, else the estimate from y for all tokens outside q.

The value is unbiased for any q independent of y, if y is sampled from the policy and s = 1. It is also unbiased if y is
sampled from mu and s = policy(y) / mu(y). The gradient is unbiased too with the tail `exact`, but not with `upstream`.

Sources: k1 to k3: J. Schulman, "Approximating KL divergence" (2020); k3 as a loss: GRPO (arXiv 2402.03300),
eq. 4; gradients, k3++, k4, k5 and the top k: EMA-PG (arXiv 2602.04417).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlsys.config.algorithm import AlgorithmConfig, CustomKl, FullKl, KlControl, KlTail, SampledKl
from rlsys.config.custom import OwnComponent, bound, described

LOG_RATIO_LIMIT = 20.0
"""Bound of |log-ratio|. exp(20) is 5e8: far above any healthy ratio, far below the float32 maximum."""
VALUE_LIMIT = 10.0
"""Bound of k3, in nats."""
LARGEST_ERROR = 0.2
"""Bound of |KL / target - 1|, the relative error that `kl_control=adaptive` corrects."""

KlEstimator = Callable[[Tensor, Tensor], Tensor]
"""(logprobs, other log-probs) -> divergence per token in nats, all of the same shape, by the formula in the module's table.
Gradients flow into `logprobs`. The result is 0 where both log-probs agree."""


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return -log w."""
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return (log w)^2 / 2."""
    return 0.5 * (other - logprobs).square()


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return w - 1 - log w, at most `VALUE_LIMIT`."""
    log_w = _bounded(other - logprobs)
    return (log_w.expm1() - log_w).clamp(max=VALUE_LIMIT)


def k3_pp(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return r (w - 1 - log w)."""
    return _log_r(logprobs).exp() * k3(logprobs, other)


def k4(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return r sg(-log w)."""
    return _log_r(logprobs).exp() * (logprobs - other).detach()


def k5(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return sg(w) log w + log r."""
    log_w = _bounded(other - logprobs)
    return log_w.exp().detach() * log_w + _log_r(logprobs)


def absolute(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return |log w|."""
    return (other - logprobs).abs()


SAMPLED: Mapping[str, KlEstimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3++": k3_pp,
    "k4": k4,
    "k5": k5,
    "abs": absolute,
}
DISTINCT = ("k1", "k2", "k3", "k5", "abs")
"""Estimators with distinct values. The others repeat a value: k4 has the value of k1, and k3++ the value of k3."""


def sampled_estimator(settings: SampledKl | CustomKl) -> KlEstimator:
    """Return the estimator that compares the log-probs of the sampled token."""
    estimator = bound(settings, SAMPLED)
    return partial(_checked, estimator) if isinstance(estimator, OwnComponent) else estimator


def call_own(own: OwnComponent, logprobs: Tensor, other: Any) -> Any:
    """Call a component from outside of the package in its thread, with the gradient mode and CUDA stream of this one.

    Raises UserError if it changes one of its tensors in place, on which statistics and other terms are computed; the
    backward pass raises one if its gradient is not finite at a trained token.
    """
    grad, stream = torch.is_grad_enabled(), torch.cuda.current_stream() if logprobs.is_cuda else None
    if grad and logprobs.requires_grad:
        trained = logprobs.detach() != 0  # Untrained tokens hold zeros, and their gradient is dropped.
        logprobs = logprobs.view_as(logprobs)
        logprobs.register_hook(partial(_check_gradient, own, trained))

    def call(*arguments: Any) -> Any:
        with torch.set_grad_enabled(grad), torch.cuda.stream(stream):
            return own.call(*arguments)

    tensors = [logprobs, *([other] if isinstance(other, Tensor) else map(partial(getattr, other), other.__slots__))]
    counted = [one for one in tensors if isinstance(one, Tensor) and not one.is_inference()]
    before = [one._version for one in counted]  # torch counts the changes of a tensor and of all of its views.
    found = own.run(call, logprobs, other)
    if [one._version for one in counted] != before:
        raise own.error("changed its arguments in place", "work on copies")
    return found


def check_own(own: OwnComponent, value: Any, logprobs: Tensor, name: str, *, differentiable: bool) -> None:
    """Raise UserError unless `value`, the result `name` of a component, is a tensor like `logprobs`.

    It must have the shape and the device of `logprobs`, and be of real numbers; `differentiable`, a gradient must flow
    from it into `logprobs` if one flows on from there.
    """
    fits = isinstance(value, Tensor) and value.shape == logprobs.shape and value.device == logprobs.device
    if not fits or value.is_complex():
        more = f", {value.dtype} on {value.device}," if isinstance(value, Tensor) else ""
        wanted = f"a tensor of real numbers of shape {list(logprobs.shape)} on {logprobs.device}"
        raise own.error(f"returned {described(value)}{more} as {name} instead of {wanted}")
    if differentiable and torch.is_grad_enabled() and logprobs.requires_grad and not value.requires_grad:
        raise own.error(f"returned a {name} through which no gradient flows into logprobs")


def _check_gradient(own: OwnComponent, trained: Tensor, gradient: Tensor) -> None:
    if not gradient[trained].isfinite().all():
        raise own.error("has a gradient that is not finite at a trained token")


def _checked(estimator: OwnComponent, logprobs: Tensor, other: Tensor) -> Tensor:
    value: Tensor = call_own(estimator, logprobs, other)
    check_own(estimator, value, logprobs, "value", differentiable=True)
    if not value.detach().isfinite().all():
        raise estimator.error("returned a value that is not finite")
    return value


def _log_r(logprobs: Tensor) -> Tensor:
    return logprobs - logprobs.detach()


def _bounded(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_weights(logprobs: Tensor, old_logprobs: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Return the ratio policy / old policy of each token, without gradient, clamped to [`lower`, `upper`].

    None means no bound. Corrects a KL term on tokens that the old policy sampled. The log-ratio is clamped to +-20.
    """
    ratio = _bounded((logprobs - old_logprobs).detach()).exp()
    return ratio if lower is None and upper is None else ratio.clamp(lower, upper)


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probs of the sampled tokens; all tensors are [n]."""

    logprobs: Tensor
    """Log-probs under the policy that is updated; carries gradient."""
    old_logprobs: Tensor
    """Log-probs under the policy before the update; this policy counts as the one that sampled the tokens."""
    ref_logprobs: Tensor
    picked: Tensor
    """bool, True if the sampled token is among the top k."""


@dataclass(frozen=True, slots=True)
class TopKKl:
    """KL from the top k tokens and the sampled token, for `full_reverse` and `full_forward`."""

    config: AlgorithmConfig
    settings: FullKl

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, sampled: SampledLogprobs) -> Tensor:
        """Return the KL [n] in nats from `logprobs` and `ref_logprobs` [n, k] of the top k tokens."""
        config, forward_kl = self.config, self.settings.kind == "full_forward"
        head = shares(logprobs, ref_logprobs, forward_kl).sum(dim=-1)
        if not self.settings.use_tail_sampling:
            return head
        rest = tail(sampled, self.settings.topk_tail, forward_kl)
        if config.use_kl_iw:
            bounds = config.kl_iw_clip_lower, config.kl_iw_clip_upper
            rest = rest * importance_weights(sampled.logprobs, sampled.old_logprobs, *bounds)
        return head + rest


def shares(logprobs: Tensor, ref_logprobs: Tensor, forward_kl: bool) -> Tensor:
    """Return each token's summand of the KL, elementwise; the sum over the vocabulary is the KL.

    reverse: p (log p - log r)        forward: r (log r - log p)        p: policy, r: reference
    """
    if forward_kl:
        return ref_logprobs.exp() * (ref_logprobs - logprobs)
    return logprobs.exp() * (logprobs - ref_logprobs)


def logit_gradient(logprobs: Tensor, ref_logprobs: Tensor, kl: Tensor, forward_kl: bool) -> Tensor:
    """Return the derivative of the KL with respect to the policy's temperature-scaled logits, [n, tokens].

    reverse: p (log p - log r - KL)        forward: p - r        p: policy, r: reference

    `kl` [n] covers the whole vocabulary; `logprobs` and `ref_logprobs` may cover any subset.
    """
    if forward_kl:
        return logprobs.exp() - ref_logprobs.exp()
    return logprobs.exp() * (logprobs - ref_logprobs - kl[:, None])


def join_parts(log_masses: Tensor, ref_log_masses: Tensor, within: Tensor, forward_kl: bool) -> Tensor:
    """Combine the KLs of vocabulary shards into the KL of the whole vocabulary [n], by the chain rule.

    `log_masses` and `ref_log_masses` are the logs of each part's probability mass under the policy and the reference.
    `within` is the KL of the two distributions, both normalised inside the part. All are [parts, n]. The result is the
    KL of the masses plus the mass-weighted mean of `within`.
    """
    masses = (ref_log_masses if forward_kl else log_masses).exp()
    return (shares(log_masses, ref_log_masses, forward_kl) + masses * within).sum(dim=0)


def tail(sampled: SampledLogprobs, kind: KlTail, forward_kl: bool) -> Tensor:
    """Return the sampled token's summand [n]; 0 where the token is among the top k.

    For the sampled token y, policy p and reference r, let w = r(y) / p(y), and let sg(x) be x without gradient:

                 exact                          upstream
    reverse:     p / sg(p) * -log w             p / sg(p) * sg(-log w)
    forward:     sg(w) log w                    sg(w) log w + log p - sg(log p)

    The forward direction clamps log w to +-20; a clamped log w has zero gradient. The gradient of `upstream` is off by
    the gradient of the probability mass outside the top k. In the reverse direction the tail lacks this gradient,
    so the negative of it in the top k sum is not cancelled. In the forward direction the tail has it in excess.
    """
    # Fill before any arithmetic: a picked token then has a gradient of exactly zero.
    logprobs = sampled.logprobs.masked_fill(sampled.picked, 0.0)
    log_w = sampled.ref_logprobs.masked_fill(sampled.picked, 0.0) - logprobs
    # p / sg(p): value 1 with a gradient; 0 where picked.
    unit = (logprobs - logprobs.detach()).exp().masked_fill(sampled.picked, 0.0)
    upstream = kind is KlTail.upstream
    if not forward_kl:
        return unit * -(log_w.detach() if upstream else log_w)
    log_w = _bounded(log_w)
    value = log_w.detach().exp() * log_w
    return value + (logprobs - logprobs.detach()) if upstream else value


@dataclass(slots=True)
class KlController:
    """Coefficient of the KL penalty in the reward: fixed, or adapted towards a target KL.

    A step's rewards use the current `coef`. `observe` then takes the step's KL and sets the coefficient for the next
    step. The coefficient grows while the KL is above the target, and shrinks while the KL is below it:

        coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * episodes / horizon

    Example: target 0.01, KL 0.03, 512 episodes, horizon 10240: coef *= 1 + 0.2 * 0.05 = 1.01.

    Source: arXiv 1909.08593, section 2.2, with episodes / horizon instead of the constant 0.1, as in the code of its
    authors. The coefficient stays positive because `horizon` must exceed a fifth of a step's episodes.
    """

    coef: float
    target: float | None = None
    """Target KL in nats per token. If None, `coef` stays as configured, whatever it was before a resume."""
    horizon: int = 0
    """Episodes over which the coefficient adapts."""

    def observe(self, mean_kl: float, episodes: int) -> None:
        """Update the coefficient after a step of `episodes` with `mean_kl` in nats per token; no-op without a target.

        Raises ValueError if the KL is not finite, or if `horizon` is so short that the coefficient's sign could flip.
        """
        if self.target is None:
            return
        if not math.isfinite(mean_kl):
            raise ValueError(f"A step's mean KL must be finite, got {mean_kl}: check the reference's log-probs.")
        if LARGEST_ERROR * episodes >= self.horizon:
            raise ValueError(
                f"algorithm.kl_horizon={self.horizon} is at most a fifth of a step's {episodes} episodes, so one step "
                "could flip the sign of the KL coefficient: raise it."
            )
        error = min(max(mean_kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * episodes / self.horizon

    def state(self) -> dict[str, float]:
        """Return the current coefficient, for `restore`."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Resume an adaptive coefficient from `state`; target and horizon stay as configured."""
        if self.target is not None:
            self.coef = state["coef"]


def kl_control(config: AlgorithmConfig) -> KlController:
    """Return the controller for `algorithm.kl_control`, starting at `algorithm.kl_coef`."""
    if config.kl_control is KlControl.adaptive:
        return KlController(config.kl_coef, config.kl_target, config.kl_horizon)
    return KlController(config.kl_coef)
