"""Tests of `bench.plan`: rows of published step times become configs, and what they lack is said."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import plan
from bench.plan import ROWS, Assumed, UnpredictableError, case_of, cases_of, compare, fitted_rows, read_rows, stages_of
from rlsys.apps.planner.costs import read_reached
from rlsys.config.schema import AsyncSchedule, Mode, SequentialSchedule

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
BEHIND = {"kind": "one-step-off", "staleness": 1}
PATHS = [(key,) for key in ROW] + [
    (key, name) for key, value in ROW.items() if isinstance(value, dict) for name in value
]


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


def test_overlap_puts_log_probs_on_the_trainer() -> None:
    hardware = {"gpu": "GB200-NVL72", "total": 16, "trainer": 8, "rollout": 8}
    case = case_of(row_with(schedule=BEHIND, hardware=hardware), ASSUMED)
    placement = case.config.cluster.placement
    assert placement == {"actor": "0-7", "inference": "0-7", "rollout": "8-15"}
    assert case.config.trainer.schedule == AsyncSchedule(kind="async", max_staleness=1)
    assert case.device == "GB200"


@pytest.mark.parametrize("mean", [100.0, 1060.0, 3900.0])
def test_lengths_have_the_published_mean_after_the_limit(mean: float) -> None:
    case = case_of(row_with(lengths={"max_total": 4096, "mean_response": mean}), ASSUMED)
    drawn = [one.generated for number in range(200) for one in case.workload.group(case.config, 0, number, 32)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert max(drawn) <= 4096 - ASSUMED.prompt


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"step_seconds": None}, "step_seconds"),
        ({"hardware": {"gpu": "Ascend", "total": 8}}, "hardware.gpu"),
        ({"hardware": {"gpu": "H100"}}, "hardware.total"),
        ({"model": {"name": "Something"}}, "model.params_b"),
        ({"model": {"name": "Something", "params_b": 671, "active_b": 37}}, "model.name"),
        ({"batch": {}}, "batch.prompts"),
        ({"lengths": {}}, "lengths.mean_response"),
        ({"schedule": {"kind": "unclear"}}, "schedule.kind"),
        ({"schedule": BEHIND, "hardware": {"gpu": "H100", "total": 16}}, "hardware.trainer"),
    ],
)
def test_a_row_that_lacks_something_is_refused_by_name(changes: dict[str, Any], lacks: str) -> None:
    cases, refused = cases_of([row_with(**changes)], ASSUMED)
    assert not cases
    assert lacks in refused["one"]


@given(st.sampled_from(PATHS), st.sampled_from([None, "gone"]))
@settings(max_examples=60)
def test_any_missing_key_is_predicted_or_refused(path: tuple[str, ...], how: str | None) -> None:
    row = deepcopy(ROW)
    holder = row if len(path) == 1 else row[path[0]]
    if how is None:
        holder[path[-1]] = None
    else:
        del holder[path[-1]]
    try:
        case = case_of(row, ASSUMED)
    except UnpredictableError:
        return
    assert sum(stages_of(case, read_reached()[0]).values()) > 0


def test_comparison_pairs_rows_with_and_without_overlap() -> None:
    hardware = {"gpu": "H100", "total": 16, "trainer": 8, "rollout": 8}
    rows = [
        ROW,
        row_with(id="two", schedule=BEHIND, hardware=hardware, step_seconds=120.0),
        row_with(id="three", step_seconds=None),
    ]
    found = compare(rows, read_reached()[0], ASSUMED, ["one"])
    first, second = found["rows"]
    assert found["median_error"] == second["error"] == pytest.approx(abs(second["predicted"] / 120 - 1))
    assert first["fitted"]
    (pair,) = found["speedups"]
    assert (pair["sync"], pair["async"], pair["measured"]) == ("one", "two", 90 / 120)
    assert pair["predicted"] == pytest.approx(first["predicted"] / second["predicted"])
    assert found["inversions_right"] == (pair["predicted"] < 1)
    assert found["refused"].keys() == {"three"}


def test_the_fit_is_stated_and_uses_at_most_half_of_the_rows() -> None:
    content = yaml.safe_load(plan.REACHED.read_text())
    rows = read_rows(ROWS)
    cases, refused = cases_of(rows, Assumed(**content["assumed"]))
    assert not refused
    assert content["fitted"] == fitted_rows(cases)
    assert len(content["fitted"]) <= len(cases) / 2
    assert str(len(content["fitted"])) in content["source"]


def test_every_published_row_names_its_source() -> None:
    assert all(row["source"].get("repo") or row["source"].get("url") for row in read_rows(ROWS))


def test_a_fit_finds_better_shares(tmp_path: Path) -> None:
    """Half the speed: rows whose measured times are doubled give about half the shares."""
    rows = [row for row in read_rows(ROWS) if row["id"].startswith("nemo-0.5-llama-h100")]
    before = plan.loss(rows, read_reached()[0], ASSUMED)
    slower = [{**row, "step_seconds": 2 * row["step_seconds"]} for row in rows]
    reached, assumed, least = plan.fit(slower, 40)
    assert least < plan.loss(slower, read_reached()[0], ASSUMED)
    assert plan.loss(rows, reached, assumed) > before
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert read_rows(tmp_path / "rows.json") == rows
