"""Copies of tensors in host memory, so that the originals may change while the copies are written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; of every dtype and of a cache line."""


class HostCopy:
    """One stretch of host memory, which holds one set of tensors at a time.

    Copies of a GPU's tensors go to pinned memory, at full speed. It is kept for the next set, for pinning is slow;
    it is one stretch that is pinned in place, for torch's own pinned tensors are rounded up to powers of two.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies of `tensors` as they are now, which stay until the next call or `release`."""
        starts = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
        on_device = any(tensor.is_cuda for tensor in tensors)
        if self._memory.numel() < starts[-1]:
            self._resize(starts[-1], on_device)
        copies = []
        for tensor, start in zip(tensors, starts, strict=False):
            piece = self._memory[start : start + prod(tensor.shape) * tensor.element_size()]
            copy = piece.view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor.detach(), non_blocking=on_device))
        if on_device:
            torch.cuda.synchronize()
        return copies

    def release(self) -> None:
        """The copies are not needed any more. Memory that is not pinned is freed."""
        if not self._pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)

    def _resize(self, nbytes: int, pin: bool) -> None:
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._pinned = False
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        if pin:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), nbytes, 0))
            self._pinned = True
