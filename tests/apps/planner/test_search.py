"""Tests of the search for placements: candidates can run, none is beaten, and estimates agree with the simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlsys.apps.planner.answer import Planner, check, with_shape
from rlsys.apps.planner.estimate import calls_s, generation_s, packed
from rlsys.apps.planner.search import Candidate, PlacementSearch, render_search, unbeaten
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.hardware import REACHED, REACHED_SOURCE
from rlsys.cluster.planning.placement import parse_placement
from rlsys.trainer.batches import SampleSize
from tests.apps.planner.made import FREE, costs_of, ends
from tests.support.composed import composed
from tests.support.refusals import refused

NAME = "searchr1_qwen2.5_3b_1node"
FEW = "trainer.prompts_per_step=16"


MOST = 6
"""Candidates that are simulated."""


def planner(*settings: str) -> Planner:
    return Planner(with_shape(composed(*settings, name=NAME)), "H100", REACHED, REACHED_SOURCE, Workload())


def search_of(*settings: str) -> PlacementSearch:
    return PlacementSearch(planner(*settings), episodes=200, most=MOST)


@pytest.fixture(scope="module")
def searched() -> PlacementSearch:
    return search_of(FEW)


@pytest.fixture(scope="module")
def found(searched: PlacementSearch) -> list[dict[str, Any]]:
    return searched.best()


def test_every_candidate_can_run_and_its_overrides_make_it(found: list[dict[str, Any]]) -> None:
    for one in found:
        config = with_shape(composed(FEW, *one["overrides"], name=NAME))
        check(config)
        assert config.cluster.placement == one["placement"]
        assert config.trainer.schedule.kind == one["schedule"]
        ranks = parse_placement(config.cluster.placement)
        assert {rank for held in ranks.values() for rank in held} == set(range(8))


def test_no_candidate_beats_another_and_the_fastest_comes_first(found: list[dict[str, Any]]) -> None:
    speeds = [one["tokens_per_s"] for one in found]
    assert speeds == sorted(speeds, reverse=True)
    for slow in range(1, len(found)):
        for fast in range(slow):
            fresher = found[slow]["staleness"] < found[fast]["staleness"]
            assert fresher or found[slow]["memory_gib_per_rank"] < found[fast]["memory_gib_per_rank"]


def test_result_can_be_pasted(found: list[dict[str, Any]]) -> None:
    last = render_search(found, {}).rsplit("\n", 1)[-1]
    assert "'cluster.placement={actor: '\"'\"'0" in last


class Counted(PlacementSearch):
    """Search that simulates a candidate once."""

    known: dict[int, dict[str, Any]]

    def figures(self, candidate: Candidate) -> dict[str, Any]:
        if id(candidate) not in self.known:
            self.known[id(candidate)] = super().figures(candidate)
        return self.known[id(candidate)]


def test_bounds_rule_out_no_candidate_that_none_beats() -> None:
    """Every second candidate of five devices: the answer is that of simulating all of them."""
    search = Counted(planner(FEW, "cluster.devices_per_node=5", "cluster.device_memory_gib=70"), 200, most=1000)
    search.known = {}
    some = search.candidates()[::2]
    found = search.best(some)
    assert search.counts["ruled out"] == len(some) - len(search.known) > 0
    figures = [search.figures(one) for one in some]
    assert found == unbeaten(figures)
    for one, known in zip(some, figures, strict=True):
        bound = one.bound
        assert known["tokens_per_s"] <= bound["tokens_per_s"]
        assert {key: known[key] for key in ("staleness", "memory_gib_per_rank")} == {
            key: bound[key] for key in ("staleness", "memory_gib_per_rank")
        }


def test_no_more_candidates_are_simulated_than_asked(searched: PlacementSearch, found: list[dict[str, Any]]) -> None:
    counts = searched.counts
    assert counts["candidates"] > 1000
    assert counts["simulated"] == MOST >= len(found)
    assert sum(counts.values()) == 2 * counts["candidates"]


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with refused("conflict"):
        search_of(FEW, "cluster.device_memory_gib=6").best()


def test_machines_must_be_stated() -> None:
    with refused("missing", "cluster.devices_per_node"):
        search_of(FEW, "cluster.devices_per_node=null")


@pytest.mark.parametrize("running", [32, 1000])
def test_estimate_of_generation_agrees_with_the_simulated_engine(running: int) -> None:
    costs = replace(FREE, step_s=0.01, token_s=1e-4, request_s=5e-5, cache_s=1e-8, prefill_s=1e-5, max_running=running)
    lengths = np.exp(np.random.default_rng(0).normal(4, 0.6, 256)).round().clip(1, 400).tolist()
    simulated = max(ends(costs, lengths, 50)[0])
    assert generation_s(costs, sorted(lengths), 50, len(lengths)) == pytest.approx(simulated, rel=0.1)


def test_estimate_of_calls_is_that_of_equal_ranks() -> None:
    call = replace(costs_of(FREE, 1e-3, 1e-3).calls["actor"], launch_s=0.5, stages=2, call_s=0.5, apply_s=0.25)
    size = SampleSize(100, 50)
    plan = [[[0, 0], [0, 0], [0, 0]]] * 4
    assert calls_s(call, size, 6, 2, 1) == pytest.approx(call.seconds(plan, [size]) + 0.25)


def test_micro_batches_are_packed_by_first_fit() -> None:
    """90 + 10, 60 + 10, 50, and 120 alone: six samples in four micro-batches of 100 tokens."""
    assert packed([10, 10, 50, 60, 90, 120], 100) == 6 / 4


def test_a_run_without_an_inference_group_is_searched_too() -> None:
    alone = ("algorithm=dapo", "algorithm.old_logprobs=actor", "trainer.mini_batches=1")
    search = search_of(FEW, *alone, "trainer.schedule.kind=sequential")
    (fastest, *_) = search.best(search.candidates()[:40])
    check(with_shape(composed(FEW, *alone, *fastest["overrides"], name=NAME)))
