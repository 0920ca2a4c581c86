"""How context parallelism cuts a packed row over the ranks of its group. Pure numpy.

Each sequence is cut into 2 cp chunks of equal length, and rank r works on chunks r and 2 cp - 1 - r: an early one,
whose tokens attend to few, and a late one, so that causal attention costs every rank the same. Megatron's rotary
positions and Transformer Engine's attention (`thd_get_partitioned_indices`) presume the same cut.

Invariant: every token of a row is in exactly one rank's share, and all shares are equally large.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def sequence_chunks(cp: int) -> int:
    """Chunks that each sequence is cut into over `cp` ranks: its length must be a multiple; 1 if it stays whole."""
    return 2 * cp if cp > 1 else 1


def columns_of(boundaries: Sequence[int] | NDArray[np.integer], cp: int, rank: int) -> NDArray[np.int64]:
    """Which tokens of a row rank `rank` of `cp` works on: [tokens / cp], sequence by sequence, ascending.

    `boundaries` [sequences + 1] are where sequences begin, and the row's end. Raises ValueError for a sequence that
    cannot be cut evenly.
    """
    chunks = 2 * cp
    starts, ends = np.asarray(boundaries[:-1], dtype=np.int64), np.asarray(boundaries[1:], dtype=np.int64)
    if ((ends - starts) % chunks).any():
        raise ValueError(
            f"Sequences of {(ends - starts).tolist()} tokens cannot be cut into {chunks} chunks each: pad them."
        )
    sizes = (ends - starts) // chunks
    pieces = [
        np.arange(begin, begin + size)
        for start, size in zip(starts, sizes, strict=True)
        for begin in (start + rank * size, start + (chunks - 1 - rank) * size)
    ]
    return np.concatenate(pieces)
