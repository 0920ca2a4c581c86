"""Tests of `python -m bench.gpu`: its parts at small sizes on a CPU, their checks, and what a failed part leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

import bench.gpu.__main__ as gpu
from bench.gpu import colocated
from bench.gpu.figures import SMALL, Figure, Outcome, Setting, at_most, compared, holds
from bench.gpu.part import MODEL_LIMIT_S, PARTS, Part, read, run
from rlsys.apps.cli.main import app
from rlsys.config.schema import Device
from scripts.memory_tables import gpu_experiments
from tests.support.paths import PROJECT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without a GPU")


@pytest.mark.parametrize(("arguments", "code"), [([], "not_found"), (["--small", "--only", "hash,hsh"], "unknown")])
def test_a_measurement_that_cannot_begin_is_refused_in_one_line(
    arguments: list[str], code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as refusal:
        gpu.main()
    assert signal.getsignal(signal.SIGTERM) is handler, "nothing was begun that a signal could end"
    assert refusal.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith(f"[{code}]\n")
    assert said.count("\n") == 1


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


def test_a_part_that_fails_or_hangs_ends_no_other_and_loses_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = dict.fromkeys(_SCRIPTS, 100.0) | {"hangs": 4.0}
    monkeypatch.setattr(gpu, "PARTS", {name: Part("", limit, needs_model=False) for name, limit in limits.items()})
    monkeypatch.setattr(gpu, "part_command", lambda name, *_: script(name, Path(_[-1]), tmp_path))
    assert gpu.measure(list(_SCRIPTS), Device.cpu, small=True) == 1
    found = report(tmp_path)
    assert {name: part["failed"].partition(";")[0] for name, part in found["parts"].items()} == {
        "measures": "",
        "crashes": "it ended with status 3",
        "hangs": "it was ended after 4 s",
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
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
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


def test_a_check_that_is_not_a_number_is_not_met() -> None:
    assert at_most("", nan, 1.0).met is False
    assert at_most("", 1.0, 1.0).met is True
    outcome = Outcome(
        [at_most("a", nan, 1.0), holds("b", False), holds("c", True), compared("d", 3, "s", "e", 2, (0, 1))]
    )
    assert outcome.broken == ["a", "b"]
    assert [row[2:] for row in gpu.rows({"part": outcome})] == [
        ("nan", "", "at most 1", "FAILED"),
        ("no", "", "yes", "FAILED"),
        ("yes", "", "yes", "met"),
        ("3 s", "1.5 x e", "ratio of at most 1", "missed"),
    ]
    assert [compared("", value, "", "", 1, (0.9, 1.1)).met for value in (0.8, 1.0, 1.2)] == [False, True, False]
    assert compared("", 20, "", "", 1, (10, inf)).target == "ratio of at least 10"


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


def test_parts_run_in_the_order_of_the_document_and_end_within_an_hour() -> None:
    page = (PROJECT / "docs" / "benchmarks.md").read_text().partition("\n## One GPU\n")[2]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(PARTS)
    assert sum(part.limit_s for part in PARTS.values()) + MODEL_LIMIT_S <= 3600


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


ROW = {
    **{"actor/grad_norm": 0.5, "engine/0/version": 2.0, "rollout/tokens_per_s": 9.0, "mfu/actor": 0.4},
    **{"actor/first_ratio_dev_max": 0.01, "logprob/max_diff": 0.02, "time/step": 78.0},
    **dict.fromkeys(colocated.STAGES.values(), 3.0),
    **{"rollout/episodes": 640, "rollout/generated_tokens": 350 * 640},
    **{"prompt_length/mean": 200.0, "response_length/mean": 1200.0},
}
"""Metrics of a step whose episodes have the tokens that docs/scale.md assumes."""


def test_figures_of_the_colocated_run_are_read_from_its_metrics() -> None:
    first = ROW | {"engine/0/version": 1.0, "actor/first_ratio_dev_max": 0.03, "time/training": 9.0}
    found = {figure.name: figure for figure in colocated.figures([first, ROW])}
    assert [figure.met for figure in found.values() if figure.required] == [True, True]
    assert found["training"].value == 3.0, "the first step compiles kernels"
    assert found["largest distance of a first ratio from 1"].value == 0.03
    wrong = [
        ([ROW], 0),
        ([ROW | {"actor/grad_norm": 0.0}, ROW], 0),
        ([first, first], 1),
    ]
    for rows, check in wrong:
        assert [figure.met for figure in colocated.figures(rows) if figure.required][check] is False


def test_colocated_step_is_compared_with_the_estimate_of_the_document() -> None:
    """The table of docs/scale.md gives 39 s on an H100."""
    config = next(one for one in gpu_experiments() if one.name == colocated.EXPERIMENTS[Device.gpu][0])
    (step,) = colocated.against_estimate(config, ROW, "NVIDIA H100 80GB HBM3")
    assert step.ratio == pytest.approx(78 / 39, rel=0.02)
    (alone,) = colocated.against_estimate(config, ROW, "")
    assert (alone.value, alone.ratio) == (78.0, None)


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
