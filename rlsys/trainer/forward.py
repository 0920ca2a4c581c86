"""Micro-batches through Megatron's schedules: forward, or forward and backward, on any pipeline.

All ranks of a context-parallel group have the same micro-batch, and each works on its columns of it (`columns_of`). A
rank reads out the targets whose preceding token is in its share, in the order of `MicroBatch.targets`; each target is
read out by exactly one rank. `Share.whole` gives all ranks what all have found, so that every rank takes the same loss
of all targets; its gradient flows into a rank's own targets alone, and the sum of all ranks' gradients of the weights
is that of the loss, once. Without context parallelism a share is everything, and nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from rlsys.trainer.batches import MicroBatch, columns_of
from rlsys.trainer.mesh import Place
from rlsys.trainer.model.stage_model import StageModel

Values = TypeVar("Values", NDArray[Any], Tensor)


@dataclass(frozen=True, slots=True)
class Share:
    """One context-parallel rank's part of `batch`."""

    batch: MicroBatch
    tokens: NDArray[np.int64]
    """[rows, width / cp]"""
    predicting: NDArray[np.int64]
    """[own targets] positions that predict them, in [width / cp, rows] flattened, as Megatron's hidden states are."""
    owned: NDArray[np.bool_] | None
    """[targets] which are read out here; None: all."""

    @property
    def targets(self) -> NDArray[np.int64]:
        """[own targets] tokens."""
        return self.own(self.batch.targets)

    def own(self, values: Values) -> Values:
        """[own targets, ...] of `values` [targets, ...]."""
        return values if self.owned is None else values[self.owned]

    def whole(self, values: Tensor) -> Tensor:
        """[targets, ...] of every rank's `values` [own targets, ...], the same on all ranks of the group."""
        if self.owned is None:
            return values
        result: Tensor = _Whole.apply(values, to_tensor(self.owned, values))
        return result


def share_of(batch: MicroBatch, place: Place) -> Share:
    """The share of the rank at `place`. Raises ValueError for rectangles, which context parallelism does not cut."""
    rows, width = batch.tokens.shape
    row, column = batch.loss_mask.nonzero()
    if place.cp_size == 1:
        # A token is predicted at the position before it.
        return Share(batch, batch.tokens, (column - 1) * rows + row, None)
    if not batch.packed:
        raise ValueError("Context parallelism cuts packed micro-batches alone, and this one has padded rows.")
    columns = columns_of(batch.boundaries, place.cp_size, place.cp)
    places = np.full(width, -1, dtype=np.int64)
    places[columns] = np.arange(len(columns))
    predicting = places[column - 1]
    owned = predicting >= 0
    return Share(batch, batch.tokens[:, columns], predicting[owned], owned)


OnOutput = Callable[[Tensor, Share], Any]
"""(output [own targets, ...], this rank's share of the micro-batch) -> what the schedule takes as the loss.

The output is logits over the local vocabulary, or values: a row is what the tokens before one of `Share.targets` say of
it, in the same order."""


def forward(model: StageModel, batches: Sequence[MicroBatch], on_output: OnOutput) -> list[Any]:
    """Run `batches` forward, on all ranks of TP x CP x PP; on the last stage what `on_output` makes of each."""
    if not batches:
        return []

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Callable[..., Any]]:
        share = share_of(next(data), model.place)
        return _outputs(model, module, share), lambda output, non_loss_data: on_output(output, share)  # noqa: ARG005

    with torch.no_grad():
        return _schedule(step, model.module, batches, forward_only=True, collect_non_loss_data=True)


def forward_backward(
    model: StageModel, wrapped: Any, batches: Sequence[MicroBatch], on_output: OnOutput, last: bool
) -> list[Any]:
    """Run `batches` forward and backward; gradients are added to those there are.

    `wrapped` is `model.module` with its buffers of gradients. `on_output` returns (loss sum, what to return for this
    batch). With `last`, these end an optimiser step, and sums over ranks may begin in the last one's backward pass.
    """
    if not batches:
        return []

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Callable[..., Any]]:
        share = share_of(next(data), model.place)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            total, result = on_output(output, share)
            # Megatron's own count is not used; a learner counts over several calls.
            return total, torch.zeros((), dtype=torch.int, device=total.device), result

        return _outputs(model, module, share), loss

    # Megatron's schedules take the last micro-batch of every call for a step's last, and end this context before it.
    wrapped.config.no_sync_func = wrapped.no_sync if last else nullcontext
    with nullcontext() if last else wrapped.no_sync():
        return _schedule(step, wrapped, batches, forward_only=False)


def to_tensor(values: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    """A copy of `values` on the device of `like`."""
    return torch.tensor(values, device=like.device)


def _outputs(model: StageModel, module: Any, share: Share) -> Tensor:
    width = share.tokens.shape[1]
    if model.config.sequence_parallel and width % model.place.tp_size:
        raise ValueError(
            f"A rank's share of a micro-batch is {width} tokens wide; sequence parallelism needs a multiple of tp, "
            f"{model.place.tp_size}: pad it so."
        )
    return module(
        input_ids=torch.tensor(share.tokens, device=model.device),
        predicting=torch.tensor(share.predicting, device=model.device),
        sequences=_sequences(share.batch, model.device) if share.batch.packed else None,
    )


def _sequences(batch: MicroBatch, device: torch.device) -> PackedSeqParams:
    """Megatron's description of a whole packed row, in which positions and attention begin anew at boundaries.

    A sequence's own padding counts as its last tokens: Transformer Engine's flash attention takes no gaps.
    """
    boundaries = torch.tensor(batch.boundaries, device=device)
    longest = int(np.diff(batch.boundaries).max())
    return PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=longest, max_seqlen_kv=longest)


def _schedule(step: Any, module: Any, batches: Sequence[MicroBatch], **options: bool) -> list[Any]:
    rows, width = batches[0].tokens.shape
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=module,
        num_microbatches=len(batches),
        # With variable_seq_lengths stages tell each other the shapes; these two are not used.
        seq_length=width,
        micro_batch_size=rows,
        **options,
    )


class _Whole(torch.autograd.Function):
    """Each rank's rows in their places, zeros in all others, summed over the group: what is added is 0."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, owned: Tensor) -> Tensor:
        """`values` [own targets, ...], `owned` [targets] -> [targets, ...]."""
        ctx.save_for_backward(owned)
        result = values.new_zeros(len(owned), *values.shape[1:])
        result[owned] = values
        if result.numel():
            dist.all_reduce(result, group=parallel_state.get_context_parallel_group())
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Every rank takes the same loss, so that its own rows of the gradient are whole."""
        (owned,) = ctx.saved_tensors
        return grads[0][owned], None
