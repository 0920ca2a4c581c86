"""Micro-batches through Megatron's schedules: forward, or forward and backward, on any pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlsys.trainer.batches.micro_batch import MicroBatch
from rlsys.trainer.context import Share, share_of
from rlsys.trainer.model import StageModel

OnOutput = Callable[[Tensor, Share], Any]
"""(output [own targets, ...], this rank's share of the micro-batch) -> what the schedule takes as the loss.

The output is logits over the local vocabulary, or values: a row is what the tokens before one of
`Share.targets` say of it, in the same order."""


def forward(model: StageModel, batches: Sequence[MicroBatch], on_output: OnOutput) -> list[Any]:
    """Run `batches` forward; on the last stage, what `on_output` made of each, else an empty list.

    All ranks of the same TP x CP x PP group call this together, with the same batches.
    """
    if not batches:
        return []

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Callable[..., Any]]:
        share = share_of(next(data), model.place)
        outputs = _outputs(model, module, share)
        return outputs, lambda output, non_loss_data: on_output(output, share)  # noqa: ARG005

    with torch.no_grad():
        return _schedule(step, model.module, batches, forward_only=True, collect_non_loss_data=True)


def forward_backward(model: StageModel, module: Any, batches: Sequence[MicroBatch], on_output: OnOutput) -> list[Any]:
    """Run `batches` forward and backward; gradients are added to those there are, not reduced.

    `module` wraps `model.module`. `on_output` returns (loss sum, what to return for this batch).
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

    return _schedule(step, module, batches, forward_only=False)


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
    device = next(model.module.parameters()).device
    return module(
        input_ids=torch.tensor(share.tokens, device=device),
        predicting=torch.tensor(share.predicting, device=device),
        sequences=_sequences(share.batch, device) if share.batch.packed else None,
    )


def _sequences(batch: MicroBatch, device: torch.device) -> PackedSeqParams:
    """Megatron's description of a packed row, in which positions and attention begin anew at boundaries.

    With context parallelism too it speaks of the whole row. A sequence's own padding counts as its last tokens, so
    that nothing lies between sequences, which Transformer Engine's flash attention would not take.
    """
    boundaries = torch.tensor(batch.boundaries, device=device)
    longest = int(np.diff(batch.boundaries).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


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
