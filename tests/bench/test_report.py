"""The report's benchmark runs to its end in a browser, and its figures are of what a reader does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import chromium
from tests.support.paths import PROJECT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="Install Chromium, or name it in $CHROMIUM."),
]


def test_it_measures_a_small_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.report", "--trajectories", "65", "--tokens", "260"]
    command += ["--folder", str(tmp_path / "kept")]
    environment = {"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    environment |= {"CHROMIUM": str(chromium()), "COLUMNS": "120"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "outputs/bench/report.json").read_text())

    # Whole steps of 64 are made, and the sizes are those of the files that were left.
    run = tmp_path / "kept" / "run"
    kept = sum(file.stat().st_size for file in (run / "trajectories").iterdir())
    assert (result["trajectories"], result["tokens"]) == (128, 260)
    assert result["report_mb"] == (run / "report.html").stat().st_size / 1e6
    assert result["run_mb"] == kept / 1e6

    assert "128 trajectories of 260 tokens" in " ".join(done.stdout.split())
    figures = ("made_s", "opened_s", "read_s", "listed_s", "trajectory_s", "searched_s")
    assert min(result[name] for name in figures) > 0
