"""What a sequence costs to compute, from the shape of the model. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one forward pass of a sequence.

    A matrix of p parameters multiplies and adds once for each of them, 2 p operations a token. Causal
    attention of width a (heads times their dimension) compares n tokens with n / 2 others on average, and
    sums as many values: 2 products, 2 a operations a pair, n^2 / 2 pairs, 2 a n^2 a layer. Norms, rotations
    and the softmax grow with n alone and are a hundredth of it. So

        flops(n tokens, k targets) = 2 p_layers n + 2 p_output k + 2 layers a n^2

    where the output layer runs only on the k positions whose next token is trained. A backward pass costs
    twice as much for each term, so it changes no comparison.
    """

    per_token: float
    per_target: float = 0.0
    per_square: float = 0.0

    @classmethod
    def transformer(cls, layers: int, hidden: int, attention: int, key_value: int, ffn: int, vocab: int) -> Flops:
        """Of a model with gated MLPs; `attention` and `key_value` are heads times their dimension."""
        projections = 2 * hidden * (attention + key_value)
        mlp = 3 * hidden * ffn
        return cls(
            per_token=2.0 * layers * (projections + mlp),
            per_target=2.0 * hidden * vocab,
            per_square=2.0 * layers * attention,
        )

    def of(self, tokens: int, targets: int) -> float:
        """Of a sequence of `tokens` tokens, `targets` of which are trained."""
        return self.per_token * tokens + self.per_target * targets + self.per_square * tokens**2
