"""Coordinates of ranks, by hand, and groups that cannot be cut as asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config.schema import ParallelConfig
from rlsys.errors import Code
from rlsys.trainer.mesh import place_of
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.weights.weight_map import read_architecture
from tests.support.refusals import refused
from tests.trainer import reference
from tests.trainer.harness import local_model


def test_tensor_parallel_is_fastest_then_context_then_data_then_pipeline() -> None:
    places = [place_of(rank, 16, ParallelConfig(tp=2, cp=2, pp=2, ep=4)) for rank in range(16)]
    assert [place.tp for place in places] == [0, 1] * 8
    assert [place.cp for place in places] == [0, 0, 1, 1] * 4
    assert [place.dp for place in places] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [place.pp for place in places] == [0] * 8 + [1] * 8
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
    ("parallel", "code", "key"),
    [
        (ParallelConfig(tp=3), "mismatch", "tp x cp x pp"),
        (ParallelConfig(tp=2, cp=3), "mismatch", "tp x cp x pp"),
        (ParallelConfig(pp=2, ep=3), "mismatch", "ep"),
        (ParallelConfig(sequence_parallel=True), "conflict", "sequence_parallel"),
    ],
)
def test_cuts_that_do_not_fit_the_processes_are_refused(parallel: ParallelConfig, code: Code, key: str) -> None:
    with refused(code, key):
        place_of(0, 8, parallel)


@pytest.mark.parametrize(
    ("family", "parallel", "code", "key"),
    [
        ("qwen3_moe", ParallelConfig(tp=2), "conflict", "sequence_parallel"),
        ("qwen3", ParallelConfig(tp=8), "mismatch", "tp"),
    ],
)
def test_cuts_that_the_model_forbids_are_refused(
    family: str, parallel: ParallelConfig, code: Code, key: str, tmp_path: Path
) -> None:
    model = reference.make_model(reference.TINY[family](layers=1), tmp_path)
    with refused(code, key):
        PolicyModel(read_architecture(model), local_model(model), parallel, place_of(0, 8, parallel))
