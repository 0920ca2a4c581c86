"""Tests of compatibility: a run folder written by rlsys at 3180461 is read, resumed, converted and reported.

`fixtures/run_of_3180461.tar.xz` holds two asynchronous steps of a random Llama of two layers, and its initial model.
The expected hash comes from the conversion by 3180461 itself.
"""

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
import yaml

from rlsys.config.compose import load_config
from rlsys.orchestrator.resume import find_origin
from tests.support.paths import PROJECT
from tests.support.runs import PLAIN_ENGINE, small, succeed

ARCHIVE = PROJECT / "tests/fixtures" / "run_of_3180461.tar.xz"
CONVERTED_SHA256 = "477a2ee84eb8c9613abd8369d158ca6196ed6929fba9f8002c55cea9af905269"
NAME = "searchr1_tiny_cpu-20261122-171518"
AS_THEN = [
    *("trainer.prompts_per_step=4", "trainer.mini_batches=2", "algorithm.n_samples=2", "task.max_turns=2"),
    *("trainer.schedule={kind: async, max_staleness: 1, on_update: finish}", "eval.interval=1", "eval.limit=4"),
]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the run's folder and the model's folder."""
    home = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(home, filter="data")
    (home / "run").rename(home / NAME)
    return home


def test_old_run_state_is_restored_as_saved(old: Path) -> None:
    config = load_config("searchr1_tiny_cpu", [*AS_THEN, f"resume={old / NAME}", "trainer.steps=3"])
    config.checkpoint.may_differ = ["task.train_path", "model.path"]
    origin = find_origin(config, pytest.fail)
    assert origin is not None
    state = origin.state
    assert (state.step, origin.newest, state.history.step) == (2, True, 2)
    scheduler = state.pipeline.scheduler
    assert (scheduler.version, scheduler.published) == (2, 2)
    numbers = [group.number for group in (*scheduler.rolling, *scheduler.ready)]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers, default=-1) < scheduler.admitted
    assert {*state.pipeline.progress, *state.pipeline.rewarded, *state.pipeline.scored} <= set(numbers)
    assert [row["step"] for row in state.history.evaluations] == [0, 1, 2]


def test_report_of_an_old_run_is_written(old: Path) -> None:
    then = yaml.safe_load((old / NAME / "config.yaml").read_text())
    assert then["trainer"]["schedule"]["kind"] == "async"
    succeed("report", old / NAME)
    assert (old / NAME / "report.html").stat().st_size > 100_000


def test_old_checkpoint_converts_to_the_same_bytes(old: Path) -> None:
    checkpoint, hf = old / NAME / "checkpoints" / "global_step_2" / "actor", old / "hf"
    succeed("convert", "mg2hf", checkpoint, hf, "--hf", old / "model")
    assert hashlib.sha256((hf / "model.safetensors").read_bytes()).hexdigest() == CONVERTED_SHA256


@pytest.mark.slow
def test_old_run_resumes(old: Path) -> None:
    allowed = "checkpoint.may_differ=[task.train_path,model.path]"
    settings = [
        PLAIN_ENGINE,
        f"model.path={old / 'model'}",
        *AS_THEN,
        "trainer.steps=3",
        allowed,
        f"resume={old / NAME}",
    ]
    succeed(*small(old, *settings))
    summary = json.loads((old / NAME / "summary.json").read_text())
    assert summary["steps"] == 3
