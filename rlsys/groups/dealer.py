"""Deals samples out: micro-batches by token budget, for the data-parallel ranks of one Megatron group."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.config.schema import ParallelConfig
from rlsys.pipeline.batcher import Frame, Plan, Size, fills, plan_micro_batches
from rlsys.pipeline.flops import Flops
from rlsys.pipeline.group import Sample
from rlsys.pipeline.masks import MaskOf, trained_tokens
from rlsys.pipeline.micro_batch import MicroBatch, collate
from rlsys.weights.families import Architecture

BY_TOKENS = Flops(per_token=1.0)
"""Balances tokens, for want of a model."""


class Dealer:
    """Cuts samples for one Megatron group, whose targets are what `mask_of` says."""

    def __init__(
        self,
        parallel: ParallelConfig,
        processes: int,
        budget_tokens: int,
        pad_id: int,
        packed: bool,
        flops: Flops = BY_TOKENS,
        mask_of: MaskOf = trained_tokens,
    ) -> None:
        self._frame = Frame(
            budget_tokens=budget_tokens,
            packed=packed,
            ranks=processes // (parallel.tp * parallel.pp),
            stages=parallel.pp,
            multiple_of=parallel.tp if parallel.sequence_parallel else 1,
        )
        self._pad_id, self._flops, self._mask_of = pad_id, flops, mask_of

    def enough(self, samples: Sequence[Sample]) -> bool:
        """Whether `samples` give every rank at least as many micro-batches as the pipeline has stages.

        With fewer, a call leaves stages or ranks idle from its beginning to its end. A rest may be dealt
        out all the same: what is missing is filled up.
        """
        return fills(self._plan(samples), self._frame.stages)

    def deal(self, samples: Sequence[Sample]) -> tuple[Plan, list[list[MicroBatch]]]:
        """Which sample went where, and the micro-batches of each data-parallel rank."""
        plan = self._plan(samples)
        return plan, [[self._collate([samples[i] for i in batch]) for batch in rank] for rank in plan]

    def _plan(self, samples: Sequence[Sample]) -> Plan:
        trajectories = [sample.trajectory for sample in samples]
        sizes = [Size(len(one.tokens), int(self._mask_of(one).sum())) for one in trajectories]
        return plan_micro_batches(sizes, self._flops, self._frame)

    def _collate(self, samples: Sequence[Sample]) -> MicroBatch:
        return collate(samples, self._pad_id, self._frame.multiple_of, self._frame.packed, self._mask_of)


def flops_of(architecture: Architecture) -> Flops:
    """What this model's sequences cost."""
    return Flops.transformer(
        layers=architecture.layers,
        hidden=architecture.hidden,
        attention=architecture.heads * architecture.head_dim,
        key_value=architecture.kv_heads * architecture.head_dim,
        ffn=architecture.experts_per_token * architecture.expert_ffn or architecture.ffn,
        vocab=architecture.vocab,
    )
