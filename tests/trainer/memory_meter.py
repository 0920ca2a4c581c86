"""Counts the bytes of live tensors with a dispatch mode that follows storages, not the pages of the process.

Workspaces that torch's kernels allocate and free within one operation are not counted. A storage counts once, whatever
the number of its views, from the operation that makes it until its last holder (which may be autograd) releases it.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class MemoryMeter(TorchDispatchMode):
    """Measures `peak`, the largest number of bytes that are alive at the same time within its `with` block."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        """Count `tensors` from the start, and other tensors from the first operation that touches them."""
        super().__init__()
        self.alive = self.peak = 0
        self._held: dict[int, int] = {}
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        self.peak = max(self.peak, self.alive)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held or not storage.nbytes():
            return
        self._held[key] = storage.nbytes()
        self.alive += storage.nbytes()
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.alive -= self._held.pop(key)
