"""Logits that are cut along the vocabulary, and all that is made of them, on TP ranks that are gloo processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.config.algorithm import AlgorithmConfig, KlEstimator
from rlsys.trainer.model import logprobs as vocabulary
from rlsys.trainer.model.logprobs import (
    VocabShard,
    divergence_of,
    logprobs_at,
    token_logprobs,
    top_tokens,
    whole_vocabulary_kl,
)
from tests.trainer.harness import Group

DIRECTIONS = (KlEstimator.full_reverse, KlEstimator.full_forward)
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Two models' logits, and how they are cut and worked off."""

    tp: int
    vocab: int
    columns: int
    """Of each rank; what is beyond the vocabulary is padding."""
    count: int = 37
    k: int = 5
    temperature: float = 0.7
    dtype: torch.dtype = torch.float32
    chunk_rows: int = 4
    ties: bool = False

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Logits of policy and reference, [count, tp * columns]; padding is what nobody may look at."""
        torch.manual_seed(self.vocab)
        logits = 3 * torch.randn(2, self.count, self.tp * self.columns)
        logits[1] = logits[0] + 0.5 * logits[1]
        logits = logits.round() if self.ties else logits
        logits[..., self.vocab :] = torch.tensor([90.0, float("nan")])[
            torch.arange(self.columns * self.tp - self.vocab) % 2
        ]
        policy, reference = logits.to(self.dtype)
        return policy, reference

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Targets [count]; weights of losses [count, k + 3]; old and reference log-probs [count]."""
        torch.manual_seed(1)
        old, ref = -3 * torch.rand(2, self.count)
        return torch.randint(0, self.vocab, (self.count,)), torch.randn(self.count, self.k + 3), old, ref


def everything(case: Case, shard: VocabShard) -> Results:
    """Every value, and by `d ` and its name the gradient of its weighted sum by the local columns."""
    part = slice(shard.start, shard.start + case.columns) if shard.group is not None else slice(None)
    logits, reference = (tensor[:, part].clone() for tensor in case.tensors())
    logits.requires_grad_()
    reference.requires_grad_()
    targets, weights, old, ref = case.rows()
    results: Results = {}

    def keep(name: str, values: Tensor) -> None:
        results[name] = values.detach()
        weight = weights[:, : values.shape[1]] if values.dim() == 2 else weights[:, 0]
        (results[f"d {name}"], nothing) = torch.autograd.grad(
            (weight * values).sum(), (logits, reference), retain_graph=True, allow_unused=True
        )
        assert nothing is None, "the reference gets no gradient"

    logprobs, entropy = token_logprobs(logits, targets, shard, case.temperature, with_entropy=True)
    assert entropy is not None
    keep("logprobs", logprobs)
    keep("entropy", entropy)
    for name, model in (("policy", logits), ("reference", reference)):
        results[f"{name} tokens"], results[f"{name} top"] = top_tokens(model, shard, case.temperature, case.k)
    # The target twice, which must count twice.
    asked = torch.cat([targets[:, None], targets[:, None], results["reference tokens"]], dim=1)
    keep("at", logprobs_at(logits, asked.int(), shard, case.temperature))
    for estimator in DIRECTIONS:
        forward_kl = estimator is KlEstimator.full_forward
        keep(f"{estimator}", whole_vocabulary_kl(logits, reference, shard, case.temperature, forward_kl))
        config = AlgorithmConfig(kl_estimator=estimator, kl_topk_tokens=case.k, use_kl_iw=True)
        divergence = divergence_of(config)
        assert divergence is not None
        tokens = results["reference tokens" if forward_kl else "policy tokens"]
        values = divergence(
            logits,
            shard,
            case.temperature,
            targets=targets,
            logprobs=logprobs,
            old_logprobs=old,
            ref_logprobs=ref,
            pick_tokens=tokens.int(),
            pick_logprobs=logprobs_at(reference.detach(), tokens, shard, case.temperature),
            ref_logits=None,
        )
        keep(f"{estimator} top", values)
    return results


def sharded(group: Group, cases: Sequence[Case]) -> list[Results]:
    """`everything` of each case, on one of as many TP ranks as there are processes."""
    found = []
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{group.ports[0]}", rank=group.rank, world_size=group.world)
    for case in cases:
        start = group.rank * case.columns
        shard = VocabShard(dist.group.WORLD, start, min(max(case.vocab - start, 0), case.columns))
        vocabulary.CHUNK_ELEMENTS["cpu"] = case.chunk_rows * case.columns
        found.append(everything(case, shard))
    return found
