"""Runs micro-batches through Megatron's pipeline schedules, forward or forward and backward.

All ranks of a context-parallel group receive the same micro-batch, and each computes its own columns (`columns_of`). A
rank owns the targets whose preceding token is in its share, in the order of `MicroBatch.targets`; each target has
exactly one owner. Example, cp=2 and a sequence of tokens 0 to 3, of which 1 to 3 are targets:

    rank 0:  computes tokens 0 and 3   owns target 1, predicted at token 0;
    rank 1:  computes tokens 1 and 2   owns targets 2 and 3, predicted at tokens 1 and 2.

`ContextShare.whole` collects the outputs of all targets on every rank, so every rank computes the same loss. On each
rank, gradients flow only into the rank's own targets, so the sum of the weights' gradients over the ranks counts the
loss once. Without context parallelism, the share is the whole micro-batch and no communication takes place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from rlsys.data.trajectory import Routes
from rlsys.trainer.batches import MicroBatch, columns_of
from rlsys.trainer.model.stage_model import StageModel

Values = TypeVar("Values", NDArray[Any], Tensor)


@dataclass(frozen=True, slots=True)
class ContextShare:
    """Part of `batch` that one context-parallel rank computes."""

    batch: MicroBatch
    tokens: Tensor
    """[rows, width / cp], on the device."""
    predicting: Tensor
    """[own targets] position that predicts each target, as an index into [width / cp, rows] flattened, on the device.

    This is the layout of Megatron's hidden states."""
    targets: Tensor
    """[own targets] tokens of this rank's own targets, on the device."""
    mask: Tensor
    """[rows, width] True at the targets of all ranks, on the device."""
    sequences: PackedSeqParams | None
    """Boundaries of a packed row; None for padded rows."""
    owned: NDArray[np.bool_] | None
    """[targets] mask of this rank's own targets; None if all targets are its own."""
    routes: Tensor | None
    """[own tokens, own layers, k] experts to which the model's routers must send each token, on the device.

    The tokens are those of this rank's hidden states, flattened; the layers are those of its stage. None if the model
    routes every token itself."""

    def own(self, values: Values) -> Values:
        """Select [own targets, ...] from `values` [targets, ...]."""
        return values if self.owned is None else values[self.owned]

    def whole(self, values: Tensor) -> Tensor:
        """Combine the ranks' `values` [own targets, ...] into [targets, ...], equal on all ranks of the group."""
        if self.owned is None:
            return values
        result: Tensor = _Whole.apply(values, to_tensor(self.owned, values))
        return result


def context_shares(model: StageModel, batches: Sequence[MicroBatch]) -> list[ContextShare]:
    """Return this rank's share of each micro-batch, on the device of `model`.

    Several models of the same layout can read the same shares. Raises ValueError for a padded micro-batch with cp > 1,
    and for a width that sequence parallelism cannot split.
    """
    return [_context_share(model, batch) for batch in batches]


def without_routes(shares: Sequence[ContextShare]) -> list[ContextShare]:
    """Return `shares` for the reference policy, which routes every token itself: it is not the policy that sampled."""
    return [replace(share, routes=None) for share in shares]


def _context_share(model: StageModel, batch: MicroBatch) -> ContextShare:
    coords, device = model.coords, model.device
    rows, width = batch.tokens.shape
    row, column = batch.loss_mask.nonzero()
    tokens, targets, owned, routes = batch.tokens, batch.targets, None, batch.routes
    # A token is predicted at the position before it.
    predicting = (column - 1) * rows + row
    if coords.cp_size > 1:
        if not batch.packed:
            raise ValueError("Context parallelism requires packed micro-batches, but this one has padded rows.")
        columns = columns_of(batch.boundaries, coords.cp_size, coords.cp)
        places = np.full(width, -1, dtype=np.int64)
        places[columns] = np.arange(len(columns))
        owned = places[column - 1] >= 0
        tokens, targets, predicting = tokens[:, columns], targets[owned], places[column - 1][owned]
        routes = None if routes is None else routes[:, columns]
    if model.config.sequence_parallel and tokens.shape[1] % coords.tp_size:
        raise ValueError(
            f"A rank's share of a micro-batch is {tokens.shape[1]} tokens wide, but sequence parallelism needs a "
            f"multiple of tp={coords.tp_size}: pad the micro-batch."
        )
    return ContextShare(
        batch=batch,
        tokens=torch.tensor(tokens, device=device),
        predicting=torch.tensor(predicting, device=device),
        targets=torch.tensor(targets, device=device),
        mask=torch.tensor(batch.loss_mask, device=device),
        sequences=_sequences(batch, device) if batch.packed else None,
        owned=owned,
        routes=None if routes is None or not model.replays else _own_routes(model, routes),
    )


def _own_routes(model: StageModel, routes: Routes) -> Tensor:
    """Return `ContextShare.routes` from those [rows, width / cp, layers, k] of a context-parallel rank."""
    if model.config.sequence_parallel:
        routes = np.split(routes, model.coords.tp_size, axis=1)[model.coords.tp]
    own = routes[:, :, model.layers.start : model.layers.stop].swapaxes(0, 1)
    return torch.tensor(own.reshape(-1, *own.shape[2:]), device=model.device)


OnOutput = Callable[[Tensor, ContextShare], Any]
"""(output [own targets, ...], this rank's share) -> result; for `forward_backward`, -> (loss sum, result).

The output holds logits over the local vocabulary, or values; row i predicts target i of `ContextShare.targets`."""


def forward(model: StageModel, shares: Sequence[ContextShare], on_output: OnOutput) -> list[Any]:
    """Run `shares` forward without gradients, on all ranks of TP x CP x PP together.

    Returns the result of `on_output` for each micro-batch on the last stage, an empty list on other stages.
    """
    if not shares:
        return []

    def step(data: Iterator[ContextShare], module: Any) -> tuple[Tensor, Callable[..., Any]]:
        share = next(data)
        return _outputs(module, share), lambda output, non_loss_data: on_output(output, share)  # noqa: ARG005

    with torch.no_grad():
        return _schedule(step, model.module, shares, forward_only=True, collect_non_loss_data=True)


def forward_backward(wrapped: Any, shares: Sequence[ContextShare], on_output: OnOutput, last: bool) -> list[Any]:
    """Run `shares` forward and backward, adding to the gradients.

    `wrapped` is a model's module with its gradient buffers. `on_output` returns (loss sum, result); the results are
    returned on the last stage. `last` marks the last micro-batches of an optimiser step: gradient reduction may start
    in the backward pass of the very last micro-batch.
    """
    if not shares:
        return []

    def step(data: Iterator[ContextShare], module: Any) -> tuple[Tensor, Callable[..., Any]]:
        share = next(data)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            total, result = on_output(output, share)
            # Megatron's own token count stays 0: a learner counts over several calls.
            return total, torch.zeros((), dtype=torch.int, device=total.device), result

        return _outputs(module, share), loss

    # Megatron's schedules treat the last micro-batch of every call as the last of the step and leave the context of
    # `no_sync_func` before that micro-batch.
    wrapped.config.no_sync_func = wrapped.no_sync if last else nullcontext
    with nullcontext() if last else wrapped.no_sync():
        return _schedule(step, wrapped, shares, forward_only=False)


def to_tensor(values: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    """Return a copy of `values` on the device of `like`."""
    return torch.tensor(values, device=like.device)


def _outputs(module: Any, share: ContextShare) -> Tensor:
    return module(input_ids=share.tokens, predicting=share.predicting, sequences=share.sequences, routes=share.routes)


def _sequences(batch: MicroBatch, device: torch.device) -> PackedSeqParams:
    """Return Megatron's description of a whole packed row; positions and attention restart at each boundary.

    Padding after a sequence counts as the sequence's last tokens, because Transformer Engine's flash attention allows
    no gaps.
    """
    boundaries = torch.tensor(batch.boundaries, device=device)
    longest = int(np.diff(batch.boundaries).max())
    return PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=longest, max_seqlen_kv=longest)


def _schedule(step: Any, module: Any, shares: Sequence[ContextShare], **options: bool) -> list[Any]:
    rows, width = shares[0].batch.tokens.shape
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(shares),
        model=module,
        num_microbatches=len(shares),
        # Unused: with variable_seq_lengths, pipeline stages exchange the shapes.
        seq_length=width,
        micro_batch_size=rows,
        **options,
    )


class _Whole(torch.autograd.Function):
    """All-gather of rows by all-reduce: each rank has its own rows and zeros in all others, so the sum is exact."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, owned: Tensor) -> Tensor:
        """Return [targets, ...] from `values` [own targets, ...] and the mask `owned` [targets]."""
        ctx.save_for_backward(owned)
        result = values.new_zeros(len(owned), *values.shape[1:])
        result[owned] = values
        if result.numel():
            dist.all_reduce(result, group=parallel_state.get_context_parallel_group())
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return this rank's rows of the gradient, without communication: all ranks compute the loss of all targets."""
        (owned,) = ctx.saved_tensors
        return grads[0][owned], None
