"""Tests of dealing samples to ranks and micro-batches: invariants and plans by hand."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import ParallelConfig
from rlsys.data.trajectory import Sample
from rlsys.trainer.batches import (
    BatchSharder,
    MicroBatchSpec,
    Plan,
    SampleSize,
    columns_of,
    fills_stages,
    plan_micro_batches,
)
from rlsys.weights.flops import Flops
from tests.support.trajectories import sample

FEW = settings(max_examples=50)
FLOPS = Flops(per_token=50.0, per_target=20.0, per_square=1.0)
SIZES = st.lists(
    st.integers(2, 300).flatmap(lambda tokens: st.builds(SampleSize, st.just(tokens), st.integers(0, tokens - 1))),
    max_size=60,
)
MULTIPLES = st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (4, 4), (16, 8)])
"""(a, b): the length of a row is a multiple of a, and the length of each of its sequences a multiple of b."""
FRAME = MULTIPLES.flatmap(
    lambda multiples: st.builds(
        MicroBatchSpec,
        budget_tokens=st.integers(1, 1200),
        packed=st.booleans(),
        ranks=st.integers(1, 5),
        stages=st.integers(1, 4),
        multiple_of=st.just(multiples[0]),
        room_multiple=st.just(multiples[1]),
    )
)


def area(sizes: list[SampleSize], batch: list[int], frame: MicroBatchSpec) -> int:
    """Return the number of tokens that `batch` takes, padding included."""
    lengths = [sizes[index].tokens for index in batch]
    rooms = [length + -length % frame.room_multiple for length in lengths]
    width = sum(rooms) if frame.packed else max(lengths, default=0)
    while width % frame.multiple_of:
        width += 1
    return width if frame.packed else len(batch) * width


def cost(sizes: list[SampleSize], batch: list[int], frame: MicroBatchSpec) -> float:
    """Return the number of operations of `batch`; without packing, every row costs as much as the longest."""
    if not frame.packed and batch:
        width = area(sizes, batch, frame) // len(batch)
        return sum(50.0 * width + width**2 + 20.0 * sizes[index].targets for index in batch)
    return sum(50.0 * n + n**2 + 20.0 * targets for n, targets in (sizes[index] for index in batch))


@settings(max_examples=100)
@given(SIZES, FRAME)
def test_plan_has_every_sample_once_within_the_budget_and_is_balanced(
    sizes: list[SampleSize], frame: MicroBatchSpec
) -> None:
    """All ranks have the same number of micro-batches, enough to fill every stage if possible.

    A micro-batch may exceed the budget only if it holds a single sample. The loads of two ranks differ by at most one
    sample if packed, else by one micro-batch.
    """
    plan = plan_micro_batches(sizes, FLOPS, frame)
    dealt = [[index for batch in batches for index in batch] for batches in plan]
    assert sorted(chain(*dealt)) == list(range(len(sizes)))
    assert len(plan) == frame.ranks
    assert len({len(batches) for batches in plan}) == 1
    for batches, samples in zip(plan, dealt, strict=True):
        assert all(area(sizes, batch, frame) <= frame.budget_tokens or len(batch) == 1 for batch in batches)
        filled = sum(map(bool, batches))
        assert filled == min(len(batches), len(samples)), "a micro-batch is empty although another could be split"
        assert filled >= min(frame.stages, len(samples))
    if not frame.packed and len(sizes) >= frame.ranks * frame.stages:
        assert fills_stages(plan, frame.stages)
    loads = [sum(cost(sizes, batch, frame) for batch in batches) for batches in plan]
    pieces = [[index] for index in range(len(sizes))] if frame.packed else chain(*plan)
    assert max(loads) - min(loads) <= max((cost(sizes, piece, frame) for piece in pieces), default=0.0)


@pytest.mark.parametrize(
    ("lengths", "frame", "plan"),
    [
        ([5], MicroBatchSpec(10, packed=False, ranks=2), [[[0]], [[]]]),
        # Padded rows are 4 and 3 tokens wide; packed, 6 + 4 and 5 + 3 + 2 tokens fill two rows.
        ([4, 3, 4, 1], MicroBatchSpec(8, packed=False), [[[0, 2], [1, 3]]]),
        ([6, 5, 4, 3, 2], MicroBatchSpec(10, packed=True), [[[0, 2], [1, 3, 4]]]),
        # One micro-batch would be enough, but there are two stages.
        ([4, 3, 2, 1], MicroBatchSpec(99, packed=True, stages=2), [[[1, 2, 3], [0]]]),
    ],
)
def test_plan_is_the_one_worked_out_by_hand(lengths: list[int], frame: MicroBatchSpec, plan: Plan) -> None:
    assert plan_micro_batches([SampleSize(length, 0) for length in lengths], Flops(1.0), frame) == plan


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=5))
@FEW
def test_context_parallel_ranks_share_all_tokens_and_work_equally(cp: int, sizes: list[int]) -> None:
    boundaries = np.cumsum([0, *(2 * cp * size for size in sizes)])
    shares = [columns_of(boundaries, cp, rank) for rank in range(cp)]
    assert sorted(np.concatenate(shares)) == list(range(boundaries[-1]))
    begins = np.repeat(boundaries[:-1], np.diff(boundaries))
    attended = np.arange(boundaries[-1]) - begins + 1
    assert len({int(attended[share].sum()) for share in shares}) == 1
    assert len({len(share) for share in shares}) == 1
    assert all((np.diff(share) > 0).all() for share in shares)


LENGTHS = (9, 7, 5, 5, 3, 2, 2)


def samples(*lengths: int) -> list[Sample]:
    """Return samples of these lengths; all tokens of sample i are i + 1."""
    return [sample([i + 1] * n, [False] + [True] * (n - 1), old=[0.0] * n) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("parallel", "packed", "fp8", "budget", "multiple"),
    [
        (ParallelConfig(tp=2, pp=2, sequence_parallel=True), False, False, 16, 2),
        (ParallelConfig(tp=2, cp=2, sequence_parallel=True), True, False, 30, 8),
        (ParallelConfig(tp=2, cp=2, sequence_parallel=True), True, True, 128, 64),
    ],
)
def test_every_sample_is_dealt_once_in_rows_that_ranks_can_cut(
    parallel: ParallelConfig, packed: bool, fp8: bool, budget: int, multiple: int
) -> None:
    """Sequence and context parallelism split rows, with fp8 into multiples of 16 tokens; cp splits sequences too."""
    replica = parallel.tp * parallel.pp * parallel.cp
    sharder = BatchSharder(parallel, processes=2 * replica, budget_tokens=budget, pad_id=0, packed=packed, fp8=fp8)
    plan, batches = sharder.shard(samples(*LENGTHS))
    assert len(batches) == 2, "data-parallel ranks"
    found = {}
    for indices_of_rank, batches_of_rank in zip(plan, batches, strict=True):
        for indices, batch in zip(indices_of_rank, batches_of_rank, strict=True):
            assert batch.packed is packed
            assert batch.tokens.shape[1] % multiple == 0
            assert batch.tokens.size <= budget
            if parallel.cp > 1:
                assert not (np.diff(batch.boundaries) % 4).any(), "two chunks for each of two ranks"
            found |= dict(zip(indices, batch.split(batch.tokens), strict=True))
    assert {index: tokens.tolist() for index, tokens in found.items()} == {
        index: [index + 1] * length for index, length in enumerate(LENGTHS)
    }


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 4), st.integers(1, 3), st.booleans())
@FEW
def test_samples_are_enough_exactly_if_their_plan_fills_every_stage(
    lengths: list[int], ranks: int, stages: int, packed: bool
) -> None:
    sharder = BatchSharder(ParallelConfig(pp=stages), ranks * stages, budget_tokens=60, pad_id=0, packed=packed)
    given = samples(*lengths)
    assert sharder.fills_micro_batches(given) is fills_stages(sharder.plan(given), stages)


def test_enough_means_a_sample_for_every_stage_of_every_rank() -> None:
    sharder = BatchSharder(ParallelConfig(pp=2), processes=4, budget_tokens=100, pad_id=0, packed=True)
    assert [sharder.fills_micro_batches(samples(*[5] * count)) for count in range(6)] == [False] * 4 + [True] * 2


def test_load_counts_padding_to_the_longest_row() -> None:
    # Micro-batches of 9 + 7, of 5 + 5 + 3 and of 2 + 2 tokens; rows are as wide as the longest, rounded up to 2 tokens.
    padded = BatchSharder(ParallelConfig(tp=2, sequence_parallel=True), 2, 20, pad_id=0, packed=False)
    _, batches = padded.shard(samples(*LENGTHS))
    assert padded.load(batches) == {"micro_batches": 3, "tokens": 33, "room": 2 * 10 + 3 * 6 + 2 * 2, "budget": 60}
