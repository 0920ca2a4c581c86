"""Tests that a run that is killed and resumed, or whose Megatron processes die, equals an uninterrupted one.

Compares parameters, metrics, evaluations, trajectories, checkpoints and outcomes of prompts.
"""

import gzip
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.observe.kept import trajectory_file, trajectory_steps
from rlsys.weights.checkpoint.store import check
from tests.support import tiny_configs
from tests.support.jsonl import read_rows
from tests.support.recorded_run import GROUPS, MOMENTS, NAME, STEPS, ended
from tests.trainer import reference

OF_THE_CLOCK = re.compile(r"time$|time/|faults/|idle/|mfu|tokens_per_s|sync/|_s$|_gbps|throughput")


class RunResults:
    """Results of a run of one or more launches."""

    def __init__(self, outputs: Path) -> None:
        (folder,) = outputs.glob(f"{NAME}-*")
        self.outputs = outputs
        self.weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
        self.rows = [self._row(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.prompts = (folder / "prompts.jsonl").read_text()
        self.evaluations = {p.name: p.read_text() for p in (folder / "evaluations").iterdir()}
        self.kept = {
            step: gzip.decompress(trajectory_file(folder, step).read_bytes()) for step in trajectory_steps(folder)
        }
        self.checkpoints = sorted((folder / "checkpoints").iterdir())
        self.openings = int((folder / "openings").read_text())
        faults = read_rows(folder / "faults.jsonl")
        self.faults = [(row.get("part"), row["event"]) for row in faults]

    @staticmethod
    def _row(line: str) -> dict[str, Any]:
        return {key: value for key, value in json.loads(line).items() if not OF_THE_CLOCK.search(key)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.make_model(tiny_configs.qwen2(), tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResults:
    outputs = tmp_path_factory.mktemp("uninterrupted")
    assert ended(model, outputs) == 0
    return RunResults(outputs)


def test_uninterrupted_run_trains_evaluates_and_saves(uninterrupted: RunResults) -> None:
    """Without these events, the comparisons below would prove nothing."""
    assert [row["step"] for row in uninterrupted.rows] == [1, 2, 3, 4]
    assert any(row["actor/grad_norm"] > 0 for row in uninterrupted.rows)
    for changing in ("actor/lr", "critic/kl_coef"):
        assert len({row[changing] for row in uninterrupted.rows}) == STEPS, changing
    ends = [json.loads(line) for line in uninterrupted.prompts.splitlines()]
    assert [one["end"] for one in ends] == ["trained"] * (STEPS * GROUPS)
    assert [*uninterrupted.kept] == [1, 2, 3, 4]
    assert {path.name for path in uninterrupted.checkpoints} == {"global_step_3", "global_step_4"}
    assert set(uninterrupted.evaluations) >= {"step_000000.json", "step_000002.json", "step_000004.json"}


@pytest.mark.slow
def test_resuming_a_finished_run_trains_nothing_and_keeps_its_results(
    model: Path, uninterrupted: RunResults, tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    shutil.copytree(uninterrupted.outputs, outputs, symlinks=True)
    assert ended(model, outputs) == 0
    again = RunResults(outputs)
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in uninterrupted.weights.items())
    assert (again.rows, again.prompts) == (uninterrupted.rows, uninterrupted.prompts)
    assert (again.evaluations, again.kept) == (uninterrupted.evaluations, uninterrupted.kept)


MID_STEP = "applied"
"""Moment at which the default suite kills: its second occurrence is between two optimiser steps of a training step."""
KILLS = [pytest.param(MID_STEP, 2, id=MID_STEP)]
KILLS += [pytest.param(moment, 1, id=moment, marks=pytest.mark.slow) for moment in MOMENTS if moment != MID_STEP]


@pytest.mark.parametrize(("moment", "count"), KILLS)
def test_killed_and_resumed_run_equals_the_uninterrupted_one(
    moment: str, count: int, model: Path, uninterrupted: RunResults, tmp_path: Path
) -> None:
    assert ended(model, tmp_path, moment, count) == -signal.SIGKILL
    saved = [int(path.name.rpartition("_")[2]) for path in tmp_path.glob("*/checkpoints/global_step_*")]
    assert saved, "no checkpoint to resume from"
    (folder,) = tmp_path.glob(f"{NAME}-*")
    assert trajectory_steps(folder)[: max(saved)] == [*range(1, max(saved) + 1)], (
        "trajectories of all checkpointed steps must be kept"
    )
    assert ended(model, tmp_path) == 0
    assert_equal(RunResults(tmp_path), uninterrupted)


DEATHS = [pytest.param("accumulated", 2, "actor", False, id="between the calls of an optimiser step")]
DEATHS += [
    pytest.param(moment, 1, victim, early, id=name, marks=pytest.mark.slow)
    for moment, victim, early, name in (
        ("scoring", "inference", False, "while scoring"),
        ("applied", "actor", False, "after an optimiser step"),
        ("applied", "actor", True, "before the first checkpoint"),
        ("staged", "actor", False, "while saving"),
        ("transferred", "inference", False, "between push and activation"),
        ("switched", "actor", False, "after an activation"),
        ("evaluating", "actor", False, "during an evaluation"),
    )
]


@pytest.mark.parametrize(("moment", "count", "victim", "early"), DEATHS)
def test_run_whose_megatron_processes_die_goes_back_and_equals_the_uninterrupted_one(
    moment: str, count: int, victim: str, early: bool, model: Path, uninterrupted: RunResults, tmp_path: Path
) -> None:
    """It goes back to its last checkpoint by itself, with the same engines, or to its start if there is none."""
    assert ended(model, tmp_path, moment, count, victim, early) == 0
    found = RunResults(tmp_path)
    assert found.faults == [(f"{victim} rank 0", "began"), (None, "recovered")]
    assert found.openings == 2
    assert_equal(found, uninterrupted)


@pytest.fixture(scope="module")
def uninterrupted_fixed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResults:
    """A run whose reference never changes."""
    outputs = tmp_path_factory.mktemp("uninterrupted-fixed")
    assert ended(model, outputs, fixed=True) == 0
    return RunResults(outputs)


@pytest.mark.parametrize(
    ("moment", "count"),
    [
        pytest.param("transferred", 1, id="before log-probs"),
        pytest.param("scoring", 1, id="before a push", marks=pytest.mark.slow),
    ],
)
def test_run_whose_inference_processes_die_goes_on_within_its_step_and_equals_the_uninterrupted_one(
    moment: str, count: int, model: Path, uninterrupted_fixed: RunResults, tmp_path: Path
) -> None:
    """Their successors get the weights that the actor has pushed last. The run does not go back."""
    assert ended(model, tmp_path, moment, count, "inference", fixed=True) == 0
    found = RunResults(tmp_path)
    assert found.faults == [("inference rank 0", "began"), (None, "recovered")]
    assert found.openings == 1
    assert_equal(found, uninterrupted_fixed)


def assert_equal(again: RunResults, uninterrupted: RunResults) -> None:
    assert again.weights.keys() == uninterrupted.weights.keys()
    for name, tensor in uninterrupted.weights.items():
        assert torch.equal(again.weights[name], tensor), name
    assert again.rows == uninterrupted.rows
    assert again.prompts == uninterrupted.prompts
    assert again.evaluations == uninterrupted.evaluations
    assert again.kept == uninterrupted.kept
    assert [path.name for path in again.checkpoints] == [path.name for path in uninterrupted.checkpoints]
    for folder in again.checkpoints:
        check(folder)
