"""Log-probabilities and entropy of tokens from logits that are cut along the vocabulary.

Contract: entry i of a result speaks of target i, log p(targets[i] | tokens before it) at the sampling
temperature, and its logits are row i. Temperature divides the logits here and nowhere else.

The vocabulary is never gathered: three numbers a target travel between TP ranks (maximum, sum of
exponentials, the target's logit; a fourth where the entropy is asked for), once for all targets. No
float32 copy of all logits is made, in neither direction: targets are worked off in chunks, and the
backward pass recomputes what it needs from the saved logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
"""Logits worked on at a time, in float32: on a CPU what a core's cache holds, 128 MiB on a GPU."""


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
    logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target and, if asked for, entropy of the distribution that it was drawn from.

    `logits` [targets, local vocabulary] and `targets` [targets] give float32 tensors [targets].
    Gradients flow into `logits`; each TP rank gets those of its own columns.
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, shard, temperature, with_entropy)
    return logprobs, entropy


def lay_out(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [trained tokens] at their places in an array like `mask` [rows, width], 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


class _TokenLogprobs(torch.autograd.Function):
    """With l = logits / T, Z = sum exp(l), p = exp(l) / Z and target y:

    log p(y) = l_y - log Z,               d/dl_j = [j = y] - p_j
    H = log Z - sum_j p_j l_j,            d/dl_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`logits` [n, local vocabulary], `targets` [n] -> log-probs [n], entropy [n] or None."""
        maxima = logits.new_empty(len(targets), dtype=torch.float32)
        # The target's logit, sum exp(l - maximum) and sum l exp(l - maximum), of the local columns.
        sums = maxima.new_zeros(3 if with_entropy else 2, len(targets))
        for piece in _chunks(logits):
            scaled = _scaled(logits[piece], shard, temperature)
            # A rank all of whose columns are padding has none; any number does for its maximum.
            maxima[piece] = scaled.amax(dim=-1).clamp(min=torch.finfo(torch.float32).min)
            owned, column = _owned_columns(targets[piece], shard)
            sums[0, piece] = scaled.gather(1, column[:, None])[:, 0].where(owned, 0.0)
            exponents = (scaled - maxima[piece, None]).exp_()
            sums[1, piece] = exponents.sum(dim=-1)
            if with_entropy:
                scaled[:, shard.valid :] = 0.0  # not -inf times a probability of 0
                sums[2, piece] = exponents.mul_(scaled).sum(dim=-1)
        overall = _reduce(maxima.clone(), shard, dist.ReduceOp.MAX)
        sums[1:] *= (maxima - overall).exp()
        target, z, *weighted = _reduce(sums, shard, dist.ReduceOp.SUM)
        log_z = overall + z.log()
        entropy = log_z - weighted[0] / z if with_entropy else None
        ctx.save_for_backward(logits, targets, log_z, entropy)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.set_materialize_grads(False)
        return target - log_z, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        """Gradient of the local logits, in their dtype; needs no communication."""
        logits, targets, log_z, entropy = ctx.saved_tensors
        # Either output may be unused.
        of_logprobs, of_entropy = (None if grad is None else grad / ctx.temperature for grad in grads)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(log_z)
        result = torch.empty_like(logits)
        for piece in _chunks(logits):
            log_p = _scaled(logits[piece], ctx.shard, ctx.temperature).sub_(log_z[piece, None])
            grad, factor = log_p.exp(), -of_logprobs[piece, None]
            if of_entropy is not None:
                log_p[:, ctx.shard.valid :] = 0.0  # not -inf times a probability of 0
                factor = log_p.add_(entropy[piece, None]).mul_(-of_entropy[piece, None]).add_(factor)
            owned, column = _owned_columns(targets[piece], ctx.shard)
            of_target = of_logprobs[piece].where(owned, 0.0)
            result[piece] = grad.mul_(factor).scatter_add_(1, column[:, None], of_target[:, None])
        return result, None, None, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows of `logits` [n, local vocabulary]."""
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
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
    """`values` over all TP ranks, in place. Ranks have the same targets, so none calls in vain."""
    if shard.group is not None and values.numel():
        dist.all_reduce(values, op=operation, group=shard.group)
    return values
