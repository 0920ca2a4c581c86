"""One context-parallel rank's share of a micro-batch, and how results of all shares come together.

Contract: all ranks of a context-parallel group have the same micro-batch, and each works on its columns of it (see
`rlsys.trainer.batches.context`). A rank reads out the targets whose preceding token is in its share, in the order of
`MicroBatch.targets`; each target is read out by exactly one rank. `Share.whole` gives all ranks what all have found,
so that every rank takes the same loss of all targets; its gradient flows into a rank's own targets alone, and the
sum of all ranks' gradients of the weights is that of the loss, once.

Without context parallelism a share is everything, and nothing travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from rlsys.trainer.batches.context import columns_of
from rlsys.trainer.batches.micro_batch import MicroBatch
from rlsys.trainer.parallel import Place

Values = TypeVar("Values", NDArray[Any], Tensor)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of `batch`."""

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
        result: Tensor = _Whole.apply(values, torch.tensor(self.owned, device=values.device))
        return result


def share_of(batch: MicroBatch, place: Place) -> Share:
    """What the rank at `place` works on. Raises ValueError for rectangles, which context parallelism does not cut."""
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
