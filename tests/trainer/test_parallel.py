"""Coordinates of ranks, by hand, and groups that cannot be cut as asked."""

from __future__ import annotations

import pytest

from rlsys.config.schema import ParallelConfig
from rlsys.errors import UserError
from rlsys.trainer.mesh import place_of


def test_tensor_parallel_is_fastest_then_data_then_pipeline() -> None:
    places = [place_of(rank, 12, ParallelConfig(tp=2, pp=2)) for rank in range(12)]
    assert [place.tp for place in places] == [0, 1] * 6
    assert [place.dp for place in places] == [0, 0, 1, 1, 2, 2] * 2
    assert [place.pp for place in places] == [0] * 6 + [1] * 6
    assert [place.rank for place in places if place.reports] == [6, 8, 10]


def test_context_parallel_comes_between_tensor_and_data_parallel() -> None:
    places = [place_of(rank, 16, ParallelConfig(tp=2, cp=2, pp=2, ep=4)) for rank in range(16)]
    assert [place.tp for place in places] == [0, 1] * 8
    assert [place.cp for place in places] == [0, 0, 1, 1] * 4
    assert [place.dp for place in places] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [place.ep for place in places] == [0, 1, 2, 3] * 4
    assert [place.in_stage for place in places] == [*range(8)] * 2
    assert [place.rank for place in places if place.reports] == [8, 12]
    assert [place.rank for place in places if place.exports] == [0, 1, 2, 3, 8, 9, 10, 11]


def test_experts_are_spread_over_neighbours_of_a_stage() -> None:
    places = [place_of(rank, 12, ParallelConfig(tp=2, pp=2, ep=3)) for rank in range(12)]
    assert [place.ep for place in places] == [0, 1, 2] * 4
    assert [place.in_stage for place in places] == [*range(6)] * 2
    # The first three have one copy of all experts between them, the first two of all the rest.
    assert [place.rank for place in places if place.exports] == [0, 1, 2, 6, 7, 8]
    alone = [place_of(rank, 4, ParallelConfig(tp=2)) for rank in range(4)]
    assert [place.rank for place in alone if place.exports] == [0, 1]


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        (ParallelConfig(tp=3), "tp x cp x pp is 3, which does not divide the group's 8 processes"),
        (ParallelConfig(tp=2, cp=3), "tp x cp x pp is 6, which does not divide the group's 8 processes"),
        (ParallelConfig(pp=2, ep=3), "ep is 3, which does not divide the 4 processes of a pipeline stage"),
        (ParallelConfig(sequence_parallel=True), "sequence_parallel is true but tp is 1"),
    ],
)
def test_impossible_cuts_are_refused(parallel: ParallelConfig, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        place_of(0, 8, parallel)
