"""Plain data that the Megatron workers return: a driver can import this without Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probs of one micro-batch. A trained token's entry is log p(token | those before it), all others are 0."""

    policy: NDArray[np.float32]
    """[rows, width]"""
    reference: NDArray[np.float32] | None
    """[rows, width]; None without a reference."""
    picks: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """Tokens [trained tokens, k] and the reference's log-probs of them, in the order of `MicroBatch.targets`; None
    unless the KL term sums over the k most likely tokens."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One optimiser step; the same on every rank."""

    step: int
    """Optimiser steps that there have been."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """The rate of this step."""
    divisor: int
    """The number that the sum of the losses was divided by: trained tokens, or episodes, as the aggregation says."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """One offload or restore of one process."""

    bytes: int
    """Released or brought back; 0 if there was nothing to do."""
    seconds: float
    rss_before: int
    """The process's resident host memory, bytes."""
    rss_after: int


def switch_figures(parts: Sequence[Offloaded]) -> dict[str, float]:
    """Figures of a group from those of its processes: bytes and resident memory summed, seconds of the slowest."""
    return {
        "bytes": sum(part.bytes for part in parts),
        "seconds": max((part.seconds for part in parts), default=0.0),
        "rss_before": sum(part.rss_before for part in parts),
        "rss_after": sum(part.rss_after for part in parts),
    }
