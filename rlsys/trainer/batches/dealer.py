"""Deals samples out: micro-batches by token budget, for the data-parallel ranks of one Megatron group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from rlsys.config.schema import ParallelConfig
from rlsys.data.group import Sample
from rlsys.data.trajectory import MaskOf, trained_tokens
from rlsys.trainer.batches.batcher import Frame, Plan, Size, fills, plan_micro_batches
from rlsys.trainer.batches.context import sequence_chunks
from rlsys.trainer.batches.flops import Flops
from rlsys.trainer.batches.micro_batch import MicroBatch, collate
from rlsys.weights.families import Architecture

BY_TOKENS = Flops(per_token=1.0)
"""Balances tokens, for want of a model."""
FP8_TOKENS = 16
"""Tokens that a matrix product in FP8 takes, or a multiple of them: cuBLAS aligns operands to 16 bytes, and with the
gradient of weights the tokens are a row's length."""


@dataclass(frozen=True, slots=True)
class Load:
    """How full the micro-batches of a call are, over all data-parallel ranks."""

    micro_batches: int
    """Those without a sample, which keep a rank in step with the others, included."""
    tokens: int
    """Of the samples."""
    room: int
    """The same with padding: what is computed."""
    budget: int
    """What so many micro-batches may hold."""


class Dealer:
    """Cuts samples for one Megatron group, whose targets are what `mask_of` says.

    The budget is that of a whole micro-batch, of which a context-parallel rank works on its share.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        processes: int,
        budget_tokens: int,
        pad_id: int,
        packed: bool,
        flops: Flops = BY_TOKENS,
        mask_of: MaskOf = trained_tokens,
        fp8: bool = False,
    ) -> None:
        """`fp8` has every rank's share fit products in FP8. Raises ValueError for rectangles and context parallelism, which cuts packed sequences alone."""
        if parallel.cp > 1 and not packed:
            raise ValueError(f"cp is {parallel.cp}, which cuts packed sequences; pack them, or set cp to 1.")
        chunks = sequence_chunks(parallel.cp)
        share = parallel.tp if parallel.sequence_parallel else 1
        self._frame = Frame(
            budget_tokens=budget_tokens,
            packed=packed,
            ranks=processes // (parallel.tp * parallel.cp * parallel.pp),
            stages=parallel.pp,
            multiple_of=share * (lcm(chunks, FP8_TOKENS * parallel.cp) if fp8 else chunks),
            room_multiple=chunks,
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

    def load(self, batches: Sequence[Sequence[MicroBatch]]) -> Load:
        """How full dealt `batches` are."""
        dealt = [batch for rank in batches for batch in rank]
        return Load(
            len(dealt),
            sum(int(batch.lengths.sum()) for batch in dealt),
            sum(batch.tokens.size for batch in dealt),
            len(dealt) * self._frame.budget_tokens,
        )

    def _plan(self, samples: Sequence[Sample]) -> Plan:
        trajectories = [sample.trajectory for sample in samples]
        sizes = [Size(len(one.tokens), int(self._mask_of(one).sum())) for one in trajectories]
        return plan_micro_batches(sizes, self._flops, self._frame)

    def _collate(self, samples: Sequence[Sample]) -> MicroBatch:
        frame = self._frame
        return collate(samples, self._pad_id, frame.multiple_of, frame.packed, self._mask_of, frame.room_multiple)


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
