"""A run that is killed and goes on ends as one that was not: parameters, metrics and what became of every prompt."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.observe.kept import kept_file, kept_steps
from rlsys.weights.checkpoint.store import check
from tests.support.paths import PROJECT
from tests.support.recorded_run import GROUPS, MOMENTS, NAME, STEPS
from tests.trainer import reference

OF_THE_CLOCK = re.compile(r"time$|time/|idle/|mfu|tokens_per_s|sync/|_s$|_gbps|throughput")


class Ended:
    """What a run has left, whose life may have had several parts."""

    def __init__(self, outputs: Path) -> None:
        (folder,) = outputs.glob(f"{NAME}-*")
        self.weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
        self.rows = [self._row(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.prompts = (folder / "prompts.jsonl").read_text()
        self.evaluations = {p.name: p.read_text() for p in (folder / "evaluations").iterdir()}
        self.kept = {step: gzip.decompress(kept_file(folder, step).read_bytes()) for step in kept_steps(folder)}
        self.checkpoints = sorted((folder / "checkpoints").iterdir())

    @staticmethod
    def _row(line: str) -> dict[str, Any]:
        return {key: value for key, value in json.loads(line).items() if not OF_THE_CLOCK.search(key)}


def run(model: Path, outputs: Path, *fate: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.recorded_run", str(model), str(outputs), *map(str, fate)]
    return subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=240, check=False, start_new_session=True
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.make_model(reference.tiny_config(), tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    outputs = tmp_path_factory.mktemp("uninterrupted")
    done = run(model, outputs)
    assert done.returncode == 0, done.stdout + done.stderr
    return Ended(outputs)


def test_what_the_run_does(uninterrupted: Ended) -> None:
    """So that the comparisons below compare something."""
    assert [row["step"] for row in uninterrupted.rows] == [1, 2, 3, 4]
    assert any(row["actor/grad_norm"] > 0 for row in uninterrupted.rows)
    for changing in ("actor/lr", "critic/kl_coef"):
        assert len({row[changing] for row in uninterrupted.rows}) == STEPS, changing
    ends = [json.loads(line) for line in uninterrupted.prompts.splitlines()]
    assert [one["end"] for one in ends] == ["trained"] * (STEPS * GROUPS)
    assert [*uninterrupted.kept] == [1, 2, 3, 4]
    assert {path.name for path in uninterrupted.checkpoints} == {"global_step_3", "global_step_4"}
    assert set(uninterrupted.evaluations) >= {"step_000000.json", "step_000002.json", "step_000004.json"}


SHORT = {"applied": 2, "publishing": 1}
"""Moments of the short suite; at which of them the run dies."""


def fates() -> list[Any]:
    """Every moment of a step."""
    return [
        pytest.param(moment, SHORT.get(moment, 1), marks=() if moment in SHORT else pytest.mark.slow, id=moment)
        for moment in MOMENTS
    ]


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("moment", "count"), fates())
def test_a_killed_run_ends_as_the_uninterrupted_one(
    moment: str, count: int, model: Path, uninterrupted: Ended, tmp_path: Path
) -> None:
    killed = run(model, tmp_path, moment, count)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    saved = [int(path.name.rpartition("_")[2]) for path in tmp_path.glob("*/checkpoints/global_step_*")]
    assert saved, "there is nothing to go on from"
    (folder,) = tmp_path.glob(f"{NAME}-*")
    assert kept_steps(folder)[: max(saved)] == [*range(1, max(saved) + 1)], "a checkpoint's steps are kept"
    done = run(model, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = Ended(tmp_path)
    assert ended.weights.keys() == uninterrupted.weights.keys()
    for name, tensor in uninterrupted.weights.items():
        assert torch.equal(ended.weights[name], tensor), name
    assert ended.rows == uninterrupted.rows
    assert ended.prompts == uninterrupted.prompts
    assert ended.evaluations == uninterrupted.evaluations
    assert ended.kept == uninterrupted.kept
    assert [path.name for path in ended.checkpoints] == [path.name for path in uninterrupted.checkpoints]
    for folder in ended.checkpoints:
        check(folder)


def test_a_run_that_begins_anew_would_be_noticed(model: Path, uninterrupted: Ended, tmp_path: Path) -> None:
    """The comparison above fails for a run that forgets its checkpoint's optimiser."""
    run(model, tmp_path, "published", 1)
    (folder,) = tmp_path.glob(f"{NAME}-*")
    newest = max((folder / "checkpoints").glob("global_step_*"))
    state = newest / "actor" / "complete.json"
    about = json.loads(state.read_text())
    text = json.dumps(about | {"optimizer": False})
    state.write_text(text)
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["files"]["actor/complete.json"], manifest["sha256"]["actor/complete.json"]
    (newest / "manifest.json").write_text(json.dumps(manifest))
    done = run(model, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Ended(tmp_path).rows != uninterrupted.rows
