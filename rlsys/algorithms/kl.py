"""Estimators of a KL divergence from the log-probs of sampled tokens. Pure torch, elementwise."""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: far outside any healthy ratio, far inside float32."""
K3_LIMIT = 10.0
"""One token with a vanishing probability must not outweigh a whole batch."""


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """KL(policy || other) per token from samples of the policy: w - 1 - log w with w = other / policy.

    Both [batch, seq]; the result has their shape, lies in [0, 10] and is 0 where they agree. The
    log-ratio is clamped to +-20 and the value to +-10; past a clamp the gradient is zero.

    Source: J. Schulman, "Approximating KL divergence" (2020), k3; the clamps are those of Search-R1.
    The value is unbiased for the reverse KL. The gradient, as in every GRPO implementation that uses
    k3 as a loss, is that of the forward KL.
    """
    log_ratio = (other_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (log_ratio.expm1() - log_ratio).clamp(-K3_LIMIT, K3_LIMIT)
