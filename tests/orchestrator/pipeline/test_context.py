"""Shares of context-parallel ranks, by hand and for any row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from rlsys.trainer.batches import columns_of, sequence_chunks


def test_a_rank_has_an_early_and_a_late_chunk_of_every_sequence() -> None:
    boundaries = [0, 8, 12]
    assert_array_equal(columns_of(boundaries, cp=2, rank=0), [0, 1, 6, 7, 8, 11])
    assert_array_equal(columns_of(boundaries, cp=2, rank=1), [2, 3, 4, 5, 9, 10])


def test_chunks_are_two_for_each_rank_where_there_are_several() -> None:
    assert [sequence_chunks(cp) for cp in (1, 2, 4)] == [1, 4, 8]


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_every_token_is_one_ranks_and_all_have_the_same_work(cp: int, sizes: list[int]) -> None:
    boundaries = np.cumsum([0, *(2 * cp * size for size in sizes)])
    shares = [columns_of(boundaries, cp, rank) for rank in range(cp)]
    assert sorted(np.concatenate(shares)) == list(range(boundaries[-1]))
    begins = np.repeat(boundaries[:-1], np.diff(boundaries))
    seen = np.arange(boundaries[-1]) - begins + 1  # tokens that each attends to
    assert len({int(seen[share].sum()) for share in shares}) == 1
    assert len({len(share) for share in shares}) == 1
    assert all((np.diff(share) > 0).all() for share in shares)


def test_a_sequence_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[8, 6\] tokens cannot be cut into 4 chunks"):
        columns_of([0, 8, 14], cp=2, rank=0)
