"""Computes log-probs, entropy and KL of target tokens from logits sharded along the vocabulary.

Row i of a result belongs to row i of the logits [targets, local vocabulary]; all TP ranks pass the same targets.
Columns are the rank's tokens, then padding with probability 0. Logits are divided by the sampling temperature only in
`scaled`.

    TP rank 0   logits of tokens 0 .. v/2 - 1      each rank reduces its columns to a few numbers per target
    TP rank 1   logits of tokens v/2 .. v - 1      (v: padded vocabulary), which the ranks exchange:

    log-prob:              maximum, sum of exponentials, target logit (all-reduced)
    entropy:               the same, and sum of logit x exponential (all-reduced)
    top k:                 k largest logits and tokens, log of the sum of exponentials (gathered)
    whole-vocabulary KL:   log of both sums of exponentials, KL within the columns (gathered).

The full vocabulary is never gathered. Float32 copies cover at most `CHUNK_ELEMENTS` logits, or one row, at a time:
targets are processed in chunks, and the backward pass recomputes its intermediates from the saved logits. Gradients
flow into the policy's logits (on each TP rank, into its own columns) and never into the logits of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.algorithms.kl import SampledLogprobs, TopKKl, join_parts, logit_gradient, shares
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.derived import full_kl

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
"""Logits per chunk, in float32: 1 MiB on a CPU, about a core's cache, and 128 MiB on a GPU."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Shard of the vocabulary on one TP rank."""

    group: dist.ProcessGroup | None
    """TP group; None if this rank holds the whole vocabulary."""
    start: int
    """Token of the first local column."""
    valid: int
    """Number of local columns that are tokens; the columns after them are padding with probability 0."""


def chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of `logits` [n, local vocabulary], at least one row each."""
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    return (slice(start, start + size) for start in range(0, logits.shape[0], size))


def scaled(logits: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Return a float32 copy of `logits` divided by `temperature`, with padding columns at -inf."""
    result = logits.float() * (1.0 / temperature)
    result[:, shard.valid :] = float("-inf")
    return result


def owned_columns(tokens: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the mask of tokens in the local columns and each token's column, which is 0 for tokens of other ranks."""
    column = tokens - shard.start
    owned = (column >= 0) & (column < shard.valid)
    return owned, column.where(owned, 0)


def reduce(values: Tensor, shard: VocabShard, operation: Any) -> Tensor:
    """All-reduce `values` over the TP ranks, in place; no-op for empty `values`, which are then empty on all ranks."""
    if shard.group is not None and values.numel():
        dist.all_reduce(values, op=operation, group=shard.group)
    return values


def gather(values: Tensor, shard: VocabShard) -> Tensor:
    """Return the `values` of all TP ranks, [ranks, *shape], in the order of the vocabulary."""
    if shard.group is None:
        return values[None]
    result = values.new_empty(dist.get_world_size(shard.group), *values.shape)
    if values.numel():
        dist.all_gather_single(result.view(-1), values.contiguous().view(-1), group=shard.group)
    return result


def token_logprobs(
    logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return each target's log-prob and, if `with_entropy`, the entropy at its position, else None; float32 [targets].

    `logits` is [targets, local vocabulary], `targets` is [targets]. Gradients flow into the local columns.
    """
    logprobs, entropy = _LogProbs.apply(logits, targets[:, None], shard, temperature, with_entropy)
    return logprobs[:, 0], entropy


def logprobs_at(logits: Tensor, tokens: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Return the log-probs of `tokens` [targets, k] at each target position, float32 [targets, k].

    See `token_logprobs` for the other arguments.
    """
    logprobs, _ = _LogProbs.apply(logits, tokens.long(), shard, temperature, False)
    return logprobs


def lay_out(values: Tensor, mask: Tensor) -> Tensor:
    """Scatter `values` [trained tokens] to the True positions of `mask` [rows, width]; 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


class _LogProbs(torch.autograd.Function):
    """Log-probs and entropy over a sharded vocabulary.

    Let l = logits / T, Z = sum exp(l) and p = exp(l) / Z. The log-prob of a token y and the entropy H, with gradients:

        log p(y) = l_y - log Z,               d/dl_j = [j = y] - p_j
        H = log Z - sum_j p_j l_j,            d/dl_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, shard: VocabShard, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs [n, k] and entropy [n] or None from `logits` [n, local vocabulary] and `tokens` [n, k]."""
        count, k = tokens.shape
        maxima = logits.new_empty(count, dtype=torch.float32)
        # Rows, over the local columns: the k tokens' logits, sum exp(l - maximum), sum l exp(l - maximum).
        sums = maxima.new_zeros(k + (2 if with_entropy else 1), count)
        for piece in chunks(logits):
            here = scaled(logits[piece], shard, temperature)
            # If all columns are padding, the maximum is -inf; any finite number works instead.
            maxima[piece] = here.amax(dim=-1).clamp(min=torch.finfo(torch.float32).min)
            owned, column = owned_columns(tokens[piece], shard)
            sums[:k, piece] = here.gather(1, column).where(owned, 0.0).T
            exponents = (here - maxima[piece, None]).exp_()
            sums[k, piece] = exponents.sum(dim=-1)
            if with_entropy:
                here[:, shard.valid :] = 0.0  # Avoids -inf times a probability of 0.
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
        """Return the gradient of the local logits, in their dtype, without communication."""
        logits, tokens, log_z, entropy = ctx.saved_tensors
        # The gradient of an unused output is None.
        of_logprobs, of_entropy = (None if grad is None else grad / ctx.temperature for grad in grads)
        if of_logprobs is None:
            of_logprobs = log_z.new_zeros(tokens.shape)
        of_all = of_logprobs.sum(dim=-1)
        result = torch.empty_like(logits)
        for piece in chunks(logits):
            log_p = scaled(logits[piece], ctx.shard, ctx.temperature).sub_(log_z[piece, None])
            grad, factor = log_p.exp(), -of_all[piece, None]
            if of_entropy is not None:
                log_p[:, ctx.shard.valid :] = 0.0  # Avoids -inf times a probability of 0.
                factor = log_p.add_(entropy[piece, None]).mul_(-of_entropy[piece, None]).add_(factor)
            owned, column = owned_columns(tokens[piece], ctx.shard)
            result[piece] = grad.mul_(factor).scatter_add_(1, column, of_logprobs[piece].where(owned, 0.0))
        return result, None, None, None, None


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL term of a loss, computed from distributions. Picklable."""

    forward_kl: bool
    """True: KL(reference || policy). False: KL(policy || reference)."""
    top_k: TopKKl | None
    """Sum over the top k; None for the whole vocabulary."""

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
        """Return the KL at each target position, float32 [n], in nats; gradient flows into `logits` and `logprobs`.

        `logits` is [n, local vocabulary]; the three log-probs [n] belong to the sampled `targets` [n]. A KL over the
        top k needs `pick_tokens` [n, k] and `pick_logprobs`, the reference's log-probs of these tokens; a KL over the
        whole vocabulary needs `ref_logits`. Raises ValueError if an input that the KL needs is None.
        """
        if self.top_k is None:
            if ref_logits is None:
                raise ValueError("A KL over the whole vocabulary needs ref_logits.")
            return whole_vocabulary_kl(logits, ref_logits, shard, temperature, self.forward_kl)
        if pick_tokens is None or pick_logprobs is None:
            raise ValueError("A KL over the top k needs pick_tokens and pick_logprobs.")
        picked = (pick_tokens == targets[:, None]).any(dim=-1)
        sampled = SampledLogprobs(logprobs, old_logprobs, ref_logprobs, picked)
        return self.top_k(logprobs_at(logits, pick_tokens, shard, temperature), pick_logprobs, sampled)


def divergence_of(config: AlgorithmConfig) -> Divergence | None:
    """Return the KL term over distributions that `config` selects; None if `config` selects no such term."""
    full = full_kl(config)
    if full is None:
        return None
    return Divergence(full.kind == "full_forward", None if full.topk_tokens is None else TopKKl(config, full))


def whole_vocabulary_kl(
    logits: Tensor, ref_logits: Tensor, shard: VocabShard, temperature: float, forward_kl: bool
) -> Tensor:
    """Return the KL over the whole vocabulary at each target position, float32 [n].

    Both logits are [n, local vocabulary].
    """
    return _WholeVocabularyKl.apply(logits, ref_logits, shard, temperature, forward_kl)


@torch.no_grad()
def top_tokens(logits: Tensor, shard: VocabShard, temperature: float, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most likely tokens at each target position and their log-probs, most likely first.

    `logits` is [targets, local vocabulary]. The results are int64 and float32 [targets, k], equal on all TP ranks,
    without gradient. Raises ValueError if the vocabulary has fewer than k tokens.
    """
    count, columns = logits.shape
    candidates = min(k, columns)
    # Columns: logits of this rank's candidates, then log of the sum of exponentials over all local columns.
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
        raise ValueError(f"k={k} exceeds the number of tokens in the vocabulary: lower k.")
    return all_tokens.transpose(0, 1).flatten(1).gather(1, places), best - log_z[:, None]


class _WholeVocabularyKl(torch.autograd.Function):
    """KL over a sharded vocabulary: each rank computes the KL within its columns, and `join_parts` combines them."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ref_logits: Tensor, shard: VocabShard, temperature: float, forward_kl: bool
    ) -> Tensor:
        """Return the KL [n] from `logits` and `ref_logits` [n, local vocabulary]."""
        # Rows, over the local columns: logs of the two sums of exponentials, then the KL of the two distributions, both
        # normalised within these columns.
        local = logits.new_empty(3, len(logits), dtype=torch.float32)
        for piece in chunks(logits):
            log_ps = []
            for row, part in enumerate((logits, ref_logits)):
                here = scaled(part[piece], shard, temperature)[:, : shard.valid]
                # If all columns are padding, the mass is 0; its logarithm must still be finite.
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
        """Return the gradient of the policy's local logits, in their dtype, without communication."""
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
