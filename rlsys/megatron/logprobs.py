"""Log-probabilities and entropy of tokens from logits that are cut along the vocabulary.

Contract: entry [b, t] of a result speaks of token t as a target, log p(tokens[t] | tokens[< t]) at the
sampling temperature; column 0 is 0. Temperature divides the logits here and nowhere else.

The vocabulary is never gathered: three numbers a position travel between TP ranks (maximum, sum of
exponentials, the target's logit; a fourth for the entropy). No float32 copy of all logits is made, in
neither direction: positions are worked off in chunks, and the backward pass recomputes what it needs
from the saved logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 2**25
"""Logits worked on at a time: 128 MiB in float32."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which part of the vocabulary a TP rank holds."""

    group: dist.ProcessGroup | None
    """The TP group; None for a rank that holds all of it."""
    start: int
    """Token of the first local column."""
    valid: int
    """Local columns that are tokens; those after them are padding and have no probability."""


def token_logprobs(
    logits: Tensor, tokens: Tensor, shard: VocabShard, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of the distribution that it was drawn from.

    `logits` [batch, seq, local vocabulary] and `tokens` [batch, seq] give two float32 tensors
    [batch, seq]. Gradients flow into `logits`; each TP rank gets those of its own columns.
    """
    batch, seq, width = logits.shape
    # The prediction at position t is of token t + 1; the last has no target and is cut off below.
    targets = tokens.roll(-1, dims=1)
    logprobs, entropy = _TokenLogprobs.apply(
        logits.reshape(-1, width), targets.reshape(-1), shard, temperature
    )

    def aligned(values: Tensor) -> Tensor:
        predicted = values.view(batch, seq)[:, :-1]
        return torch.cat([predicted.new_zeros(batch, 1), predicted], dim=1)

    return aligned(logprobs), aligned(entropy)


class _TokenLogprobs(torch.autograd.Function):
    """With l = logits / T, Z = sum exp(l), p = exp(l) / Z and target y:

    log p(y) = l_y - log Z,               d/dl_j = [j = y] - p_j
    H = log Z - sum_j p_j l_j,            d/dl_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """`logits` [n, local vocabulary], `targets` [n] -> log-probs [n], entropy [n]."""
        logprobs = logits.new_empty(len(targets), dtype=torch.float32)
        log_z, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for piece in _chunks(logits):
            scaled = _scaled(logits[piece], shard, temperature)
            maximum = _reduce(scaled.amax(dim=-1), shard, dist.ReduceOp.MAX)
            exponents = (scaled - maximum[:, None]).exp_()
            owned, column = _owned_columns(targets[piece], shard)
            target = scaled.gather(1, column[:, None])[:, 0].where(owned, 0.0)
            # The probability 0 of a padding column times -inf would be NaN.
            scaled[:, shard.valid :] = 0.0
            weighted = torch.einsum("nv,nv->n", exponents, scaled)
            sums = _reduce(torch.stack([exponents.sum(dim=-1), weighted, target]), shard, dist.ReduceOp.SUM)
            log_z[piece] = maximum + sums[0].log()
            logprobs[piece] = sums[2] - log_z[piece]
            entropy[piece] = log_z[piece] - sums[1] / sums[0]
        ctx.save_for_backward(logits, targets, log_z, entropy)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        """Gradient of the local logits, in their dtype; needs no communication."""
        logits, targets, log_z, entropy = ctx.saved_tensors
        # Either output may be unused.
        of_logprobs, of_entropy = (None if grad is None else grad / ctx.temperature for grad in grads)
        result = torch.empty_like(logits)
        for piece in _chunks(logits):
            log_p = _scaled(logits[piece], ctx.shard, ctx.temperature).sub_(log_z[piece, None])
            grad = log_p.exp()
            if of_entropy is not None:
                log_p[:, ctx.shard.valid :] = 0.0
                surprise = log_p.add_(entropy[piece, None]).mul_(-of_entropy[piece, None])
                grad.mul_(surprise if of_logprobs is None else surprise.sub_(of_logprobs[piece, None]))
            elif of_logprobs is not None:
                grad.mul_(-of_logprobs[piece, None])
            if of_logprobs is not None:
                owned, column = _owned_columns(targets[piece], ctx.shard)
                grad.scatter_add_(1, column[:, None], of_logprobs[piece].where(owned, 0.0)[:, None])
            result[piece] = grad
        return result, None, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of the positions of `logits` [n, local vocabulary]."""
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return (slice(start, start + size) for start in range(0, logits.shape[0], size))


def _scaled(logits: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """A float32 copy at the temperature, padding columns at -inf."""
    scaled = logits.float() * (1.0 / temperature)
    scaled[:, shard.valid :] = float("-inf")
    return scaled


def _owned_columns(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Whether each target is in the local columns, and its column (0 where it is not)."""
    column = targets - shard.start
    owned = (column >= 0) & (column < shard.valid)
    return owned, column.where(owned, 0)


def _reduce(values: Tensor, shard: VocabShard, operation: Any) -> Tensor:
    if shard.group is not None:
        dist.all_reduce(values, op=operation, group=shard.group)
    return values
