"""Log-probabilities and entropy of tokens from logits that are cut along the vocabulary.

Contract: row i of a result speaks of row i of the logits: log p(token | tokens before it) at the sampling
temperature, which divides the logits in `vocabulary.scaled` and nowhere else.

The vocabulary is never gathered: what travels between TP ranks, once for all targets, is the maximum, the
sum of exponentials and the logit of each token that is asked for (another sum where the entropy is). No
float32 copy of all logits is made, in neither direction: targets are worked off in chunks, and the
backward pass recomputes what it needs from the saved logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.trainer.vocabulary import VocabShard, chunks, owned_columns, reduce, scaled


def token_logprobs(
    logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target and, if asked for, entropy of the distribution that it was drawn from.

    `logits` [targets, local vocabulary] and `targets` [targets] give float32 tensors [targets].
    Gradients flow into `logits`; each TP rank gets those of its own columns.
    """
    logprobs, entropy = _LogProbs.apply(logits, targets[:, None], shard, temperature, with_entropy)
    return logprobs[:, 0], entropy


def logprobs_at(logits: Tensor, tokens: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Log-probs of several tokens in the place of each target.

    `logits` [targets, local vocabulary] and `tokens` [targets, k] give float32 [targets, k]. Gradients
    flow into `logits` as in `token_logprobs`.
    """
    logprobs, _ = _LogProbs.apply(logits, tokens.long(), shard, temperature, False)
    return logprobs


def lay_out(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [trained tokens] at their places in an array like `mask` [rows, width], 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


class _LogProbs(torch.autograd.Function):
    """With l = logits / T, Z = sum exp(l), p = exp(l) / Z and a token y:

    log p(y) = l_y - log Z,               d/dl_j = [j = y] - p_j
    H = log Z - sum_j p_j l_j,            d/dl_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, shard: VocabShard, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`logits` [n, local vocabulary], `tokens` [n, k] -> log-probs [n, k], entropy [n] or None."""
        count, k = tokens.shape
        maxima = logits.new_empty(count, dtype=torch.float32)
        # Of the local columns: the tokens' logits, sum exp(l - maximum) and sum l exp(l - maximum).
        sums = maxima.new_zeros(k + (2 if with_entropy else 1), count)
        for piece in chunks(logits):
            here = scaled(logits[piece], shard, temperature)
            # A rank all of whose columns are padding has none; any number does for its maximum.
            maxima[piece] = here.amax(dim=-1).clamp(min=torch.finfo(torch.float32).min)
            owned, column = owned_columns(tokens[piece], shard)
            sums[:k, piece] = here.gather(1, column).where(owned, 0.0).T
            exponents = (here - maxima[piece, None]).exp_()
            sums[k, piece] = exponents.sum(dim=-1)
            if with_entropy:
                here[:, shard.valid :] = 0.0  # not -inf times a probability of 0
                sums[k + 1, piece] = exponents.mul_(here).sum(dim=-1)
        overall = reduce(maxima.clone(), shard, dist.ReduceOp.MAX)
        sums[k:] *= (maxima - overall).exp()
        reduce(sums, shard, dist.ReduceOp.SUM)
        log_z = overall + sums[k].log()
        entropy = log_z - sums[k + 1] / sums[k] if with_entropy else None
        ctx.save_for_backward(logits, tokens, log_z, entropy)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.set_materialize_grads(False)
        return (sums[:k] - log_z).T, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        """Gradient of the local logits, in their dtype; needs no communication."""
        logits, tokens, log_z, entropy = ctx.saved_tensors
        # Either output may be unused.
        of_logprobs, of_entropy = (None if grad is None else grad / ctx.temperature for grad in grads)
        if of_logprobs is None:
            of_logprobs = log_z.new_zeros(tokens.shape)
        of_all = of_logprobs.sum(dim=-1)
        result = torch.empty_like(logits)
        for piece in chunks(logits):
            log_p = scaled(logits[piece], ctx.shard, ctx.temperature).sub_(log_z[piece, None])
            grad, factor = log_p.exp(), -of_all[piece, None]
            if of_entropy is not None:
                log_p[:, ctx.shard.valid :] = 0.0  # not -inf times a probability of 0
                factor = log_p.add_(entropy[piece, None]).mul_(-of_entropy[piece, None]).add_(factor)
            owned, column = owned_columns(tokens[piece], ctx.shard)
            result[piece] = grad.mul_(factor).scatter_add_(1, column, of_logprobs[piece].where(owned, 0.0))
        return result, None, None, None, None
