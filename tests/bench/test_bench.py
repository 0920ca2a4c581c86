"""Tests that the benchmarks run at small sizes, and that every mutant can be planted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import step
from bench.gpu.__main__ import main
from bench.gpu.figures import FULL
from bench.mutants.__main__ import mutants
from bench.suite import groups
from tests.support.paths import PROJECT

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without a GPU")


@without_gpu
def test_the_gpu_benchmark_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match="--small"):
        main()


@pytest.mark.slow
@without_gpu
def test_the_training_parts_run_at_small_scale(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--small", "--only", "step", "sync", "parity"]
    environment = {"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "outputs/bench/gpu.json").read_text())
    assert report["failures"] == {}
    assert report["not_here"] == {"parity": "needs a GPU"}
    values = {(figure["part"], figure["name"]): figure["value"] for figure in report["figures"]}
    assert set(values) == {
        *(("step", name) for name in ("seconds", "tokens a second", "rate")), ("sync", "host memory"),
    }  # fmt: skip
    assert all(value > 0 for value in values.values())


def test_the_memory_estimate_of_a_step_is_close_to_its_training_states() -> None:
    """Each parameter takes 18 bytes: bfloat16, a float32 gradient, and three values of Adam in float32."""
    states = 18 * 3_085_938_688
    assert states < step._estimate(FULL, Path(FULL.shape)) < 1.6 * states


def test_every_mutant_can_be_planted_and_names_tests_that_exist(tmp_path: Path) -> None:
    found = mutants()
    assert len(found) >= 60
    assert len({one.name for one in found}) == len(found)
    for mutant in found:
        target = tmp_path / mutant.file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / mutant.file, target)
        mutant.plant(tmp_path)
        assert target.read_text() != (PROJECT / mutant.file).read_text()
        for file, _, test in (one.partition("::") for one in mutant.tests):
            assert f"def {test.partition('[')[0]}" in (PROJECT / file).read_text(), mutant.name


def test_a_long_file_is_a_group_of_its_own_and_the_others_of_a_folder_are_one() -> None:
    cases = [("tests.live.test_a", 50.0), ("tests.live.test_a", 25.0), ("tests.live.test_b", 50.0)]
    cases += [("tests.live.deep.test_c", 9.0), ("tests.test_d", 1.0)]
    assert groups(cases) == [("tests/live/test_a.py", 2, 75.0), ("tests/live", 2, 59.0), ("tests", 1, 1.0)]
