"""Copies of tensors in host memory, so that the originals may change while the copies are written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; of every dtype and of a cache line."""


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies of `tensors` as they are now, in one stretch of host memory that goes with the last of them.

    One stretch, for the heap does not give back what many small pieces leave. It is not pinned: that is slow, and
    pays only for memory that is kept.
    """
    starts = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
    memory = torch.empty(starts[-1], dtype=torch.uint8)
    copies = []
    for tensor, start in zip(tensors, starts, strict=False):
        place = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(place.copy_(tensor.detach()))
    return copies
