"""Tests of `bench.plan`: rows of published step times become configs, and what they lack is said."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml

from bench.plan import (
    ROWS,
    Assumed,
    Case,
    case_of,
    cases_of,
    fitted_rows,
    hands_over_steps,
    longest_of,
    part,
    read_rows,
    speedups,
    stages_of,
    steady_generation_s,
)
from bench.plan_scale import measured
from rlsys.apps.planner.engine import Prefix, Request, SimulatedEngine
from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.cluster.planning.hardware import REACHED, REACHED_FILE
from rlsys.config.derived import on_update
from rlsys.config.schema import Mode, SequentialSchedule
from tests.apps.planner.made import FREE

ASSUMED = Assumed(length_share=0.2, answer=800.0, spread=0.6)
ROW: dict[str, Any] = {
    "id": "one",
    "family": "some",
    "system": "NeMo RL",
    "model": {"name": "Llama-3.1-8B-Instruct", "params_b": 8},
    "hardware": {"gpu": "DGX-H100", "total": 16, "trainer": 16, "rollout": 16},
    "schedule": {"kind": "colocated-sync"},
    "batch": {"prompts": 4, "samples_per_prompt": 8, "minibatch": "train GBS 16 sequences"},
    "lengths": {"max_total": 4096, "mean_response": 1060},
    "parallel": {"train": {"tp": 1, "pp": 2}, "rollout": {"tp": 2}},
    "step_seconds": 90.0,
    "breakdown_seconds": {"update": 20.0},
}


def row_with(**changes: Any) -> dict[str, Any]:
    return {**deepcopy(ROW), **changes}


def test_a_row_becomes_a_config() -> None:
    case = case_of(ROW, ASSUMED)
    config = case.config
    assert (case.device, case.engines, config.cluster.mode) == ("H100", 8, Mode.colocated)
    assert isinstance(config.trainer.schedule, SequentialSchedule)
    assert (config.actor.parallel.pp, config.rollout.engine.tp) == (2, 2)
    assert (config.trainer.prompts_per_step, config.algorithm.n_samples, config.trainer.mini_batches) == (4, 8, 2)
    assert (case.model.layers, case.model.hidden) == (32, 4096)
    assert config.actor.micro_batch_tokens == config.inference.micro_batch_tokens == 4096


@pytest.mark.parametrize("mean", [100.0, 1060.0, 3900.0])
def test_lengths_have_the_published_mean_after_the_limit(mean: float) -> None:
    case = case_of(row_with(lengths={"max_total": 4096, "mean_response": mean}), ASSUMED)
    drawn = [one.generated for number in range(200) for one in case.workload.group(case.config, 0, number, 32)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert max(drawn) <= 4096 - ASSUMED.prompt


def published(name: str) -> Case:
    return case_of(next(row for row in read_rows(ROWS) if row["id"] == name), ASSUMED)


def test_lengths_of_a_published_row_are_stated_or_those_of_its_kind_of_model() -> None:
    stated, base = published("nemo-0.6-q30-h100-32-on"), published("v1off-fsdp2-sync")
    for case, mean in ((stated, 3203), (base, ASSUMED.answer)):
        assert np.mean(case.lengths) == pytest.approx(mean, rel=0.02)
    assert base.config.task.max_turn_tokens == 20480, "a stated limit holds beyond the model's positions"


@pytest.mark.parametrize(
    ("name", "in_flight", "goes_on", "steps"),
    [
        ("nemo-0.6-q30-h100-32-1off", 64 * 32, "continue", True),
        ("nemo-0.6-q30-h100-192-8off", 8 * 64 * 32, "continue", True),
        ("v1off-mcore-async", 512 * 12, "finish", True),
        ("vfa30b-async", 22 * 24 * 16, "continue", False),
    ],
)
def test_as_many_episodes_are_in_flight_as_a_row_may_be_ahead(
    name: str, in_flight: int, goes_on: str, steps: bool
) -> None:
    case = published(name)
    assert hands_over_steps(case.row) is steps
    assert case.config.rollout.max_episodes * case.engines == in_flight
    assert part(case.row, "batch", "samples_per_prompt") == case.config.algorithm.n_samples
    assert on_update(case.config) == goes_on


def test_runs_that_were_slower_with_overlap_are_predicted_to_be_slower() -> None:
    """By formulas: half of the devices train as long as all of them twice, and nothing is left to hide."""
    assumed = Assumed(**yaml.safe_load(REACHED_FILE.read_text())["assumed"])
    cases, _ = cases_of(read_rows(ROWS), assumed)
    slower = {
        row[way]
        for row in speedups(cases, {case.row["id"]: 1.0 for case in cases})
        for way in ("sync", "async")
        if row["measured"] < 1
    }
    steps = {}
    for case in cases:
        if case.row["id"] in slower:
            times = stages_of(case, REACHED)
            trains = times["update"] + times["scores"]
            whole = times["generation"] + trains if case.summed else max(times["generation"], trains)
            steps[case.row["id"]] = whole + times["rest"]
    found = speedups([case for case in cases if case.row["id"] in slower], steps)
    assert [row["predicted"] < 1 for row in found if row["measured"] < 1] == [True, True]


def test_the_fit_is_stated_and_uses_at_most_half_of_the_rows() -> None:
    content = yaml.safe_load(REACHED_FILE.read_text())
    rows = read_rows(ROWS)
    cases, refused = cases_of(rows, Assumed(**content["assumed"]))
    assert not refused
    assert content["fitted"] == fitted_rows(cases)
    assert len(content["fitted"]) <= len(cases) / 2
    assert str(len(content["fitted"])) in content["source"]


@pytest.mark.parametrize("samples", [1, 8])
def test_estimate_of_steady_generation_agrees_with_the_simulated_engine(samples: int) -> None:
    """64 slots; another prompt group begins whenever one has ended. The first and the last 500 are not counted."""
    costs = replace(FREE, token_s=1e-4, request_s=5e-5, cache_s=2e-6, prefill_s=1e-5)
    lengths = np.exp(np.random.default_rng(0).normal(4, 0.6, 2500)).round().clip(1, 400).tolist()

    async def run() -> float:
        engine, done, left, times = SimulatedEngine(costs), asyncio.Event(), [*lengths], [0.0]

        def begin() -> None:
            prefix = Prefix(50, samples)
            for _ in range(min(samples, len(left))):
                engine.submit(Request(prefix, ended=end, left=left.pop()))

        def end(request: Request) -> None:
            engine.leave(request)
            times.append(now())
            if left and not request.prefix.episodes:
                begin()
            elif len(times) > 2000:
                done.set()

        for _ in range(64 // samples):
            begin()
        await done.wait()
        return times[2000] - times[500]

    expected = steady_generation_s(costs, sorted(lengths), 50, 1500, 64, samples)
    assert expected == pytest.approx(run_virtually(run()), rel=0.1)


def test_longest_of_a_group_is_that_of_all_draws() -> None:
    lengths = [1.0, 2.0, 2.0, 7.0]
    for count in (1, 2, 3):
        draws = [max(draw) for draw in product(lengths, repeat=count)]
        assert longest_of(lengths, count) == pytest.approx(fmean(draws))


def test_four_times_the_machines_take_as_long_for_four_times_the_prompts() -> None:
    """Weak scaling: the simulated pipeline has no part whose work per machine grows with their number."""
    small, large = (measured(gpus) for gpus in (16, 64))
    assert large["simulated_step_s"] == pytest.approx(small["simulated_step_s"], rel=0.1)
    assert large["in_flight"] / small["in_flight"] == pytest.approx(4, rel=0.15)
    assert large["events"] / small["events"] == pytest.approx(4, rel=0.15), "an event handles as many episodes"
