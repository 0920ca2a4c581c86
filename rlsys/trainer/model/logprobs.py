"""Log-probs, entropy and KL of target tokens from logits sharded along the vocabulary.

Row i of every result belongs to row i of the logits [targets, local vocabulary]; all TP ranks pass the same targets. The
columns are the rank's tokens, then padding with probability 0. Logits are divided by the sampling temperature in `scaled`
and nowhere else.

    TP rank 0   logits of tokens 0 .. v/2        each rank reduces its columns to a few numbers a target
    TP rank 1   logits of tokens v/2 .. v        (maximum, sum of exponentials, target logit), which are all-reduced

The full vocabulary is never gathered. No float32 copy of all logits exists in either direction: targets are processed in
chunks, and the backward pass recomputes from the saved logits what it needs. Gradients flow into the policy's logits,
on each TP rank into its own columns, and never into the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.algorithms.kl import Sampled, TopKKl, join_parts, logit_gradient, shares
from rlsys.config.algorithm import AlgorithmConfig, KlEstimator
from rlsys.config.derived import sums_over_vocabulary

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
"""Logits worked on at a time, in float32: on a CPU what a core's cache holds, 128 MiB on a GPU."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The part of the vocabulary that a TP rank holds."""

    group: dist.ProcessGroup | None
    """The TP group; None for a rank that holds all of it."""
    start: int
    """Token of the first local column."""
    valid: int
    """Local columns that are tokens; those after them are padding and have no probability."""


def chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows of `logits` [n, local vocabulary]."""
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    return (slice(start, start + size) for start in range(0, logits.shape[0], size))


def scaled(logits: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """A float32 copy at the temperature, padding columns at -inf."""
    result = logits.float() * (1.0 / temperature)
    result[:, shard.valid :] = float("-inf")
    return result


def owned_columns(tokens: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """A mask of the tokens in the local columns, and the column of each (0 where it is not)."""
    column = tokens - shard.start
    owned = (column >= 0) & (column < shard.valid)
    return owned, column.where(owned, 0)


def reduce(values: Tensor, shard: VocabShard, operation: Any) -> Tensor:
    """`values` over all TP ranks, in place. Ranks have the same targets, so none calls in vain."""
    if shard.group is not None and values.numel():
        dist.all_reduce(values, op=operation, group=shard.group)
    return values


def gather(values: Tensor, shard: VocabShard) -> Tensor:
    """The `values` of all TP ranks, [ranks, *shape], in the order of the vocabulary."""
    if shard.group is None:
        return values[None]
    result = values.new_empty(dist.get_world_size(shard.group), *values.shape)
    if values.numel():
        dist.all_gather_into_tensor(result.view(-1), values.contiguous().view(-1), group=shard.group)
    return result


def token_logprobs(
    logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target and, if asked for, entropy of the distribution that it was drawn from: float32 [targets].

    `logits` [targets, local vocabulary], `targets` [targets]; gradients flow into the local columns.
    """
    logprobs, entropy = _LogProbs.apply(logits, targets[:, None], shard, temperature, with_entropy)
    return logprobs[:, 0], entropy


def logprobs_at(logits: Tensor, tokens: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Log-probs float32 [targets, k] of several `tokens` [targets, k] for each target; see `token_logprobs`."""
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


@dataclass(frozen=True, slots=True)
class Divergence:
    """The KL that a loss adds where it is computed from distributions. Picklable."""

    forward_kl: bool
    """KL(reference || policy), not KL(policy || reference)."""
    top_k: TopKKl | None
    """None sums over the whole vocabulary."""

    def __call__(
        self,
        logits: Tensor,
        shard: VocabShard,
        temperature: float,
        *,
        targets: Tensor,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor,
        pick_tokens: Tensor | None,
        pick_logprobs: Tensor | None,
        ref_logits: Tensor | None,
    ) -> Tensor:
        """KL in the place of each target, [n] float32, in nats; gradient flows into `logits` and `logprobs`.

        `logits` [n, local vocabulary]; the log-probs are of the sampled `targets` [n]. With a top k, picked tokens
        [n, k] and the reference's log-probs at them; else its logits. Raises ValueError if what is needed is missing.
        """
        if self.top_k is None:
            if ref_logits is None:
                raise ValueError("A KL over the whole vocabulary needs the reference's logits.")
            return whole_vocabulary_kl(logits, ref_logits, shard, temperature, self.forward_kl)
        if pick_tokens is None or pick_logprobs is None:
            raise ValueError("A KL over the top k needs the tokens that were picked and their log-probs.")
        picked = (pick_tokens == targets[:, None]).any(dim=-1)
        sampled = Sampled(logprobs, old_logprobs, ref_logprobs, picked)
        return self.top_k(logprobs_at(logits, pick_tokens, shard, temperature), pick_logprobs, sampled)


def divergence_of(config: AlgorithmConfig) -> Divergence | None:
    """The KL that `config` asks for; None if its estimator needs the sampled token's log-probs alone."""
    if not sums_over_vocabulary(config):
        return None
    top_k = None if config.kl_topk_tokens is None else TopKKl(config)
    return Divergence(config.kl_estimator is KlEstimator.full_forward, top_k)


def whole_vocabulary_kl(
    logits: Tensor, ref_logits: Tensor, shard: VocabShard, temperature: float, forward_kl: bool
) -> Tensor:
    """KL over all tokens in the place of each target: [n] float32 from two [n, local vocabulary]."""
    return _WholeVocabularyKl.apply(logits, ref_logits, shard, temperature, forward_kl)


@torch.no_grad()
def top_tokens(logits: Tensor, shard: VocabShard, temperature: float, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens in the place of each target, most likely first, and their log-probs; without gradient.

    `logits` [targets, local vocabulary] give int64 and float32 [targets, k], alike on all TP ranks. Raises ValueError
    if the vocabulary has fewer than k tokens.
    """
    count, columns = logits.shape
    candidates = min(k, columns)
    # The logits of this rank's candidates, and log of the sum of exponentials of all its columns.
    values = logits.new_empty(count, candidates + 1, dtype=torch.float32)
    tokens = logits.new_empty(count, candidates, dtype=torch.long)
    for piece in chunks(logits):
        here = scaled(logits[piece], shard, temperature)
        values[piece, :candidates], tokens[piece] = here.topk(candidates, dim=-1)
        values[piece, candidates] = here.logsumexp(dim=-1)
    tokens += shard.start
    all_values, all_tokens = gather(values, shard), gather(tokens, shard)
    log_z = all_values[..., candidates].logsumexp(dim=0)
    merged = all_values[..., :candidates].transpose(0, 1).flatten(1)
    best, places = merged.topk(min(k, merged.shape[1]), dim=-1)
    if best.shape[1] < k or best.isneginf().any():
        raise ValueError(f"The top {k} tokens were asked for, but the vocabulary has fewer; lower k.")
    return all_tokens.transpose(0, 1).flatten(1).gather(1, places), best - log_z[:, None]


class _WholeVocabularyKl(torch.autograd.Function):
    """Each rank computes the KL within its columns; `join_parts` makes one of all, `logit_gradient` derives it."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ref_logits: Tensor, shard: VocabShard, temperature: float, forward_kl: bool
    ) -> Tensor:
        """`logits` and `ref_logits` [n, local vocabulary] -> [n]."""
        # Of the local columns: log of both sums of exponentials, and the KL of what they normalise.
        local = logits.new_empty(3, len(logits), dtype=torch.float32)
        for piece in chunks(logits):
            log_ps = []
            for row, part in enumerate((logits, ref_logits)):
                here = scaled(part[piece], shard, temperature)[:, : shard.valid]
                # A rank all of whose columns are padding has a mass of 0, but its logarithm must be a number.
                log_z = here.logsumexp(dim=-1).clamp(min=torch.finfo(torch.float32).min)
                local[row, piece] = log_z
                log_ps.append(here.sub_(log_z[:, None]))
            local[2, piece] = shares(log_ps[0], log_ps[1], forward_kl).sum(dim=-1)
        of_ranks = gather(local, shard)
        log_zs = of_ranks[:, :2].logsumexp(dim=0)
        log_masses = of_ranks[:, :2] - log_zs
        kl = join_parts(log_masses[:, 0], log_masses[:, 1], of_ranks[:, 2], forward_kl)
        ctx.save_for_backward(logits, ref_logits, log_zs, kl)
        ctx.shard, ctx.temperature, ctx.forward_kl = shard, temperature, forward_kl
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Gradient of the policy's local logits, in their dtype; needs no communication."""
        logits, ref_logits, log_zs, kl = ctx.saved_tensors
        factors = grads[0] / ctx.temperature
        valid = ctx.shard.valid
        result = torch.empty_like(logits)
        result[:, valid:] = 0.0
        for piece in chunks(logits):
            log_p, log_r = (
                scaled(part[piece], ctx.shard, ctx.temperature)[:, :valid].sub_(log_z[piece, None])
                for part, log_z in zip((logits, ref_logits), log_zs, strict=True)
            )
            grad = logit_gradient(log_p, log_r, kl[piece], ctx.forward_kl)
            result[piece, :valid] = grad.mul_(factors[piece, None])
        return result, None, None, None, None
