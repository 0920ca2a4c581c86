"""Tests of `python -m bench.gpu`: its parts at small sizes on a CPU, their checks, and what a failed part leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bench.gpu.__main__ as gpu
from bench.gpu import colocated
from bench.gpu.figures import SMALL, Figure, Outcome, Setting
from bench.gpu.part import Part, read, run
from rlsys.apps.cli.main import app
from rlsys.config.schema import Device
from tests.support.paths import PROJECT
from tests.support.processes import is_gone
from tests.support.runs import LIMIT_S
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without a GPU")


_SCRIPTS = {
    "measures": "write(figure=figure); write(complete=True)",
    "crashes": "write(figure=figure); sys.exit(3)",
    # A child that outlives the part writes its id.
    "hangs": "write(figure=figure); child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()",
    "misses": "write(figure=figure | {'met': False}); write(complete=True)",
    "lacks": "write(skipped='needs a horse')",
    "stops": "write(figure=figure)",
    "looks": "write(figure=figure | {'value': ' '.join(json.load(open(sys.argv[2]))['parts'])}); write(complete=True)",
}
_FIGURE = Figure("speed", 2.0, "GB/s", met=True, required=True)
_HANGS_S = 0.01


class _Process(subprocess.Popen):
    """A part whose limit, if it hangs, begins once it has written the id of its child."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout == _HANGS_S:
            wait_until(Path("outputs/bench/gpu-small/hangs.log").read_text)
        return super().wait(timeout)


def test_a_part_that_fails_or_hangs_ends_no_other_and_loses_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = dict.fromkeys(_SCRIPTS, LIMIT_S) | {"hangs": _HANGS_S}
    monkeypatch.setattr(gpu.subprocess, "Popen", _Process)
    monkeypatch.setattr(gpu, "end", partial(gpu.end, timeout_s=0.1))
    monkeypatch.setattr(gpu, "PARTS", {name: Part("", limit, needs_model=False) for name, limit in limits.items()})
    monkeypatch.setattr(gpu, "part_command", lambda name, *_: script(name, Path(_[-1]), tmp_path))
    assert gpu.measure(list(_SCRIPTS), Device.cpu, small=True) == 1
    found = report(tmp_path)
    assert {name: part["failed"].partition(";")[0] for name, part in found["parts"].items()} == {
        "measures": "",
        "crashes": "it ended with status 3",
        "hangs": "it was ended after 0.01 s",
        "misses": "not met: speed",
        "lacks": "",
        "stops": "it ended before its last figure",
        "looks": "",
    }
    counts = [len(part["figures"]) for part in found["parts"].values()]
    assert counts == [1, 1, 1, 1, 0, 1, 1]
    assert found["parts"]["lacks"]["skipped"] == "needs a horse"
    earlier = list(_SCRIPTS)[:-1]
    assert found["parts"]["looks"]["figures"][0]["value"].split() == earlier, "written after each part"
    left = int((tmp_path / "outputs/bench/gpu-small/hangs.log").read_text())
    wait_until(lambda: is_gone(left))
    assert found["versions"]["torch"] == torch.__version__
    assert "needs a horse" in capsys.readouterr().out


def script(name: str, output: Path, folder: Path) -> list[str]:
    """Arguments of a Python that stands in for a part."""
    begin = (
        "import json, subprocess, sys\n"
        "out = open(sys.argv[1], 'w', buffering=1)\n"
        "write = lambda **record: out.write(json.dumps(record) + '\\n')\n"
        f"figure = {gpu.asdict(_FIGURE)!r}\n"
    )
    return ["-c", begin + _SCRIPTS[name], str(output), str(folder / "outputs/bench/gpu-small.json")]


def report(folder: Path) -> dict[str, dict[str, dict[str, str]]]:
    return json.loads((folder / "outputs/bench/gpu-small.json").read_text())


@pytest.mark.parametrize("name", ["logprobs", "hash", "nccl"])
def test_parts_without_megatron_meet_their_checks(name: str, tmp_path: Path) -> None:
    run(Setting(name, SMALL, Device.cpu, tmp_path), tmp_path / "out")
    figures, end = read(tmp_path / "out")
    assert end == {"complete": True}
    assert Outcome(figures).broken == []
    assert sum(figure.required for figure in figures) >= 2
    assert all(
        figure.value > 0 for figure in figures if figure.unit in ("s", "GB/s") and isinstance(figure.value, float)
    )


def test_the_colocated_run_composes_fits_and_is_planned(tmp_path: Path) -> None:
    shape, tokenizer = colocated.SHAPES[Device.gpu], colocated.SHAPES[Device.cpu]
    (tmp_path / "model").mkdir()
    for file in [shape / "config.json", *tokenizer.glob("*token*")]:
        shutil.copy(file, tmp_path / "model")
    name, *settings = colocated.overrides(Device.gpu, tmp_path)
    words = colocated.command(name, settings)
    assert words[:3] == [sys.executable, "-m", "rlsys.apps.cli.main"]
    done = CliRunner().invoke(app, [*words[3:], "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert (plan["batch"]["episodes_per_step"], plan["batch"]["updates"]) == (640, 2 * colocated.STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("parts", "figures"),
    [
        ("sync,local,te,parity,offload", {"sync": 5, "local": 12, "te": 0, "parity": 1, "offload": 11}),
        pytest.param(
            "engine,agreement,colocated", {"engine": 10, "agreement": 4, "colocated": 11}, marks=pytest.mark.engine
        ),
    ],
)
def test_parts_with_megatron_and_sglang_run_at_small_scale(parts: str, figures: dict[str, int], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--small", "--only", parts]
    environment = {"PYTHONPATH": str(PROJECT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: len(part["figures"]) for name, part in report(tmp_path)["parts"].items()} == figures
