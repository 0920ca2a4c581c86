"""Tests of `bench.plan`: rows of published step times become configs, and what they lack is said."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import yaml

from bench import plan
from bench.plan import ROWS, Assumed, case_of, cases_of, fitted_rows, read_rows
from rlsys.config.schema import Mode, SequentialSchedule

ASSUMED = Assumed(length_share=0.2, spread=0.6)
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


@pytest.mark.parametrize("mean", [100.0, 1060.0, 3900.0])
def test_lengths_have_the_published_mean_after_the_limit(mean: float) -> None:
    case = case_of(row_with(lengths={"max_total": 4096, "mean_response": mean}), ASSUMED)
    drawn = [one.generated for number in range(200) for one in case.workload.group(case.config, 0, number, 32)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert max(drawn) <= 4096 - ASSUMED.prompt


def test_the_fit_is_stated_and_uses_at_most_half_of_the_rows() -> None:
    content = yaml.safe_load(plan.REACHED.read_text())
    rows = read_rows(ROWS)
    cases, refused = cases_of(rows, Assumed(**content["assumed"]))
    assert not refused
    assert content["fitted"] == fitted_rows(cases)
    assert len(content["fitted"]) <= len(cases) / 2
    assert str(len(content["fitted"])) in content["source"]
