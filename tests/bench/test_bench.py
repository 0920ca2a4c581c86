"""The benchmarks run in small; that of a GPU says what it lacks on a machine that has none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import scheduler
from bench.gpu import step
from bench.gpu.figures import FULL
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler
from tests.support.browser import chromium
from tests.support.paths import PROJECT


def bench(name: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"bench.{name}", *flags]
    environment = {"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    environment |= {"CHROMIUM": str(chromium()), "COLUMNS": "120"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without a GPU")


@without_gpu
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = bench("gpu", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--small" in done.stderr


@pytest.mark.slow
@without_gpu
def test_the_parts_that_train_run_at_the_small_scale(tmp_path: Path) -> None:
    done = bench("gpu", tmp_path, "--small", "--only", "step", "sync", "parity")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "outputs/bench/gpu.json").read_text())
    assert report["failures"] == {}
    assert report["not_here"] == {"parity": "needs a GPU"}
    values = {(figure["part"], figure["name"]): figure["value"] for figure in report["figures"]}
    assert set(values) == {
        *(("step", name) for name in ("seconds", "tokens a second", "rate")), ("sync", "host memory"),
    }  # fmt: skip
    assert all(value > 0 for value in values.values())


def test_the_estimate_of_a_step_holds_the_states_of_training_and_not_much_more() -> None:
    """18 bytes for each of the model's 3,085,938,688 parameters: bfloat16, a float32 gradient, Adam's three of float32."""
    states = 18 * 3_085_938_688
    assert states < step._estimate(FULL, Path(FULL.shape)) < 1.6 * states


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="Install Chromium, or name it in $CHROMIUM.")
def test_a_small_report_is_measured_as_a_reader_sees_it(tmp_path: Path) -> None:
    flags = ("--trajectories", "65", "--tokens", "260", "--folder", str(tmp_path / "kept"))
    done = bench("report", tmp_path, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "outputs/bench/report.json").read_text())
    run = tmp_path / "kept" / "run"
    kept = sum(file.stat().st_size for file in (run / "trajectories").iterdir())
    assert (result["trajectories"], result["tokens"]) == (128, 260), "whole steps of 64"
    assert (result["report_mb"], result["run_mb"]) == ((run / "report.html").stat().st_size / 1e6, kept / 1e6)
    figures = ("made_s", "opened_s", "read_s", "listed_s", "trajectory_s", "searched_s")
    assert min(result[name] for name in figures) > 0


def test_the_scheduler_is_measured_only_where_two_steps_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scheduler.run(2, 1) > 0
    monkeypatch.setattr(
        scheduler, "StalenessScheduler", lambda per_step, **_: StalenessScheduler(per_step, max_staleness=0)
    )
    with pytest.raises(RuntimeError, match="2 groups were in flight, not 4"):
        scheduler.run(2, 1)
