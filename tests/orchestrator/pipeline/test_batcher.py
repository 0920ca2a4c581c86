"""The batcher's invariants on any lengths, and its partitions against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.trainer.batches import Flops, Frame, Plan, Size, fills, plan_micro_batches, share_out

UNTIMED = settings(deadline=None)
FLOPS = Flops(per_token=50.0, per_target=20.0, per_square=1.0)
SIZES = st.lists(
    st.integers(2, 300).flatmap(lambda tokens: st.builds(Size, st.just(tokens), st.integers(0, tokens - 1))),
    max_size=60,
)
MULTIPLES = st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (4, 4), (16, 8)])
"""Of a row, and of each of its sequences."""
FRAME = MULTIPLES.flatmap(
    lambda multiples: st.builds(
        Frame,
        budget_tokens=st.integers(1, 1200),
        packed=st.booleans(),
        ranks=st.integers(1, 5),
        stages=st.integers(1, 4),
        multiple_of=st.just(multiples[0]),
        room_multiple=st.just(multiples[1]),
    )
)


def area(sizes: list[Size], batch: list[int], frame: Frame) -> int:
    """Tokens that `batch` takes, padding included."""
    lengths = [sizes[index].tokens for index in batch]
    rooms = [length + -length % frame.room_multiple for length in lengths]
    width = sum(rooms) if frame.packed else max(lengths, default=0)
    while width % frame.multiple_of:
        width += 1
    return width if frame.packed else len(batch) * width


def cost(sizes: list[Size], batch: list[int], frame: Frame) -> float:
    """Operations of `batch`: in a rectangle every row is as long as the longest."""
    if not frame.packed and batch:
        width = area(sizes, batch, frame) // len(batch)
        return sum(50.0 * width + width**2 + 20.0 * sizes[index].targets for index in batch)
    return sum(50.0 * n + n**2 + 20.0 * targets for n, targets in (sizes[index] for index in batch))


def dealt(plan: Plan) -> list[list[int]]:
    return [[index for batch in batches for index in batch] for batches in plan]


@UNTIMED
@given(SIZES, FRAME)
def test_every_sample_is_in_exactly_one_micro_batch(sizes: list[Size], frame: Frame) -> None:
    plan = plan_micro_batches(sizes, FLOPS, frame)
    assert sorted(chain(*dealt(plan))) == list(range(len(sizes)))


@UNTIMED
@given(SIZES, FRAME)
def test_only_a_single_sample_may_exceed_the_budget(sizes: list[Size], frame: Frame) -> None:
    for batches in plan_micro_batches(sizes, FLOPS, frame):
        for batch in batches:
            assert area(sizes, batch, frame) <= frame.budget_tokens or len(batch) == 1


@UNTIMED
@given(SIZES, FRAME)
def test_every_rank_gets_equally_many_and_fills_every_stage_if_it_can(sizes: list[Size], frame: Frame) -> None:
    plan = plan_micro_batches(sizes, FLOPS, frame)
    assert len(plan) == frame.ranks
    assert len({len(batches) for batches in plan}) == 1
    for batches, samples in zip(plan, dealt(plan), strict=True):
        filled = sum(map(bool, batches))
        assert filled == min(len(batches), len(samples)), "empty though there was something to split"
        assert filled >= min(frame.stages, len(samples))
    if not frame.packed and len(sizes) >= frame.ranks * frame.stages:
        assert fills(plan, frame.stages)


@UNTIMED
@given(SIZES, FRAME)
def test_ranks_differ_by_one_sample_or_one_rectangle_at_most(sizes: list[Size], frame: Frame) -> None:
    plan = plan_micro_batches(sizes, FLOPS, frame)
    loads = [sum(cost(sizes, batch, frame) for batch in batches) for batches in plan]
    pieces = [[index] for index in range(len(sizes))] if frame.packed else chain(*plan)
    assert max(loads) - min(loads) <= max((cost(sizes, piece, frame) for piece in pieces), default=0.0)


@UNTIMED
@given(SIZES, FRAME)
def test_a_rank_begins_with_its_dearest_micro_batch(sizes: list[Size], frame: Frame) -> None:
    for batches in plan_micro_batches(sizes, FLOPS, frame):
        costs = [cost(sizes, batch, frame) for batch in batches]
        assert costs == sorted(costs, reverse=True)


@UNTIMED
@given(st.lists(st.integers(2, 20), max_size=7), st.integers(20, 30), st.sampled_from([1, 4]))
def test_packed_micro_batches_are_hardly_more_than_the_fewest(
    lengths: list[int], budget: int, multiple_of: int
) -> None:
    """At most 11/9 of the fewest possible and 6/9 more, the bound of first fit decreasing (Dosa 2007)."""
    frame = Frame(budget, packed=True, multiple_of=multiple_of)
    (plan,) = plan_micro_batches([Size(length, 0) for length in lengths], FLOPS, frame)
    capacity = budget // multiple_of * multiple_of
    assert len(plan) <= 11 / 9 * fewest_bins(lengths, capacity) + 6 / 9


def fewest_bins(lengths: Sequence[int], capacity: int, rooms: tuple[int, ...] = ()) -> int:
    """By trying every partition."""
    if not lengths:
        return len(rooms)
    first, *rest = lengths
    tried = [
        fewest_bins(rest, capacity, (*rooms[:place], room - first, *rooms[place + 1 :]))
        for place, room in enumerate(rooms)
        if room >= first
    ]
    return min([*tried, fewest_bins(rest, capacity, (*rooms, capacity - first))])


@UNTIMED
@given(st.lists(st.integers(1, 100), max_size=8), st.integers(1, 3))
def test_the_dearest_share_is_near_the_best_that_there_is(costs: list[int], ranks: int) -> None:
    shares = share_out(costs, ranks)
    assert sorted(chain(*shares)) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * least_load(costs, (0,) * ranks) + 1e-9
    assert max(loads) - min(loads) <= max(costs, default=0)


def least_load(costs: Sequence[int], loads: tuple[int, ...]) -> int:
    """Of the dearest rank, by trying every partition; ranks of the same load are as good as each other."""
    if not costs:
        return max(loads)
    first, *rest = costs
    distinct = {load: place for place, load in enumerate(loads)}.values()
    return min(least_load(rest, (*loads[:place], loads[place] + first, *loads[place + 1 :])) for place in distinct)


@UNTIMED
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 5))
def test_shares_of_equal_counts_differ_by_one_item_at_most(costs: list[int], ranks: int) -> None:
    costs = costs[: len(costs) // ranks * ranks]
    shares = share_out(costs, ranks, equal_counts=True)
    assert sorted(chain(*shares)) == list(range(len(costs)))
    assert {len(share) for share in shares} == {len(costs) // ranks}
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_differencing_by_hand() -> None:
    """8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2 of 30: 16 and 14. Longest first would end with 17 and 13."""
    values = [8, 7, 6, 5, 4]
    assert sorted(sum(values[index] for index in share) for share in share_out(values, 2)) == [14, 16]


@pytest.mark.parametrize(
    ("lengths", "frame", "plan"),
    [
        ([], Frame(10, packed=True, ranks=2), [[], []]),
        ([], Frame(10, packed=False, ranks=2), [[], []]),
        ([5], Frame(10, packed=True, ranks=2), [[[0]], [[]]]),
        ([5], Frame(10, packed=False, ranks=2), [[[0]], [[]]]),
        # The first alone exceeds the budget.
        ([30, 2, 2], Frame(10, packed=False), [[[0], [1, 2]]]),
        ([30, 2, 2], Frame(10, packed=True), [[[0], [1, 2]]]),
        # Rectangles of width 4 and 3; packed, 6 + 4 and 5 + 3 + 2 fill two rows.
        ([4, 3, 4, 1], Frame(8, packed=False), [[[0, 2], [1, 3]]]),
        ([6, 5, 4, 3, 2], Frame(10, packed=True), [[[0, 2], [1, 3, 4]]]),
        # 5 + 5 fit into 11, but not into the 8 that are left of it in fours.
        ([5, 5], Frame(11, packed=True, multiple_of=4), [[[0], [1]]]),
        # One micro-batch would do; two stages want two.
        ([4, 3, 2, 1], Frame(99, packed=True, stages=2), [[[1, 2, 3], [0]]]),
        ([9, 3, 3], Frame(99, packed=False, stages=2), [[[0], [1, 2]]]),
    ],
)
def test_by_hand(lengths: list[int], frame: Frame, plan: Plan) -> None:
    assert plan_micro_batches([Size(length, 0) for length in lengths], Flops(1.0), frame) == plan


@pytest.mark.parametrize(
    ("plan", "stages", "enough"),
    [
        ([[[0]]], 1, True),
        ([[[0]], [[]]], 1, False),
        ([[[0], [1]], [[2], []]], 2, False),
        ([[[0], [1]], [[2], [3]]], 2, True),
        ([[]], 1, False),
    ],
)
def test_enough_is_when_no_stage_of_any_rank_stands_idle(plan: Plan, stages: int, enough: bool) -> None:
    assert fills(plan, stages) is enough
