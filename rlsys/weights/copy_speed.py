"""How fast this host copies memory: what the speed of moving weights is measured against."""

from __future__ import annotations

import time

import numpy as np

LARGEST_BYTES = 256 * 1024 * 1024
"""Of a measurement; a copy of more runs at the same speed."""
ROUNDS = 3


def copy_gb_s(nbytes: int) -> float:
    """10^9 bytes a second at which one thread copies `nbytes` from one buffer to another: the fastest of a few."""
    size = min(nbytes, LARGEST_BYTES)
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    fastest = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        np.copyto(target, source)
        fastest = min(fastest, time.perf_counter() - started)
    return size / fastest / 1e9
