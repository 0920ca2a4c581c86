"""Counts the floating-point operations of a model. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.weights.weight_map import Architecture


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one forward pass of a sequence; a backward pass costs twice as much per term.

        flops(n tokens, k targets) = 2 p_layers n + 2 p_output k + 2 a (global n^2 + local m (2 n - m)), m = min(n, window)

    A matrix of p parameters takes 2 p operations per token. Causal attention of width a (heads x head dimension)
    compares each token with n / 2 others on average and sums as many values; in the local layers, a token beyond the
    window is compared with m. The output layer runs only at the k positions before targets. Norms, rotary positions and
    softmax are neglected, about 1 % of the total.
    """

    per_token: float
    per_target: float = 0.0
    per_square: float = 0.0
    per_local_square: float = 0.0
    """The same of the layers that attend within `window`."""
    window: int = 0

    def of(self, tokens: int, targets: int) -> float:
        """Return the cost of a sequence with `tokens` tokens and `targets` targets."""
        within = min(tokens, self.window)
        squares = self.per_square * tokens**2 + self.per_local_square * within * (2 * tokens - within)
        return self.per_token * tokens + self.per_target * targets + squares


def flops_of(architecture: Architecture) -> Flops:
    """Return the costs of a model with gated MLPs; a mixture of experts counts its active experts only."""
    layers, hidden, local = architecture.layers, architecture.hidden, len(architecture.local_layers)
    attention, key_value = (heads * architecture.head_dim for heads in (architecture.heads, architecture.kv_heads))
    ffn = architecture.experts_per_token * architecture.expert_ffn or architecture.ffn
    return Flops(
        per_token=2.0 * layers * (2 * hidden * (attention + key_value) + 3 * hidden * ffn),
        per_target=2.0 * hidden * architecture.vocab,
        per_square=2.0 * (layers - local) * attention,
        per_local_square=2.0 * local * attention,
        window=architecture.window or 0,
    )
