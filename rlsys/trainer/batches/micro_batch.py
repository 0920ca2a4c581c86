"""A micro-batch: samples in one array, padded to a rectangle or packed one after the other.

Pure numpy: no torch, no Ray. A per-token array is [rows, width]; an entry of it speaks of its token as a target, so the
first token of a sequence, which nothing predicts, is never trained: a micro-batch that says otherwise cannot be made.
Packed, that is what keeps one sequence from being predicted by the one before.

A packed sequence takes `room_multiple` tokens or a multiple of them, the last of which may be padding: that is how
context parallelism cuts each sequence evenly. Attention is causal, so padding behind a sequence is seen by itself
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rlsys.data.trajectory import Floats, MaskOf, Sample, trained_tokens

_NARROWEST = 2
"""Tokens of the narrowest row: one to predict from, one to predict."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences for one forward pass."""

    tokens: NDArray[np.int64]
    """[rows, width], padded on the right. Padded: a row for each sequence. Packed: one row for all."""
    lengths: NDArray[np.int64]
    """[sequences] tokens of each; none in a micro-batch that only fills up."""
    loss_mask: NDArray[np.bool_]
    """[rows, width] True for the targets: trained tokens, or whatever else the mask of `collate` names."""
    advantages: Floats
    """[rows, width] times the weights of tokens; 0 where nothing is trained."""
    old_logprobs: Floats | None = None
    """[rows, width] recomputed log-probs of the policy that sampled."""
    ref_logprobs: Floats | None = None
    """[rows, width] log-probs of the reference policy; None without a KL term."""
    values: Floats | None = None
    """[rows, width] the critic's, before the update."""
    returns: Floats | None = None
    """[rows, width] the values that it should have given."""
    pick_tokens: NDArray[np.int32] | None = None
    """[targets, k] in the order of `targets`; see `TopkLogprobs`."""
    pick_logprobs: Floats | None = None
    """[targets, k]"""
    packed: bool = False
    room_multiple: int = 1
    """Packed, each sequence is padded to a multiple of so many tokens."""

    def __post_init__(self) -> None:
        if self.pick_tokens is not None and len(self.pick_tokens) != self.trained_tokens:
            picked, trained = len(self.pick_tokens), self.trained_tokens
            raise ValueError(f"There are picks for {picked} tokens, but {trained} are targets.")
        if self.loss_mask.ravel()[self._starts].any():
            raise ValueError("The first token of a sequence is marked as trained, but nothing predicts it.")

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss counts."""
        return int(self.loss_mask.sum())

    @property
    def targets(self) -> NDArray[np.int64]:
        """[trained tokens] row by row: the tokens whose log-probs are asked for."""
        return self.tokens[self.loss_mask]

    @property
    def trained_lengths(self) -> NDArray[np.int64]:
        """[sequences] trained tokens of each."""
        return np.array([mask.sum() for mask in self.split(self.loss_mask)], dtype=np.int64)

    @property
    def sequence_numbers(self) -> NDArray[np.int64]:
        """[rows, width] which sequence a token is of, counted from 0; -1 for padding."""
        numbers = np.full(self.tokens.size, -1, dtype=np.int64)
        for number, (start, length) in enumerate(zip(self._starts, self.lengths, strict=True)):
            numbers[start : start + length] = number
        return numbers.reshape(self.tokens.shape)

    def spread(self, values: NDArray) -> NDArray:
        """`values` [sequences] -> [rows, width]: each at every token of its sequence, 0 in padding."""
        return np.append(values, np.zeros(1, dtype=values.dtype))[self.sequence_numbers]  # The last is padding's.

    @property
    def boundaries(self) -> NDArray[np.int32]:
        """[sequences + 1] of a packed row: where each sequence begins, and the row's end.

        A sequence's own padding is part of it; more at the row's end counts as one more sequence.
        """
        ends = np.cumsum(self._rooms, dtype=np.int32)
        width = np.int32(self.tokens.size)
        padding = [width] if not len(ends) or ends[-1] < width else []
        return np.concatenate([[np.int32(0)], ends, padding]).astype(np.int32)

    def split(self, values: NDArray) -> list[NDArray]:
        """`values` [rows, width] as one array [length] for each sequence, in order."""
        flat = values.ravel()
        return [flat[start : start + length] for start, length in zip(self._starts, self.lengths, strict=True)]

    @property
    def _starts(self) -> NDArray[np.int64]:
        """[sequences] of each one's first token in a flattened array."""
        if self.packed:
            return np.cumsum(self._rooms) - self._rooms
        return np.arange(len(self.lengths)) * self.tokens.shape[1]

    @property
    def _rooms(self) -> NDArray[np.int64]:
        """[sequences] tokens that each takes of a packed row."""
        return -(-self.lengths // self.room_multiple) * self.room_multiple


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def collate(
    samples: Sequence[Sample],
    pad_id: int,
    multiple_of: int = 1,
    packed: bool = False,
    mask_of: MaskOf = trained_tokens,
    room_multiple: int = 1,
) -> MicroBatch:
    """Lay `samples` out in rows whose width is a multiple of `multiple_of` tokens.

    Packed, each sequence is padded to a multiple of `room_multiple`, which divides `multiple_of`. `mask_of` says which
    tokens of a trajectory are targets. What some sample lacks is left out. No samples give one row of untrained
    padding, a micro-batch that fills up a rank. Raises ValueError for picks of other tokens than the targets, and for
    multiples that do not fit.
    """
    if multiple_of % room_multiple:
        raise ValueError(f"A row of {multiple_of} tokens cannot be cut into sequences of {room_multiple}.")
    lengths = [len(sample.trajectory.tokens) for sample in samples]
    rooms = [round_up(length, room_multiple) for length in lengths]
    longest = sum(rooms) if packed else max(lengths, default=0)
    width = round_up(max(longest, _NARROWEST), multiple_of)
    rows = 1 if packed else max(1, len(samples))
    starts = [0, *accumulate(rooms)][: len(rooms)] if packed else range(0, width * len(samples), width)

    def lay_out(values: Callable[[Sample], NDArray], fill: float, dtype: type) -> NDArray:
        out: NDArray = np.full((rows, width), fill, dtype=dtype)
        flat = out.ravel()
        for start, length, sample in zip(starts, lengths, samples, strict=True):
            flat[start : start + length] = values(sample)
        return out

    def optional(values: Callable[[Sample], Floats | None]) -> Floats | None:
        if any(values(sample) is None for sample in samples):
            return None
        return lay_out(lambda sample: np.asarray(values(sample)), 0.0, np.float32)

    picks = [sample.picks for sample in samples if sample.picks is not None]
    if len(picks) < len(samples):
        picks = []
    return MicroBatch(
        tokens=lay_out(lambda s: s.trajectory.tokens, pad_id, np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        loss_mask=lay_out(lambda s: mask_of(s.trajectory), False, np.bool_),
        advantages=lay_out(_weighted_advantage, 0.0, np.float32),
        old_logprobs=optional(lambda s: s.old_logprobs),
        ref_logprobs=optional(lambda s: s.ref_logprobs),
        values=optional(lambda s: s.values),
        returns=optional(lambda s: s.returns),
        pick_tokens=np.concatenate([each.tokens for each in picks]) if picks else None,
        pick_logprobs=np.concatenate([each.logprobs for each in picks]) if picks else None,
        packed=packed,
        room_multiple=room_multiple,
    )


def _weighted_advantage(sample: Sample) -> Floats:
    """[seq], 0 where nothing is trained."""
    weights = np.float32(1.0) if sample.weights is None else sample.weights
    return np.where(sample.trajectory.loss_mask, sample.advantages * weights, 0.0).astype(np.float32)


def sequence_chunks(cp: int) -> int:
    """Chunks that each sequence is cut into over `cp` ranks: its length must be a multiple; 1 if it stays whole."""
    return 2 * cp if cp > 1 else 1


def columns_of(boundaries: Sequence[int] | NDArray[np.integer], cp: int, rank: int) -> NDArray[np.int64]:
    """The tokens of a packed row that rank `rank` of `cp` works on: [tokens / cp], sequence by sequence, ascending.

    Each sequence is cut into 2 cp chunks of equal length, and rank r works on chunks r and 2 cp - 1 - r: an early one,
    whose tokens attend to few, and a late one, so that causal attention costs every rank the same. Megatron's rotary
    positions and Transformer Engine's attention (`thd_get_partitioned_indices`) presume the same cut.

    `boundaries` [sequences + 1] are where sequences begin, and the row's end. Raises ValueError for a sequence that
    cannot be cut evenly.
    """
    chunks = 2 * cp
    starts, lengths = np.asarray(boundaries[:-1], dtype=np.int64), np.diff(boundaries).astype(np.int64)
    if (lengths % chunks).any():
        raise ValueError(f"Sequences of {lengths.tolist()} tokens cannot be cut into {chunks} chunks each: pad them.")
    pieces = [
        np.arange(begin, begin + size)
        for start, size in zip(starts, lengths // chunks, strict=True)
        for begin in (start + rank * size, start + (chunks - 1 - rank) * size)
    ]
    return np.concatenate(pieces)
