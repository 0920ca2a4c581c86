"""The batcher's invariants, on any lengths."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.pipeline.batcher import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 300), max_size=80)
BUDGET = st.integers(1, 1200)
RANKS = st.integers(1, 5)
MULTIPLE = st.sampled_from([1, 2, 4, 8])


def padded(lengths: list[int], batch: list[int], multiple_of: int) -> int:
    """Tokens of the rectangle that `batch` fills."""
    width = max((lengths[index] for index in batch), default=0)
    while width % multiple_of:
        width += 1
    return len(batch) * width


@given(LENGTHS, BUDGET, RANKS, MULTIPLE)
def test_every_sample_is_in_exactly_one_micro_batch(
    lengths: list[int], budget: int, ranks: int, multiple_of: int
) -> None:
    plan = plan_micro_batches(lengths, budget, ranks, multiple_of)
    placed = [index for of_rank in plan for batch in of_rank for index in batch]
    assert sorted(placed) == list(range(len(lengths)))


@given(LENGTHS, BUDGET, RANKS, MULTIPLE)
def test_only_a_single_sample_may_exceed_the_budget(
    lengths: list[int], budget: int, ranks: int, multiple_of: int
) -> None:
    for of_rank in plan_micro_batches(lengths, budget, ranks, multiple_of):
        for batch in of_rank:
            assert padded(lengths, batch, multiple_of) <= budget or len(batch) == 1


@given(LENGTHS, BUDGET, RANKS, MULTIPLE)
def test_every_rank_gets_equally_many_and_none_more_than_needed(
    lengths: list[int], budget: int, ranks: int, multiple_of: int
) -> None:
    plan = plan_micro_batches(lengths, budget, ranks, multiple_of)
    assert len(plan) == ranks
    counts = {len(of_rank) for of_rank in plan}
    assert len(counts) == 1
    filled = sum(bool(batch) for of_rank in plan for batch in of_rank)
    assert counts == {-(-filled // ranks)}


@given(LENGTHS, BUDGET, RANKS, MULTIPLE)
def test_two_ranks_differ_by_one_micro_batch_at_most(
    lengths: list[int], budget: int, ranks: int, multiple_of: int
) -> None:
    costs = [
        [padded(lengths, batch, multiple_of) for batch in of_rank]
        for of_rank in plan_micro_batches(lengths, budget, ranks, multiple_of)
    ]
    loads = [sum(of_rank) for of_rank in costs]
    assert max(loads) - min(loads) <= max((cost for of_rank in costs for cost in of_rank), default=0)


@given(LENGTHS, BUDGET, MULTIPLE)
def test_micro_batches_are_as_full_as_their_longest_samples_allow(
    lengths: list[int], budget: int, multiple_of: int
) -> None:
    """The longest sample of the next micro-batch would not have fitted into the one before."""
    (plan,) = plan_micro_batches(lengths, budget, 1, multiple_of)
    ordered = sorted(plan, key=lambda batch: max(lengths[i] for i in batch), reverse=True)
    for batch, following in pairwise(ordered):
        longest = max(following, key=lambda i: lengths[i])
        assert lengths[longest] <= min(lengths[i] for i in batch)
        assert padded(lengths, [*batch, longest], multiple_of) > budget


@pytest.mark.parametrize(
    ("lengths", "budget", "ranks", "plan"),
    [
        ([], 10, 2, [[], []]),
        ([5], 10, 2, [[[0]], [[]]]),
        ([30, 2, 2], 10, 1, [[[0], [1, 2]]]),  # the first alone exceeds the budget
        ([4, 3, 4, 1], 8, 2, [[[0, 2]], [[1, 3]]]),
    ],
)
def test_by_hand(lengths: list[int], budget: int, ranks: int, plan: list[list[list[int]]]) -> None:
    assert plan_micro_batches(lengths, budget, ranks) == plan
