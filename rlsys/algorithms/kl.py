"""Estimators of a KL divergence from the log-probs of sampled tokens. Pure torch, elementwise.

For a token that the policy sampled let w = other / policy, r = policy / sg(policy), which is 1 and carries a
gradient, and sg(x) the constant x:

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

Sources: k1 to k3: J. Schulman, "Approximating KL divergence" (2020); k3 as a loss: GRPO (arXiv 2402.03300),
eq. 4; gradients, k3++, k4 and k5: EMA-PG (arXiv 2602.04417).
"""

from __future__ import annotations

from torch import Tensor

from rlsys.config.algorithm import KlEstimator

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: far outside any healthy ratio, far inside float32."""
VALUE_LIMIT = 10.0
"""Of the estimators that hold the ratio itself, in nats."""

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

    Weighs a KL term that was sampled by the old policy as if the policy had sampled it. The log-ratio is
    clamped to +-20. Source: EMA-PG (arXiv 2602.04417).
    """
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return ratio if lower is None and upper is None else ratio.clamp(lower, upper)
