"""KL divergences: from sampled tokens, from whole distributions or their top k, and the weight of the KL in the reward.

Estimators are elementwise. For a token that the policy sampled let w = other / policy, sg(x) the constant x, and
r = policy / sg(policy), which is 1 and carries a gradient:

| estimator | form                | of                | value unbiased | gradient unbiased          |
|-----------|---------------------|-------------------|----------------|----------------------------|
| k1        | -log w              | KL(policy, other) | yes            | no: zero on average        |
| k2        | (log w)^2 / 2       | KL(policy, other) | no             | yes                        |
| k3        | w - 1 - log w       | KL(policy, other) | yes            | no: of KL(other, policy)   |
| k3++      | r (w - 1 - log w)   | KL(policy, other) | yes            | yes                        |
| k4        | r sg(-log w)        | KL(policy, other) | yes            | yes                        |
| k5        | sg(w) log w + log r | KL(other, policy) | yes            | yes                        |
| abs       | abs(log w)          | neither           | no             | no                         |

Clamps: what grows as w does (k3, k3++, k5) has its log-ratio clamped to +-20 and its value to +-10, as
Search-R1 does to k3, so that one token with a vanishing probability cannot outweigh a batch. Past a clamp of
the value the gradient is zero, and "unbiased" holds short of it: k3 reaches it at w = 13.6 or log w = -11,
k5 at w = 5.7. The others grow no faster than the square of the log-ratio and are not clamped: that would
take the gradient from just the tokens that have gone furthest.

From distributions there are two directions: reverse, KL(policy || reference), and forward, KL(reference || policy).
Log-probs are finite and at the sampling temperature; those of the reference are constants. Of a set of tokens q

    KL = L1 + s L2        L1 = sum of `shares` over q, exact
                          L2 = `tail`: if the sampled token y is not in q, it stands for all that are not

With y drawn from the policy and s = 1, or from another policy mu and s = policy(y) / mu(y), the value is
unbiased for any q that does not depend on y; so is the gradient with the tail `exact`, not with `upstream`.

Sources: k1 to k3: J. Schulman, "Approximating KL divergence" (2020); k3 as a loss: GRPO (arXiv 2402.03300),
eq. 4; gradients, k3++, k4, k5 and the top k: EMA-PG (arXiv 2602.04417).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlsys.config.algorithm import AlgorithmConfig, KlControl, KlEstimator, KlTail

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: far outside any healthy ratio, far inside float32."""
VALUE_LIMIT = 10.0
"""Of the estimators that hold the ratio itself, in nats."""
LARGEST_ERROR = 0.2
"""Relative distance from the target of `kl_control=adaptive` beyond which it makes no difference how far off the KL is."""

K1, K2, K3, K3PP, K4, K5, ABS = (KlEstimator(name) for name in ("k1", "k2", "k3", "k3++", "k4", "k5", "abs"))

DISTINCT = (K1, K2, K3, K5, ABS)
"""Those that differ in value: k4 has that of k1, k3++ that of k3."""


def estimate(estimator: KlEstimator, logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The divergence per token in nats, as the table above has it; gradients flow into `logprobs`.

    `logprobs` and `other_logprobs` have one shape, the result has it too, and it is 0 where they agree.
    Raises ValueError for an estimator that compares distributions, `full_reverse` and `full_forward`.
    """
    log_w = other_logprobs - logprobs
    if estimator is K1:
        return -log_w
    if estimator is K2:
        return 0.5 * log_w.square()
    if estimator is ABS:
        return log_w.abs()
    log_r = logprobs - logprobs.detach()
    if estimator is K4:
        return log_r.exp() * -log_w.detach()
    bounded = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator is K5:
        return (bounded.exp().detach() * bounded + log_r).clamp(-VALUE_LIMIT, VALUE_LIMIT)
    k3 = bounded.expm1() - bounded
    if estimator is K3:
        return k3.clamp(-VALUE_LIMIT, VALUE_LIMIT)
    if estimator is K3PP:
        return (log_r.exp() * k3).clamp(-VALUE_LIMIT, VALUE_LIMIT)
    raise ValueError(f"kl_estimator {estimator} needs whole distributions, not the sampled token's log-probs.")


def importance_weights(logprobs: Tensor, old_logprobs: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """policy / old policy of each token as a constant, cut to [`lower`, `upper`] where these are given.

    Weighs a KL term that was sampled by the old policy as if the policy had sampled it. The log-ratio is clamped to +-20.
    """
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return ratio if lower is None and upper is None else ratio.clamp(lower, upper)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token that was sampled in each place. All [n]."""

    logprobs: Tensor
    """Of the policy that is updated; gradient flows."""
    old_logprobs: Tensor
    """Of the policy that the update sets out from, which drew the token."""
    ref_logprobs: Tensor
    picked: Tensor
    """bool, whether it is one of the tokens that are summed over."""


@dataclass(frozen=True, slots=True)
class TopKKl:
    """The KL from the tokens that were picked and the one that was sampled, by full_reverse or full_forward."""

    config: AlgorithmConfig

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, sampled: Sampled) -> Tensor:
        """`logprobs` and `ref_logprobs` [n, k] of the picked tokens -> KL [n], in nats."""
        config, forward_kl = self.config, self.config.kl_estimator is KlEstimator.full_forward
        head = shares(logprobs, ref_logprobs, forward_kl).sum(dim=-1)
        if not config.kl_use_tail_sampling:
            return head
        rest = tail(sampled, config.kl_topk_tail, forward_kl)
        if config.use_kl_iw:
            bounds = config.kl_iw_clip_lower, config.kl_iw_clip_upper
            rest = rest * importance_weights(sampled.logprobs, sampled.old_logprobs, *bounds)
        return head + rest


def shares(logprobs: Tensor, ref_logprobs: Tensor, forward_kl: bool) -> Tensor:
    """Each token's addend of the KL, which is their sum over the vocabulary. Elementwise.

    reverse: p (log p - log r)        forward: r (log r - log p)
    """
    if forward_kl:
        return ref_logprobs.exp() * (ref_logprobs - logprobs)
    return logprobs.exp() * (logprobs - ref_logprobs)


def logit_gradient(logprobs: Tensor, ref_logprobs: Tensor, kl: Tensor, forward_kl: bool) -> Tensor:
    """Derivative of the KL by the policy's logits at the sampling temperature, [n, tokens].

    reverse: p (log p - log r - KL)        forward: p - r

    `kl` [n] is over the whole vocabulary; the tokens may be any part of it.
    """
    if forward_kl:
        return logprobs.exp() - ref_logprobs.exp()
    return logprobs.exp() * (logprobs - ref_logprobs - kl[:, None])


def join_parts(log_masses: Tensor, ref_log_masses: Tensor, within: Tensor, forward_kl: bool) -> Tensor:
    """The KL from those within each part of a vocabulary that is cut in parts (chain rule of the KL). -> [n]

    All [parts, n]: log of the probability that policy and reference give to a part, and the KL of the
    two once each is normalised within the part. It is the KL of the masses plus the mean of those within.
    """
    masses = (ref_log_masses if forward_kl else log_masses).exp()
    return (shares(log_masses, ref_log_masses, forward_kl) + masses * within).sum(dim=0)


def tail(sampled: Sampled, kind: KlTail, forward_kl: bool) -> Tensor:
    """[n] the addend of the sampled token, 0 where it was picked. With w = r(y) / p(y), sg for a constant,

                exact                          upstream
    reverse     p / sg(p) * -log w             p / sg(p) * sg(-log w)
    forward     sg(w) log w                    sg(w) log w + log p - sg(log p)

    In the forward direction log w is clamped to +-20, past which its gradient is zero. `upstream` is off by
    the gradient of the probability outside of the picks, which is zero only if nothing is picked: it lacks
    it in the reverse direction, where the head has the other half, and has it too much in the forward one.
    """
    # Filled before any arithmetic, so that a picked token gets a gradient of exactly zero.
    logprobs = sampled.logprobs.masked_fill(sampled.picked, 0.0)
    log_w = sampled.ref_logprobs.masked_fill(sampled.picked, 0.0) - logprobs
    # 1 and 0, with the gradients of p / sg(p) and log p.
    unit = (logprobs - logprobs.detach()).exp().masked_fill(sampled.picked, 0.0)
    upstream = kind is KlTail.upstream
    if not forward_kl:
        return unit * -(log_w.detach() if upstream else log_w)
    log_w = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value = log_w.detach().exp() * log_w
    return value + (logprobs - logprobs.detach()) if upstream else value


@dataclass(slots=True)
class KlController:
    """The weight of the KL term in the reward, fixed or steered towards a target.

    `coef` is in force when a step's rewards are worked out; the step's KL is observed afterwards and moves the weight of
    the next one. A steered weight grows while the KL is above the target and shrinks while it is below:

        coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * episodes / horizon

    Source: arXiv 1909.08593, section 2.2, with episodes / horizon in place of its constant 0.1, as in its authors' code.
    The weight stays above 0, because `horizon` must be above a fifth of a step's episodes.
    """

    coef: float
    target: float | None = None
    """Nats a token; None keeps the weight what the config says, also when a run is restored with another one."""
    horizon: int = 0
    """Episodes."""

    def observe(self, mean_kl: float, episodes: int) -> None:
        """Move the weight after a step with this mean KL in nats a token.

        Raises ValueError if the KL is not finite, or if so many episodes could turn the weight's sign.
        """
        if self.target is None:
            return
        if not math.isfinite(mean_kl):
            raise ValueError(f"A step's mean KL must be finite, got {mean_kl}; check the reference's log-probs.")
        if LARGEST_ERROR * episodes >= self.horizon:
            raise ValueError(
                f"algorithm.kl_horizon={self.horizon} is no more than a fifth of a step's {episodes} episodes, so that "
                "one step could turn the weight's sign: raise it."
            )
        error = min(max(mean_kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * episodes / self.horizon

    def state(self) -> dict[str, float]:
        """The weight as it is now, for `restore`."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on with the weight of a `state`, if it is steered; target and horizon are the config's."""
        if self.target is not None:
            self.coef = state["coef"]


def kl_control(config: AlgorithmConfig) -> KlController:
    """The controller that `algorithm.kl_control` names, with `algorithm.kl_coef` to begin with."""
    if config.kl_control is KlControl.adaptive:
        return KlController(config.kl_coef, config.kl_target, config.kl_horizon)
    return KlController(config.kl_coef)
