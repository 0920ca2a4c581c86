"""What the sharder hands to the ranks holds every sample once, in the layout asked for."""

from __future__ import annotations

import numpy as np
import pytest

from rlsys.config.schema import ParallelConfig
from rlsys.data.trajectory import Sample, response_tokens
from rlsys.trainer.batches import BatchSharder
from tests.orchestrator.pipeline.build import sample


def samples(*lengths: int) -> list[Sample]:
    """Sample i holds only the token i + 1."""
    return [sample([i + 1] * n, [False] + [True] * (n - 1), old=[0.0] * n) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("packed", [False, True])
def test_every_sample_is_dealt_once_and_found_again(packed: bool) -> None:
    parallel = ParallelConfig(tp=2, pp=2, sequence_parallel=True)
    sharder = BatchSharder(parallel, processes=8, budget_tokens=16, pad_id=0, packed=packed)
    plan, batches = sharder.shard(samples(9, 7, 5, 5, 3, 2, 2))
    found = {}
    for indices_of_rank, batches_of_rank in zip(plan, batches, strict=True):
        for indices, batch in zip(indices_of_rank, batches_of_rank, strict=True):
            assert batch.packed is packed
            assert batch.tokens.shape[1] % 2 == 0, "sequence parallelism cuts it over two ranks"
            assert batch.tokens.size <= 16
            found |= dict(zip(indices, batch.split(batch.tokens), strict=True))
    assert len(batches) == 2
    assert {index: tokens.tolist() for index, tokens in found.items()} == {
        index: [index + 1] * length for index, length in enumerate((9, 7, 5, 5, 3, 2, 2))
    }


def test_context_parallel_ranks_share_micro_batches_whose_sequences_are_cut_evenly() -> None:
    parallel = ParallelConfig(tp=2, cp=2, sequence_parallel=True)
    sharder = BatchSharder(parallel, processes=8, budget_tokens=30, pad_id=0, packed=True)
    plan, batches = sharder.shard(samples(9, 7, 5, 5, 3, 2, 2))
    assert len(batches) == 2, "data-parallel ranks"
    assert sorted(index for rank in plan for batch in rank for index in batch) == list(range(7))
    for batch in (batch for rank in batches for batch in rank):
        assert not (np.diff(batch.boundaries) % 4).any(), "two chunks for each of two ranks"
        assert batch.tokens.size % 8 == 0, "and sequence parallelism cuts a rank's share in two"
        assert batch.tokens.size <= 30
    with pytest.raises(ValueError, match="cp is 2, which cuts packed sequences"):
        BatchSharder(parallel, processes=8, budget_tokens=30, pad_id=0, packed=False)


@pytest.mark.parametrize("packed", [False, True])
def test_every_share_fits_fp8(packed: bool) -> None:
    """Of rows that sequence parallelism cuts in two, and packed ones that two context-parallel ranks halve before."""
    cp = 2 if packed else 1
    parallel = ParallelConfig(tp=2, cp=cp, sequence_parallel=True)
    sharder = BatchSharder(parallel, processes=4, budget_tokens=128, pad_id=0, packed=packed, fp8=True)
    _, batches = sharder.shard(samples(9, 7, 5, 5, 3, 2, 2))
    for batch in (batch for rank in batches for batch in rank):
        assert batch.tokens.shape[1] % (16 * 2 * cp) == 0
        assert batch.tokens.size <= 128
        if packed:
            assert not (np.diff(batch.boundaries) % 4).any()


@pytest.mark.parametrize("packed", [False, True])
def test_enough_is_a_sample_for_every_stage_of_every_rank(packed: bool) -> None:
    sharder = BatchSharder(ParallelConfig(pp=2), processes=4, budget_tokens=100, pad_id=0, packed=packed)
    assert [sharder.enough(samples(*[5] * count)) for count in range(6)] == [False] * 4 + [True] * 2
    assert BatchSharder(ParallelConfig(), 1, 100, pad_id=0, packed=packed).enough(samples(5))


def test_targets_are_what_the_mask_says() -> None:
    masked = sample([1, 2, 3, 4], [False, False, True, False])
    sharder = BatchSharder(ParallelConfig(), 1, 100, pad_id=0, packed=True, mask_of=response_tokens)
    (batches,) = sharder.shard([masked])[1]
    assert [batch.targets.tolist() for batch in batches] == [[2, 3, 4]]


def test_a_rest_is_filled_up_so_that_all_ranks_do_the_same() -> None:
    sharder = BatchSharder(ParallelConfig(), processes=2, budget_tokens=100, pad_id=7, packed=True)
    plan, batches = sharder.shard(samples(4))
    assert plan == [[[0]], [[]]]
    assert [len(of_rank) for of_rank in batches] == [1, 1]
    assert batches[1][0].trained_tokens == 0
    assert np.all(batches[1][0].tokens == 7)


def test_the_load_of_micro_batches_by_hand() -> None:
    # Rectangles of 9 + 7, of 5 + 5 + 3 and of 2 + 2 tokens as wide as their longest, rounded up to 2 tokens.
    padded = BatchSharder(ParallelConfig(tp=2, sequence_parallel=True), 2, 20, pad_id=0, packed=False)
    _, batches = padded.shard(samples(9, 7, 5, 5, 3, 2, 2))
    assert padded.load(batches) == {"micro_batches": 3, "tokens": 33, "room": 2 * 10 + 3 * 6 + 2 * 2, "budget": 60}
    # The second rank has nothing: its row of two tokens is padding, and its budget counts.
    packed = BatchSharder(ParallelConfig(), 2, 100, pad_id=0, packed=True)
    assert packed.load(packed.shard(samples(4))[1]) == {"micro_batches": 2, "tokens": 4, "room": 6, "budget": 200}
