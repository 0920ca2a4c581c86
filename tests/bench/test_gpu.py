"""The GPU benchmark runs, and says what it lacks, on a machine that has none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without a GPU")


def bench(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", *flags]
    environment = {"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = bench(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "There is no CUDA device here: run it on a machine with one, or try it out with --small.\n"
    )


def test_the_small_scale_measures_the_kernel_against_the_plain_way(tmp_path: Path) -> None:
    done = bench(tmp_path, "--small", "--only", "logprobs")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "outputs/bench/gpu.json").read_text())
    assert (report["machine"], report["scale"], report["failures"]) == ("no GPU", "small", {})
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert figures["largest difference"]["value"] < 1e-4
    assert figures["seconds"]["ratio"] > 0
