"""KL of policy and reference in the place of each target, from logits that are cut along the vocabulary.

Contract: entry i speaks of target i and row i of the logits. Both models' logits are taken at the sampling
temperature. The gradient flows into the policy's logits, each TP rank's into its own columns, and never
into the reference.

The vocabulary is never gathered: each TP rank tells of each target three numbers (for the whole vocabulary)
or its own k most likely tokens (for the top k), once for all targets. As in `logprobs`, no float32 copy of
all logits is made: targets are worked off in chunks, and the backward pass recomputes what it needs from
the saved logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsys.algorithms.kl import Sampled, TopKKl, join_parts, logit_gradient, shares
from rlsys.config.algorithm import AlgorithmConfig, KlEstimator
from rlsys.config.derived import sums_over_vocabulary
from rlsys.trainer.logprobs import logprobs_at
from rlsys.trainer.vocabulary import VocabShard, chunks, gather, scaled


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

        `logits` [n, local vocabulary]; of the sampled `targets` [n], the policy's `logprobs` as
        `token_logprobs` gave them, the old policy's and the reference's. With a top k, the tokens that were
        picked [n, k], any integer type, and the reference's log-probs at them; without one, the reference's
        logits [n, local vocabulary]. Raises ValueError if what is needed is missing.
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
    """The k most likely tokens in the place of each target, most likely first, and their log-probs.

    `logits` [targets, local vocabulary] give int64 and float32 [targets, k], the same on all TP ranks;
    without gradient. Of tokens that tie for the last place any may be taken. Raises ValueError if the
    vocabulary has fewer than k tokens.
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
