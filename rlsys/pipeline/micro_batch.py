"""A micro-batch: samples padded to one rectangle, as arrays that travel between processes.

Pure numpy: no torch, no Ray. Entry [b, t] of a per-token array speaks of token t as a target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlsys.pipeline.group import Sample

Floats = NDArray[np.float32]
_NARROWEST = 2
"""Tokens of the narrowest rectangle: one to predict from, one to predict."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded sequences for one forward pass."""

    tokens: NDArray[np.int64]
    """[batch, seq]"""
    lengths: NDArray[np.int64]
    """[batch] tokens of each sequence; the rest of a row is padding. 0 for a row that fills up."""
    loss_mask: NDArray[np.bool_]
    """[batch, seq]"""
    advantages: Floats
    """[batch, seq]"""
    old_logprobs: Floats | None = None
    """[batch, seq] recomputed log-probs of the policy that sampled."""
    ref_logprobs: Floats | None = None
    """[batch, seq] log-probs of the reference policy; None without a KL term."""

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss counts."""
        return int(self.loss_mask.sum())


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def collate(samples: Sequence[Sample], pad_id: int, multiple_of: int = 1) -> MicroBatch:
    """Pad `samples` on the right to the longest, rounded up to a multiple of `multiple_of` tokens.

    No samples give one row of untrained padding, a micro-batch that fills up a rank.
    """
    lengths = [len(sample.trajectory.tokens) for sample in samples] or [0]
    rows, width = len(lengths), round_up(max(*lengths, _NARROWEST), multiple_of)

    def pad(values: Callable[[Sample], NDArray], fill: float, dtype: type) -> NDArray:
        out: NDArray = np.full((rows, width), fill, dtype=dtype)
        for row, sample in enumerate(samples):
            out[row, : lengths[row]] = values(sample)
        return out

    def optional(values: Callable[[Sample], Floats | None]) -> Floats | None:
        if any(values(sample) is None for sample in samples):
            return None
        return pad(lambda sample: np.asarray(values(sample)), 0.0, np.float32)

    return MicroBatch(
        tokens=pad(lambda s: s.trajectory.tokens, pad_id, np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        loss_mask=pad(lambda s: s.trajectory.loss_mask, False, np.bool_),
        advantages=pad(lambda s: s.advantage * s.trajectory.loss_mask, 0.0, np.float32),
        old_logprobs=optional(lambda s: s.old_logprobs),
        ref_logprobs=optional(lambda s: s.ref_logprobs),
    )
