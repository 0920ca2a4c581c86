"""How fast memory is copied here: what the speed of moving weights is measured against."""

from __future__ import annotations

import time

import numpy as np
import torch

LARGEST_BYTES = 256 * 1024 * 1024
"""Of a measurement; a copy of more runs at the same speed."""
ROUNDS = 3


def copy_gb_s(nbytes: int, device: torch.device) -> float:
    """10^9 bytes a second at which `nbytes` are copied from one buffer to another: the fastest of a few.

    On a CPU by one thread. A GPU gets its memory back: it may be others' next.
    """
    size = min(nbytes, LARGEST_BYTES)
    fastest = _fastest_s(size, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return size / fastest / 1e9


def _fastest_s(size: int, device: torch.device) -> float:
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    fastest = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        if device.type == "cuda":
            target.copy_(source)
            torch.cuda.synchronize(device)
        else:
            np.copyto(target.numpy(), source.numpy())
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
