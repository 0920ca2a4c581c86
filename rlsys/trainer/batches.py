"""Builds micro-batches from samples and shards them over data-parallel ranks under a token budget.

Pure numpy: no torch, no Ray. A per-token array is [rows, width], either padded or packed. Samples of 3 and 2 tokens:

    padded   a0 a1 a2        packed   a0 a1 a2 b0 b1        packed, room_multiple 4   a0 a1 a2 .  b0 b1 .  .
             b0 b1 .

Each entry of a per-token array describes its token as a target. A sequence's first token has no predecessor and is
never trained; `MicroBatch` rejects a mask that selects it, so no packed sequence is predicted from the sequence before
it. `room_multiple` pads packed sequences so that context parallelism cuts each sequence evenly. Attention is
causal: only padding attends to padding.

Invariants of sharding:
- Every sample is in exactly one micro-batch.
- A micro-batch exceeds the token budget only if it is a single sample.
- Every rank gets the same number of micro-batches, because a rank with fewer would block the others. The number is at
  least the number of pipeline stages if a rank has that many samples.
- A micro-batch is empty only on a rank with fewer samples than another rank has micro-batches.

Balance: the loads of two ranks, in floating-point operations, differ by at most the most expensive sample (packed) or
micro-batch (padded). For packed samples, the largest load is at most 4/3 - 1/(3 ranks) times the largest load of the
best partition.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import ParallelConfig
from rlsys.data.trajectory import Floats, MaskOf, Routes, Sample, trained_tokens, unrouted
from rlsys.weights.flops import Flops


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences for one forward pass."""

    tokens: NDArray[np.int64]
    """[rows, width], padded on the right. Padded: one row per sequence. Packed: one row in total."""
    lengths: NDArray[np.int64]
    """[sequences] number of tokens of each sequence, padding excluded; empty for a micro-batch without samples."""
    loss_mask: NDArray[np.bool_]
    """[rows, width] True for the targets: trained tokens, or the tokens that `collate` selected by `mask_of`."""
    advantages: Floats
    """[rows, width] advantages times correction weights; 0 on untrained tokens."""
    old_logprobs: Floats | None = None
    """[rows, width] log-probs under the policy before the update."""
    ref_logprobs: Floats | None = None
    """[rows, width] log-probs under the reference policy; None without a reference."""
    values: Floats | None = None
    """[rows, width] values of the critic before the update."""
    returns: Floats | None = None
    """[rows, width] training targets of the critic."""
    pick_tokens: NDArray[np.int32] | None = None
    """[targets, k] most likely tokens, in the order of `targets`; see `TopkLogprobs`."""
    pick_logprobs: Floats | None = None
    """[targets, k] the reference's log-probs of `pick_tokens`."""
    routes: Routes | None = None
    """[rows, width, layers, k] experts of each token as input, or `unrouted`; None if the policy routes every token."""
    packed: bool = False
    room_multiple: int = 1
    """Each packed sequence is padded to a multiple of this many tokens."""
    episode_lengths: NDArray[np.int64] | None = None
    """[sequences] trained tokens of the episode whose branch the sequence is; None if each sequence is an episode."""
    counts_episode: NDArray[np.bool_] | None = None
    """[sequences] False where another sequence counts the episode; None if each sequence is an episode."""

    def __post_init__(self) -> None:
        if self.pick_tokens is not None and len(self.pick_tokens) != self.trained_tokens:
            picked, trained = len(self.pick_tokens), self.trained_tokens
            raise ValueError(f"The micro-batch has picks for {picked} tokens but {trained} targets.")
        if self.loss_mask.ravel()[self._starts].any():
            raise ValueError("The first token of a sequence is marked as trained, but nothing predicts it.")

    @property
    def trained_tokens(self) -> int:
        """Number of targets."""
        return int(self.loss_mask.sum())

    @property
    def targets(self) -> NDArray[np.int64]:
        """[trained tokens] target tokens, row by row."""
        return self.tokens[self.loss_mask]

    @property
    def trained_lengths(self) -> NDArray[np.int64]:
        """[sequences] number of trained tokens of each sequence."""
        return np.array([mask.sum() for mask in self.split(self.loss_mask)], dtype=np.int64)

    @property
    def trained_by_episode(self) -> NDArray[np.int64]:
        """[sequences] number of trained tokens of each sequence's whole episode, which may have further sequences."""
        return self.trained_lengths if self.episode_lengths is None else self.episode_lengths

    @property
    def counted_episodes(self) -> NDArray[np.int64]:
        """[episodes] number of trained tokens of each episode that this micro-batch counts, whole, for the divisor.

        Over all micro-batches of an optimiser step, every episode counts once.
        """
        every = self.trained_by_episode
        return every if self.counts_episode is None else every[self.counts_episode]

    @property
    def sequence_numbers(self) -> NDArray[np.int64]:
        """[rows, width] index of each token's sequence, from 0; -1 for padding."""
        numbers = np.full(self.tokens.size, -1, dtype=np.int64)
        for number, (start, length) in enumerate(zip(self._starts, self.lengths, strict=True)):
            numbers[start : start + length] = number
        return numbers.reshape(self.tokens.shape)

    @property
    def turn_numbers(self) -> NDArray[np.int64]:
        """[rows, width] index of each target's turn, from 0: a run of consecutive targets. Other tokens have any index.

        No run crosses into another sequence, because a sequence's first token is no target.
        """
        follows = np.pad(self.loss_mask.ravel(), (1, 0))[:-1]
        starts = self.loss_mask.ravel() & ~follows
        return np.maximum(np.cumsum(starts, dtype=np.int64) - 1, 0).reshape(self.tokens.shape)

    def spread(self, values: NDArray) -> NDArray:
        """Repeat `values` [sequences] over the tokens of their sequences: [rows, width], 0 in padding."""
        return np.append(values, np.zeros(1, dtype=values.dtype))[self.sequence_numbers]  # Index -1 is padding.

    @property
    def boundaries(self) -> NDArray[np.int32]:
        """[sequences + 1] start of each sequence in a packed row, then the row's end.

        Padding at the row's end counts as one more sequence.
        """
        ends = np.cumsum(self._rooms, dtype=np.int32)
        width = np.int32(self.tokens.size)
        padding = [width] if not len(ends) or ends[-1] < width else []
        return np.concatenate([[np.int32(0)], ends, padding]).astype(np.int32)

    def split(self, values: NDArray) -> list[NDArray]:
        """Split `values` [rows, width] into one array [length] per sequence, without padding."""
        flat = values.ravel()
        return [flat[start : start + length] for start, length in zip(self._starts, self.lengths, strict=True)]

    @property
    def _starts(self) -> NDArray[np.int64]:
        """[sequences] index of each sequence's first token in a flattened per-token array."""
        if self.packed:
            return np.cumsum(self._rooms) - self._rooms
        return np.arange(len(self.lengths)) * self.tokens.shape[1]

    @property
    def _rooms(self) -> NDArray[np.int64]:
        """[sequences] number of tokens that each sequence occupies in a packed row, padding included."""
        return -(-self.lengths // self.room_multiple) * self.room_multiple


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probs of one micro-batch: log p(token | preceding tokens) of each trained token, 0 elsewhere."""

    policy: NDArray[np.float32] | None
    """[rows, width]; None if the worker does not recompute them."""
    reference: NDArray[np.float32] | None
    """[rows, width]; None without a reference."""
    picks: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """Top k tokens [trained tokens, k] and the reference's log-probs of them, in the order of `MicroBatch.targets`.

    None unless the KL term sums over a top k."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Results of the forward passes of `accumulate`."""

    stats: Mapping[str, float]
    """The loss's statistics over all micro-batches."""
    logprobs: list[NDArray[np.float32]] | None = None
    """[rows, width] per micro-batch: the policy's log-probs of trained tokens, 0 elsewhere; None unless they are the
    old log-probs."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Result of one optimiser step; equal on all ranks."""

    step: int
    """Optimiser steps taken, this one included."""
    grad_norm: float
    """Gradient norm before clipping."""
    lr: float
    """Learning rate of this step."""
    divisor: int
    """Divisor of the summed losses, set by the aggregation: trained tokens, episodes, or episodes * loss_length."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def collate(
    samples: Sequence[Sample],
    pad_id: int,
    multiple_of: int = 1,
    packed: bool = False,
    mask_of: MaskOf = trained_tokens,
    room_multiple: int = 1,
) -> MicroBatch:
    """Build a micro-batch from `samples`, with a width that is a multiple of `multiple_of` tokens.

    If `packed`, each sequence is padded to a multiple of `room_multiple`. `mask_of` selects the targets of a
    trajectory. An optional array is None if any sample lacks it; routes are unknown where a sample lacks them. Without
    samples, the result is one row of padding, for a rank that has fewer samples than others. Raises ValueError if
    `room_multiple` does not divide `multiple_of`.
    """
    if multiple_of % room_multiple:
        raise ValueError(f"A row of {multiple_of} tokens cannot be cut into sequences of {room_multiple}.")
    lengths = [len(sample.trajectory.tokens) for sample in samples]
    rooms = [round_up(length, room_multiple) for length in lengths]
    longest = sum(rooms) if packed else max(lengths, default=0)
    width = round_up(max(longest, 2), multiple_of)  # one token to predict from, one to predict
    rows = 1 if packed else max(1, len(samples))
    starts = [0, *accumulate(rooms)][: len(rooms)] if packed else range(0, width * len(samples), width)

    def lay_out(values: Callable[[Sample], Any], fill: float, dtype: Any, of_token: Sequence[int] = ()) -> NDArray:
        out: NDArray = np.full((rows, width, *of_token), fill, dtype=dtype)
        flat = out.reshape(-1, *of_token)
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
        routes=_routes(samples, lay_out),
        packed=packed,
        room_multiple=room_multiple,
        **_episodes(samples),
    )


def _routes(samples: Sequence[Sample], lay_out: Callable[..., Routes]) -> Routes | None:
    """Return the routes of a micro-batch, unknown where a sample lacks them; None if all do."""
    known = next((found for sample in samples if (found := sample.trajectory.routes) is not None), None)
    if known is None:
        return None
    unknown = unrouted(known)

    def of(sample: Sample) -> Routes | int:
        return unknown if sample.trajectory.routes is None else sample.trajectory.routes

    return lay_out(of, unknown, known.dtype, known.shape[1:])


def _episodes(samples: Sequence[Sample]) -> dict[str, NDArray]:
    """Return the fields of a micro-batch about episodes of several branches; empty without such an episode."""
    if all(sample.episode_tokens is None for sample in samples):
        return {}
    lengths = [sample.trained_tokens if sample.episode_tokens is None else sample.episode_tokens for sample in samples]
    counts = [sample.counts_episode for sample in samples]
    return {"episode_lengths": np.array(lengths, dtype=np.int64), "counts_episode": np.array(counts, dtype=np.bool_)}


def sequence_chunks(cp: int) -> int:
    """Return the number of chunks into which `cp` ranks cut a sequence; it must divide the sequence's padded length."""
    return 2 * cp if cp > 1 else 1


def columns_of(boundaries: Sequence[int] | NDArray[np.integer], cp: int, rank: int) -> NDArray[np.int64]:
    """Return the columns of a packed row that context-parallel rank `rank` of `cp` computes: [tokens / cp], ascending.

    Each sequence is cut into 2 cp chunks of equal length, and rank r computes chunks r and 2 cp - 1 - r. An early chunk
    attends to few tokens and a late one to many, so causal attention costs every rank the same. Example, cp=2, 8
    tokens:

        rank 0   0 1     6 7
        rank 1       2 3 4 5

    Megatron's rotary positions and Transformer Engine's attention (`thd_get_partitioned_indices`) use the same cut.
    `boundaries` is `MicroBatch.boundaries`. Raises ValueError if a sequence's length is not a multiple of 2 cp.
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
"""Indices of the sequences of one micro-batch. A sequence is a branch of a sample, in the order of the samples."""
Plan = list[list[Batch]]
"""Micro-batches of each data-parallel rank."""


FP8_TOKENS = 16
"""Token counts in FP8 matrix products are multiples of this number: cuBLAS aligns rows to 16 bytes, and in the products
for weight gradients a row has one byte per token."""


class SampleSize(NamedTuple):
    tokens: int
    targets: int
    """Target tokens; the output layer runs for these only."""


@dataclass(frozen=True, slots=True)
class MicroBatchSpec:
    """Constraints on the micro-batches of one Megatron group."""

    budget_tokens: int
    """Maximum tokens of a micro-batch, padding included."""
    packed: bool
    """True: one row of concatenated sequences. False: a padded rectangle."""
    ranks: int = 1
    """Number of data-parallel ranks."""
    stages: int = 1
    """Number of pipeline stages."""
    multiple_of: int = 1
    """Multiple to which a micro-batch's width is rounded up."""
    room_multiple: int = 1
    """Multiple to which each packed sample is padded; divides `multiple_of`."""


def plan_micro_batches(sizes: Sequence[SampleSize], flops: Flops, spec: MicroBatchSpec) -> Plan:
    """Assign samples to micro-batches and ranks; each rank's micro-batches are sorted by cost, most expensive first."""

    def cost(batch: Batch) -> float:
        if spec.packed or not batch:
            return sum(flops.of(*sizes[index]) for index in batch)
        width = _width(batch, sizes, spec)
        return sum(flops.of(width, sizes[index].targets) for index in batch)

    plan = _packed(sizes, spec, cost) if spec.packed else _padded(sizes, spec, cost)
    deepest = max(map(len, plan))
    for batches in plan:
        batches.sort(key=cost, reverse=True)
        batches.extend([] for _ in range(deepest - len(batches)))
    return plan


def fills_stages(plan: Plan, stages: int) -> bool:
    """Return True if every rank has at least `stages` non-empty micro-batches; with fewer, a stage would be idle."""
    return all(sum(map(bool, batches)) >= stages for batches in plan)


def balance(costs: Sequence[float], ranks: int, equal_counts: bool = False) -> list[list[int]]:
    """Partition the indices of `costs` over `ranks` ranks; the ranks' sums differ by at most the largest cost.

    Largest differencing method (Karmarkar and Karp 1982): repeatedly join the two partial partitions of widest spread,
    the most expensive share of the first with the cheapest share of the second, and so on. A join never widens the
    larger spread, hence the bound. The largest sum is at most 4/3 - 1/(3 ranks) times the optimum (Michiels et al.
    2007). The method starts from single items. With `equal_counts`, it starts from groups of `ranks` items of similar
    cost (Yakir 1996), and `ranks` must divide the number of items. For log-normal lengths, the imbalance is a tenth of
    the imbalance of the greedy longest-first assignment.
    """
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    step = ranks if equal_counts else 1
    # [partition][rank] cost and indices, most expensive first, without the ranks that have nothing: joining is then cheap
    # on many ranks.
    partitions = [
        [(costs[index], [index]) for index in order[start : start + step]] for start in range(0, len(order), step)
    ]

    def spread(shares: list[tuple[float, Batch]]) -> float:
        return shares[0][0] - (shares[-1][0] if len(shares) == ranks else 0.0)

    def filled(shares: list[tuple[float, Batch]]) -> list[tuple[float, Batch]]:
        return shares + [(0.0, []) for _ in range(ranks - len(shares))]

    # Entries are (negative spread, age, shares): the widest spread is popped first, and age breaks ties without
    # comparing shares.
    heap = [(-spread(shares), age, shares) for age, shares in enumerate(partitions)]
    heapify(heap)
    while len(heap) > 1:
        (_, age, first), (_, _, second) = heappop(heap), heappop(heap)
        if len(second) == 1:  # Nearly every join; without this path, each would copy and sort all ranks.
            _join_one(first, second[0], ranks)
            joined = first
        elif len(first) + len(second) <= ranks:
            joined = sorted(first + second[::-1], key=lambda share: -share[0])
        else:
            pairs = zip(filled(first), reversed(filled(second)), strict=True)
            joined = [(cost + other, indices + others) for (cost, indices), (other, others) in pairs]
            joined.sort(key=lambda share: -share[0])
        heappush(heap, (-spread(joined), age, joined))
    return [indices for _, indices in filled(heap[0][2] if heap else [])]


def _join_one(shares: list[tuple[float, Batch]], one: tuple[float, Batch], ranks: int) -> None:
    """Give `one` to a rank that has nothing, else to the cheapest; keep `shares` sorted, most expensive first."""
    if len(shares) == ranks:
        cost, indices = shares.pop()
        indices += one[1]  # In place: on few ranks, these lists are long.
        one = (cost + one[0], indices)
    insort(shares, one, key=lambda share: -share[0])


def _packed(sizes: Sequence[SampleSize], spec: MicroBatchSpec, cost: Callable[[Batch], float]) -> Plan:
    """Partition samples over ranks, then fill micro-batches: a packed sample costs the same in every micro-batch."""
    shares = balance([cost([index]) for index in range(len(sizes))], spec.ranks)
    plan = [_best_fit(share, sizes, spec) for share in shares]
    needed = max(*map(len, plan), min(spec.stages, max(map(len, shares))))
    for batches in plan:
        _split(batches, needed, cost)
    return plan


def _padded(sizes: Sequence[SampleSize], spec: MicroBatchSpec, cost: Callable[[Batch], float]) -> Plan:
    """Sort all samples together into rectangles, which minimises padding, then partition the rectangles over ranks."""
    batches = _rectangles(sizes, spec)
    rounds = max(-(-len(batches) // spec.ranks), min(spec.stages, -(-len(sizes) // spec.ranks)))
    _split(batches, rounds * spec.ranks, cost)
    batches.extend([] for _ in range(rounds * spec.ranks - len(batches)))
    shares = balance([cost(batch) for batch in batches], spec.ranks, equal_counts=True)
    return [[batches[index] for index in share] for share in shares]


def _best_fit(indices: Batch, sizes: Sequence[SampleSize], spec: MicroBatchSpec) -> list[Batch]:
    """Best-fit decreasing bin packing: asymptotically at most 11/9 of the minimum number (Johnson et al. 1974)."""
    capacity = spec.budget_tokens // spec.multiple_of * spec.multiple_of
    batches: list[Batch] = []
    rooms: list[tuple[int, int]] = []
    for index in sorted(indices, key=lambda i: -sizes[i].tokens):
        need = round_up(sizes[index].tokens, spec.room_multiple)
        place = bisect_left(rooms, (need, 0))
        if place == len(rooms):
            room, batch = capacity, len(batches)
            batches.append([])
        else:
            room, batch = rooms.pop(place)
        batches[batch].append(index)
        insort(rooms, (room - need, batch))
    return batches


def _rectangles(sizes: Sequence[SampleSize], spec: MicroBatchSpec) -> list[Batch]:
    """Fill rectangles with samples in order of decreasing length; the first row of a rectangle sets its width."""
    batches: list[Batch] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i].tokens):
        if batches and (len(batches[-1]) + 1) * _width(batches[-1], sizes, spec) <= spec.budget_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _split(batches: list[Batch], count: int, cost: Callable[[Batch], float]) -> None:
    """Split the most expensive micro-batch in two, as evenly as its order allows, until there are `count` of them.

    Stops earlier if every micro-batch is a single sample.
    """
    while len(batches) < count:
        dearest = max((batch for batch in batches if len(batch) > 1), key=cost, default=None)
        if dearest is None:
            return
        halves = ((dearest[:at], dearest[at:]) for at in range(1, len(dearest)))
        batches.remove(dearest)
        batches.extend(min(halves, key=lambda pair: max(map(cost, pair))))


def _width(batch: Batch, sizes: Sequence[SampleSize], spec: MicroBatchSpec) -> int:
    """Return the width of a rectangle, whose first sample is its longest."""
    return round_up(sizes[batch[0]].tokens, spec.multiple_of)


def sequences_of(samples: Sequence[Sample]) -> list[Sample]:
    """Return the branches of all samples, in order: what a model reads as one sequence each."""
    return [part for sample in samples for part in sample.by_branch()]


def joined_branches(samples: Sequence[Sample], results: Sequence[Floats]) -> list[Floats]:
    """Return results [branch] of `sequences_of(samples)` as one array [seq] for each sample."""
    found = iter(results)
    return [np.concatenate([next(found) for _ in sample.trajectory.branches]) for sample in samples]


class BatchSharder:
    """Shards samples into micro-batches for the data-parallel ranks of one Megatron group.

    The token budget applies to a whole micro-batch; a context-parallel rank computes a share of it.
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
        """Without `flops`, ranks are balanced by tokens. `mask_of` selects the targets.

        With `fp8`, widths satisfy `FP8_TOKENS`. Raises ValueError for cp > 1 without packing.
        """
        if parallel.cp > 1 and not packed:
            raise ValueError(f"cp={parallel.cp} requires packed sequences; pack them, or set cp to 1.")
        chunks = sequence_chunks(parallel.cp)
        share = parallel.tp if parallel.sequence_parallel else 1
        self.dp_ranks = data_parallel_ranks(parallel, processes)
        """Data-parallel rank of each process of the group."""
        self._spec = MicroBatchSpec(
            budget_tokens=budget_tokens,
            packed=packed,
            ranks=max(self.dp_ranks) + 1,
            stages=parallel.pp,
            multiple_of=share * (lcm(chunks, FP8_TOKENS * parallel.cp) if fp8 else chunks),
            room_multiple=chunks,
        )
        self._pad_id, self._flops, self._mask_of = pad_id, flops or Flops(per_token=1.0), mask_of

    def fills_micro_batches(self, samples: Sequence[Sample]) -> bool:
        """Return True if `samples` give every rank at least one non-empty micro-batch per pipeline stage."""
        parts, spec = sequences_of(samples), self._spec
        if len(parts) < spec.ranks * spec.stages:
            return False
        # One sequence for each is enough, except where sequences are divided between ranks by cost alone.
        return not spec.packed or spec.stages == 1 or fills_stages(self.plan(parts), spec.stages)

    def shard(self, samples: Sequence[Sample]) -> tuple[Plan, list[list[MicroBatch]]]:
        """Return the plan (indices of sequences) and the micro-batches of each data-parallel rank."""
        parts, spec = sequences_of(samples), self._spec
        plan = self.plan(parts)
        options = (self._pad_id, spec.multiple_of, spec.packed, self._mask_of, spec.room_multiple)
        return plan, [[collate([parts[i] for i in batch], *options) for batch in rank] for rank in plan]

    def load(self, batches: Sequence[Sequence[MicroBatch]]) -> dict[str, int]:
        """Return counts over all ranks' micro-batches, empty ones included.

        `tokens` excludes padding, `room` includes it, and `budget` is the token budget of all micro-batches together.
        """
        every = [batch for rank in batches for batch in rank]
        return {
            "micro_batches": len(every),
            "tokens": sum(int(batch.lengths.sum()) for batch in every),
            "room": sum(batch.tokens.size for batch in every),
            "budget": len(every) * self._spec.budget_tokens,
        }

    def plan(self, parts: Sequence[Sample]) -> Plan:
        """Return the indices of the sequences in each rank's micro-batches."""
        trajectories = [sample.trajectory for sample in parts]
        return self.plan_sizes([SampleSize(len(each.tokens), int(self._mask_of(each).sum())) for each in trajectories])

    def plan_sizes(self, sizes: Sequence[SampleSize]) -> Plan:
        """Return the same of sequences with these sizes."""
        return plan_micro_batches(sizes, self._flops, self._spec)


def data_parallel_ranks(parallel: ParallelConfig, processes: int) -> list[int]:
    """Return the data-parallel rank of each process of a Megatron group; tp varies fastest, then cp, dp and pp."""
    inner = parallel.tp * parallel.cp
    ranks = max(1, processes // (inner * parallel.pp))
    return [process // inner % ranks for process in range(processes)]
