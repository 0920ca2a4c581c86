"""Logits that are cut along the vocabulary: which part a rank holds, and how it is worked on.

Contract: rows are targets, the same on all TP ranks and in the same order; columns are the rank's tokens,
then padding, which has no probability. The temperature divides the logits in `scaled` and nowhere else.
No float32 copy of all logits is made: rows are worked off in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
"""Logits worked on at a time, in float32: on a CPU what a core's cache holds, 128 MiB on a GPU."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which part of the vocabulary a TP rank holds."""

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
    """Whether each token is in the local columns, and its column (0 where it is not)."""
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
