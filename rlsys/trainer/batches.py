"""Micro-batches: samples in one array, and sharding of samples over data-parallel ranks under a token budget.

Pure numpy: no torch, no Ray. A per-token array is [rows, width], padded to a rectangle or packed one sequence after the
other; an entry of it speaks of its token as a target, so the first token of a sequence, which nothing predicts, is never
trained: a micro-batch that says otherwise cannot be made. Packed, that is what keeps one sequence from being predicted by
the one before. A packed sequence takes `room_multiple` tokens or a multiple of them, the last of which may be padding:
that is how context parallelism cuts each sequence evenly. Attention is causal, so padding behind a sequence is seen by
itself alone.

Invariants of sharding: every sample is in exactly one micro-batch; a micro-batch stays within the token budget unless it
is a single sample that exceeds it; every rank gets equally many micro-batches (a rank with fewer would leave the others
waiting), at least as many as there are pipeline stages where it has that many samples; a micro-batch is empty only on a
rank that has fewer samples than another has micro-batches.

Balance, in floating-point operations: two ranks differ by at most one sample (packed) or at most one micro-batch
(padded), the dearest. Packed, no rank gets more than 4/3 - 1/(3 ranks) of what the dearest gets in the best partition.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import ParallelConfig
from rlsys.data.trajectory import Floats, MaskOf, Sample, trained_tokens

if TYPE_CHECKING:
    from rlsys.weights.weight_map import Architecture


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
        """[sequences + 1] where each sequence of a packed row begins, and its end; padding there is one more."""
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
    """Lay `samples` out in rows whose width is a multiple of `multiple_of` tokens; what some sample lacks is left out.

    Packed, each sequence is padded to a multiple of `room_multiple`, which divides `multiple_of`. `mask_of` says which
    tokens of a trajectory are targets. No samples give one row of untrained padding, which fills up a rank.
    """
    if multiple_of % room_multiple:
        raise ValueError(f"A row of {multiple_of} tokens cannot be cut into sequences of {room_multiple}.")
    lengths = [len(sample.trajectory.tokens) for sample in samples]
    rooms = [round_up(length, room_multiple) for length in lengths]
    longest = sum(rooms) if packed else max(lengths, default=0)
    width = round_up(max(longest, 2), multiple_of)  # one token to predict from, one to predict
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

    def weighted_advantage(sample: Sample) -> Floats:
        weights = np.float32(1.0) if sample.weights is None else sample.weights
        return np.where(sample.trajectory.loss_mask, sample.advantages * weights, 0.0).astype(np.float32)

    picks = [sample.picks for sample in samples if sample.picks is not None]
    if len(picks) < len(samples):
        picks = []
    return MicroBatch(
        tokens=lay_out(lambda s: s.trajectory.tokens, pad_id, np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        loss_mask=lay_out(lambda s: mask_of(s.trajectory), False, np.bool_),
        advantages=lay_out(weighted_advantage, 0.0, np.float32),
        old_logprobs=optional(lambda s: s.old_logprobs),
        ref_logprobs=optional(lambda s: s.ref_logprobs),
        values=optional(lambda s: s.values),
        returns=optional(lambda s: s.returns),
        pick_tokens=np.concatenate([each.tokens for each in picks]) if picks else None,
        pick_logprobs=np.concatenate([each.logprobs for each in picks]) if picks else None,
        packed=packed,
        room_multiple=room_multiple,
    )


def sequence_chunks(cp: int) -> int:
    """Chunks that each sequence is cut into over `cp` ranks: its length must be a multiple; 1 if it stays whole."""
    return 2 * cp if cp > 1 else 1


def columns_of(boundaries: Sequence[int] | NDArray[np.integer], cp: int, rank: int) -> NDArray[np.int64]:
    """The tokens of a packed row that rank `rank` of `cp` works on: [tokens / cp], sequence by sequence, ascending.

    Each sequence is cut into 2 cp chunks of equal length, and rank r works on chunks r and 2 cp - 1 - r: an early one,
    whose tokens attend to few, and a late one, so that causal attention costs every rank the same. Megatron's rotary
    positions and Transformer Engine's attention (`thd_get_partitioned_indices`) presume the same cut. `boundaries`
    [sequences + 1] are where sequences begin, and the row's end. Raises ValueError for what cannot be cut evenly.
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


Batch = list[int]
"""Indices into the samples."""
Plan = list[list[Batch]]
"""[rank][micro-batch]"""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one forward pass of a sequence; a backward pass costs twice as much for each term.

    flops(n tokens, k targets) = 2 p_layers n + 2 p_output k + 2 layers a n^2: a matrix of p parameters takes 2 p
    operations a token; causal attention of width a (heads times their dimension) compares n tokens with n / 2 others on
    average and sums as many values. The output layer runs only on the k positions whose next token is trained; norms,
    rotations and the softmax are a hundredth of it.
    """

    per_token: float
    per_target: float = 0.0
    per_square: float = 0.0

    def of(self, tokens: int, targets: int) -> float:
        """The cost of a sequence of `tokens` tokens, `targets` of which are trained."""
        return self.per_token * tokens + self.per_target * targets + self.per_square * tokens**2


def flops_of(architecture: Architecture) -> Flops:
    """The cost of this model's sequences; its MLPs are gated."""
    layers, hidden = architecture.layers, architecture.hidden
    attention, key_value = (heads * architecture.head_dim for heads in (architecture.heads, architecture.kv_heads))
    ffn = architecture.experts_per_token * architecture.expert_ffn or architecture.ffn
    return Flops(
        per_token=2.0 * layers * (2 * hidden * (attention + key_value) + 3 * hidden * ffn),
        per_target=2.0 * hidden * architecture.vocab,
        per_square=2.0 * layers * attention,
    )


FP8_TOKENS = 16
"""Tokens that a matrix product in FP8 takes, or a multiple of them: cuBLAS aligns operands to 16 bytes, and with the
gradient of weights the tokens are a row's length."""


class Size(NamedTuple):
    """The size of one sample."""

    tokens: int
    targets: int
    """Trained tokens, for which alone logits are computed."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The shape that the micro-batches of one Megatron group must have."""

    budget_tokens: int
    """Most tokens of one, padding included."""
    packed: bool
    """One row of concatenated sequences, or else a rectangle."""
    ranks: int = 1
    """Data-parallel ranks."""
    stages: int = 1
    """Pipeline stages."""
    multiple_of: int = 1
    """The width of a micro-batch is rounded up to it."""
    room_multiple: int = 1
    """Packed, the tokens of each sample are rounded up to it; divides `multiple_of`."""


def plan_micro_batches(sizes: Sequence[Size], flops: Flops, frame: Frame) -> Plan:
    """Fill micro-batches and give them to the ranks; each rank begins with its dearest."""

    def cost(batch: Batch) -> float:
        if frame.packed or not batch:
            return sum(flops.of(*sizes[index]) for index in batch)
        width = _width(batch, sizes, frame)
        return sum(flops.of(width, sizes[index].targets) for index in batch)

    plan = _packed(sizes, frame, cost) if frame.packed else _padded(sizes, frame, cost)
    deepest = max(map(len, plan))
    for batches in plan:
        batches.sort(key=cost, reverse=True)
        batches.extend([] for _ in range(deepest - len(batches)))
    return plan


def fills(plan: Plan, stages: int) -> bool:
    """Tell if every rank has at least `stages` micro-batches that are not empty: with fewer, a stage would be idle."""
    return all(sum(map(bool, batches)) >= stages for batches in plan)


def share_out(costs: Sequence[float], ranks: int, equal_counts: bool = False) -> list[list[int]]:
    """Indices of `costs` for each of `ranks` ranks, whose sums differ by at most the largest cost.

    The largest differencing method (Karmarkar and Karp 1982): of all partial partitions the two with the widest spread
    are joined, the dearest share of one with the cheapest of the other. Joining never widens the larger spread, hence
    the bound; the ratio to the best is at most 4/3 - 1/(3 ranks) (Michiels et al. 2007). It begins with every item
    alone, or for `equal_counts` (`ranks` must divide their number) with `ranks` items of like cost (Yakir 1996).
    On log-normal lengths it leaves a tenth of the imbalance of handing the longest to who has least.
    """
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    step = ranks if equal_counts else 1
    partitions: list[list[tuple[float, Batch]]] = []  # of each the ranks' costs and indices, the dearest first
    for start in range(0, len(order), step):
        shares = [(costs[index], [index]) for index in order[start : start + step]]
        partitions.append(shares + [(0.0, [])] * (ranks - len(shares)))
    # The first entry is the spread of costs, negative so that the widest comes first; the second breaks ties by age, so
    # that the outcome does not depend on how the shares compare.
    heap = [(shares[-1][0] - shares[0][0], age, shares) for age, shares in enumerate(partitions)]
    heapify(heap)
    while len(heap) > 1:
        (_, age, first), (_, _, second) = heappop(heap), heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        joined = [(cost + other, indices + others) for (cost, indices), (other, others) in pairs]
        joined.sort(key=lambda share: -share[0])
        heappush(heap, (joined[-1][0] - joined[0][0], age, joined))
    return [indices for _, indices in heap[0][2]] if heap else [[] for _ in range(ranks)]


def _packed(sizes: Sequence[Size], frame: Frame, cost: Callable[[Batch], float]) -> Plan:
    """Samples are shared out one by one, since without padding a cost does not depend on the company."""
    shares = share_out([cost([index]) for index in range(len(sizes))], frame.ranks)
    plan = [_best_fit(share, sizes, frame) for share in shares]
    needed = max(*map(len, plan), min(frame.stages, max(map(len, shares))))
    for batches in plan:
        _split(batches, needed, cost)
    return plan


def _padded(sizes: Sequence[Size], frame: Frame, cost: Callable[[Batch], float]) -> Plan:
    """Whole rectangles are shared out, since their padding is least when all samples are sorted together."""
    batches = _rectangles(sizes, frame)
    rounds = max(-(-len(batches) // frame.ranks), min(frame.stages, -(-len(sizes) // frame.ranks)))
    _split(batches, rounds * frame.ranks, cost)
    batches.extend([] for _ in range(rounds * frame.ranks - len(batches)))
    shares = share_out([cost(batch) for batch in batches], frame.ranks, equal_counts=True)
    return [[batches[index] for index in share] for share in shares]


def _best_fit(indices: Batch, sizes: Sequence[Size], frame: Frame) -> list[Batch]:
    """Longest first, each where it leaves the least room: at most 11/9 of the fewest (Johnson et al. 1974)."""
    capacity = frame.budget_tokens // frame.multiple_of * frame.multiple_of
    batches: list[Batch] = []
    rooms: list[tuple[int, int]] = []
    for index in sorted(indices, key=lambda i: -sizes[i].tokens):
        need = round_up(sizes[index].tokens, frame.room_multiple)
        place = bisect_left(rooms, (need, 0))
        if place == len(rooms):
            room, batch = capacity, len(batches)
            batches.append([])
        else:
            room, batch = rooms.pop(place)
        batches[batch].append(index)
        insort(rooms, (room - need, batch))
    return batches


def _rectangles(sizes: Sequence[Size], frame: Frame) -> list[Batch]:
    """Longest first, each into the rectangle being filled: later rows are shorter, but would be as wide."""
    batches: list[Batch] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i].tokens):
        if batches and (len(batches[-1]) + 1) * _width(batches[-1], sizes, frame) <= frame.budget_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _split(batches: list[Batch], count: int, cost: Callable[[Batch], float]) -> None:
    """Cut the dearest micro-batch in two, as evenly as its order allows, until there are `count` or all are single."""
    while len(batches) < count:
        dearest = max((batch for batch in batches if len(batch) > 1), key=cost, default=None)
        if dearest is None:
            return
        halves = ((dearest[:at], dearest[at:]) for at in range(1, len(dearest)))
        batches.remove(dearest)
        batches.extend(min(halves, key=lambda pair: max(map(cost, pair))))


def _width(batch: Batch, sizes: Sequence[Size], frame: Frame) -> int:
    """The width of a rectangle whose longest sample is its first."""
    return round_up(sizes[batch[0]].tokens, frame.multiple_of)


class BatchSharder:
    """Cuts samples into micro-batches for each data-parallel rank of one Megatron group; `mask_of` says the targets.

    The budget is that of a whole micro-batch, of which a context-parallel rank works on its share.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        processes: int,
        budget_tokens: int,
        pad_id: int,
        packed: bool,
        flops: Flops | None = None,
        mask_of: MaskOf = trained_tokens,
        fp8: bool = False,
    ) -> None:
        """`flops` balances tokens by default. With `fp8`, each share fits products in FP8. Raises ValueError."""
        if parallel.cp > 1 and not packed:
            raise ValueError(f"cp is {parallel.cp}, which cuts packed sequences; pack them, or set cp to 1.")
        chunks = sequence_chunks(parallel.cp)
        share = parallel.tp if parallel.sequence_parallel else 1
        self.dp_ranks = data_parallel_ranks(parallel, processes)
        """The data-parallel rank of each process of the group."""
        self._frame = Frame(
            budget_tokens=budget_tokens,
            packed=packed,
            ranks=max(self.dp_ranks) + 1,
            stages=parallel.pp,
            multiple_of=share * (lcm(chunks, FP8_TOKENS * parallel.cp) if fp8 else chunks),
            room_multiple=chunks,
        )
        self._pad_id, self._flops, self._mask_of = pad_id, flops or Flops(per_token=1.0), mask_of

    def enough(self, samples: Sequence[Sample]) -> bool:
        """Tell if `samples` give every rank as many micro-batches as there are stages, so that none is idle."""
        return fills(self._plan(samples), self._frame.stages)

    def shard(self, samples: Sequence[Sample]) -> tuple[Plan, list[list[MicroBatch]]]:
        """Which sample is where, and the micro-batches of each data-parallel rank."""
        plan, frame = self._plan(samples), self._frame
        options = (self._pad_id, frame.multiple_of, frame.packed, self._mask_of, frame.room_multiple)
        return plan, [[collate([samples[i] for i in batch], *options) for batch in rank] for rank in plan]

    def load(self, batches: Sequence[Sequence[MicroBatch]]) -> dict[str, int]:
        """Micro-batches of all ranks, those without a sample included; their tokens, alone and with padding, and the most."""
        every = [batch for rank in batches for batch in rank]
        return {
            "micro_batches": len(every),
            "tokens": sum(int(batch.lengths.sum()) for batch in every),
            "room": sum(batch.tokens.size for batch in every),
            "budget": len(every) * self._frame.budget_tokens,
        }

    def _plan(self, samples: Sequence[Sample]) -> Plan:
        trajectories = [sample.trajectory for sample in samples]
        sizes = [Size(len(each.tokens), int(self._mask_of(each).sum())) for each in trajectories]
        return plan_micro_batches(sizes, self._flops, self._frame)


def data_parallel_ranks(parallel: ParallelConfig, processes: int) -> list[int]:
    """The data-parallel rank of each process of a Megatron group, in which tp counts fastest, then cp, dp and pp."""
    inner = parallel.tp * parallel.cp
    ranks = max(1, processes // (inner * parallel.pp))
    return [process // inner % ranks for process in range(processes)]
