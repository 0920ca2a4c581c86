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
    dense = architecture.dense_layers if architecture.experts else layers
    active = (architecture.experts_per_token + architecture.shared_experts) * architecture.expert_ffn
    mlp = 3 * hidden * (dense * architecture.ffn + (layers - dense) * active)
    projections, width = _attention(architecture)
    return Flops(
        per_token=2.0 * (layers * projections + mlp),
        per_target=2.0 * hidden * architecture.vocab,
        per_square=2.0 * (layers - local) * width,
        per_local_square=2.0 * local * width,
        window=architecture.window or 0,
    )


def _attention(architecture: Architecture) -> tuple[int, float]:
    """Return the parameters of a layer's projections, and a: with MLA, the mean of the widths of queries and values."""
    hidden, query = architecture.hidden, architecture.heads * architecture.head_dim
    if not architecture.kv_lora_rank:
        return 2 * hidden * (query + architecture.kv_heads * architecture.head_dim), query
    value = architecture.heads * architecture.v_head_dim
    latent, heads = architecture.kv_lora_rank, architecture.heads
    of_queries = architecture.q_lora_rank * (hidden + query) if architecture.q_lora_rank else hidden * query
    of_keys = hidden * (latent + architecture.qk_rope_head_dim)
    of_keys += latent * heads * (architecture.qk_nope_head_dim + architecture.v_head_dim)
    return of_queries + of_keys + value * hidden, (query + value) / 2
