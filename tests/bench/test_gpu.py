"""Tests of `python -m bench.gpu`: its parts at small sizes on a CPU, their checks, and what a failed part leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from typer.testing import CliRunner

import bench.gpu.__main__ as gpu
from bench.gpu import agreement, colocated, engine, hashing, logprobs, parity, step
from bench.gpu.figures import FULL, SMALL, Figure, NotHereError, Outcome, Setting, at_most, compared, holds
from bench.gpu.part import MODEL_LIMIT_S, PARTS, Part, in_new_process, read, run
from rlsys.apps.cli.main import app
from rlsys.config.schema import Device, Dtype, Layers
from rlsys.rollout.agent.recorder import Generation
from rlsys.weights.weight_map import read_architecture
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


def test_parts_that_were_not_chosen_keep_their_results_unless_the_version_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("measures", "misses", "lacks")
    monkeypatch.setattr(gpu, "PARTS", {name: Part("", 100, needs_model=False) for name in names})
    monkeypatch.setattr(gpu, "part_command", lambda name, *_: script(name, Path(_[-1]), tmp_path))
    assert gpu.measure(["misses"], Device.cpu, small=True) == 1
    before = report(tmp_path)["parts"]["misses"]
    assert gpu.measure(["measures"], Device.cpu, small=True) == 0
    assert list(report(tmp_path)["parts"]) == ["measures", "misses"]
    assert report(tmp_path)["parts"]["misses"] == before
    monkeypatch.setattr(gpu, "commit_of", lambda _: ("another", False))
    assert gpu.measure(["lacks"], Device.cpu, small=True) == 2
    assert list(report(tmp_path)["parts"]) == ["lacks"]


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


def test_figures_before_an_error_are_kept_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, output = Setting("hash", SMALL, Device.cpu, tmp_path), tmp_path / "out"
    for error, end in (
        (RuntimeError("a\nb"), {"failed": "RuntimeError: a b"}),
        (NotHereError("needs c"), {"skipped": "needs c"}),
    ):

        def measure(_: Setting, error: Exception = error) -> Iterator[Figure]:
            yield _FIGURE
            raise error

        monkeypatch.setattr(hashing, "measure", measure)
        if isinstance(error, NotHereError):
            run(setting, output)
        else:
            with pytest.raises(RuntimeError):
                run(setting, output)
        assert read(output) == ([_FIGURE], end)
    output.write_text(output.read_text() + '{"fig')
    assert read(output) == ([_FIGURE], end), "a partial line is left out"
    assert read(tmp_path / "none") == ([], {})


def test_a_new_process_has_the_environment_and_passes_on_its_errors() -> None:
    assert in_new_process(os.getenv, "RLSYS_BENCH", environment={"RLSYS_BENCH": "1"}) == "1"
    assert "RLSYS_BENCH" not in os.environ
    with pytest.raises(ValueError, match="invalid literal"):
        in_new_process(int, "x")
    with pytest.raises(BrokenProcessPool):
        in_new_process(os._exit, 3)


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


def test_rounding_passes_as_a_gradient_and_an_error_of_one_element_does_not() -> None:
    exact = torch.randn(600, 50, generator=torch.Generator().manual_seed(0)) * 1e-5
    exact[:, 0] = 1.0
    assert logprobs.gradient_difference(exact.bfloat16(), (exact * (1 + 1e-6)).bfloat16()) < logprobs.GRADIENT_LIMIT
    wrong = exact.clone()
    wrong[599, 7] += 0.1 * exact.abs().mean()
    assert logprobs.gradient_difference(wrong.bfloat16(), exact.bfloat16()) > logprobs.GRADIENT_LIMIT


def test_layers_are_compared_in_float32_and_by_their_rounding_error_in_bfloat16() -> None:
    """The own layers in bfloat16 are off by 0.01; twice that is the limit."""
    exact = np.zeros(4, dtype=np.float32)
    own, last = exact + 0.01, exact + np.array([0, 0, 0, 2e-3])
    packed, alone = (parity.Way(Layers.te, Dtype.float32, packed) for packed in (True, False))
    found = list(parity.differences({packed: exact + 1e-4, alone: last}, exact, exact))
    assert [figure.met for figure in found] == [True, False]
    assert list(parity.differences({packed: exact}, exact, exact)) == []
    packed, alone = (way._replace(dtype=Dtype.bfloat16) for way in (packed, alone))
    found = list(parity.differences({packed: exact - 0.019, alone: exact + 0.021}, exact, own))
    assert [figure.met for figure in found] == [None, True, None, False]
    assert [figure.value for figure in found] == pytest.approx([0.019, 1.9, 0.021, 2.1], rel=1e-5)


def test_engine_and_trainer_agree_in_float32_or_within_twice_the_rounding_error() -> None:
    exact = np.array([-1.0, -2.0], dtype=np.float32)
    in_float32 = {figure.name: figure for figure in agreement.differences(exact + 1e-4, exact, exact)}
    assert in_float32["largest difference"].met is True
    assert [one.met for one in agreement.differences(exact + 2e-3, exact, exact) if one.required] == [False]
    trainer = exact + np.array([0.01, -0.01], dtype=np.float32)
    for apart, met in ((0.019, True), (0.021, False)):
        figures = {one.name: one for one in agreement.differences(exact + np.float32(apart), trainer, exact)}
        assert [one.met for one in figures.values() if one.required] == [met]
        assert figures["mean difference"].value == pytest.approx(apart, rel=1e-4)
    ratio = figures["mean ratio of probabilities"].value
    assert ratio == pytest.approx((np.exp(0.01 - 0.021) + np.exp(-0.01 - 0.021)) / 2, rel=1e-4)


def test_float32_on_a_gpu_is_never_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's products of float32 matrices are in TF32 unless the process's environment forbids it."""
    checked: list[str] = []

    def stand_in(call: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
        if Dtype.float32 in arguments or (call is parity.one_step and Device.gpu in arguments):
            assert environment == {"NVIDIA_TF32_OVERRIDE": "0"}
            checked.append(call.__name__)
        if call is agreement.sample:
            return [generation([1], [0])]
        if call is parity.one_step:
            return {"loss": 1.0}
        return [np.full(1, float(Dtype.float32 in arguments), dtype=np.float32)] * (1 + (call is parity.log_probs))

    for module in (parity, agreement):
        monkeypatch.setattr(module, "in_new_process", stand_in)
    monkeypatch.setattr(parity, "version_of", lambda _: "1")
    for part in (parity, agreement):
        assert list(part.measure(Setting("", SMALL, Device.gpu, tmp_path)))
    assert checked == ["log_probs"] * 2 + ["one_step"] * 2 + ["score"]


def test_parts_run_in_the_order_of_the_document_and_end_within_an_hour() -> None:
    page = (PROJECT / "docs" / "benchmarks.md").read_text().partition("\n## One GPU\n")[2]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(PARTS)
    assert sum(part.limit_s for part in PARTS.values()) + MODEL_LIMIT_S <= 3600


def generation(tokens: list[int], versions: list[int], finish: str = "length") -> Generation:
    return Generation(tokens, [0.0] * len(tokens), finish, 0, versions)


def test_the_tokens_of_the_engine_are_the_targets_of_the_trainer() -> None:
    (batch,) = agreement.micro_batches([[5, 6], [7]], [generation([8], [0]), generation([9, 10], [0, 0])])
    assert batch.tokens.tolist() == [[5, 6, 8, 7, 9, 10]]
    assert batch.lengths.tolist() == [3, 3]
    assert batch.targets.tolist() == [8, 9, 10]


@pytest.mark.parametrize(
    ("versions", "finish", "continues"),
    [
        ([1, 1, 2], "length", True),
        ([2, 2, 2], "length", False),
        ([0, 1, 2], "length", False),
        ([1, 2, 1], "length", False),
        ([1, 1, 2], "abort", False),
    ],
)
def test_a_request_continues_if_its_tokens_are_of_the_old_version_then_of_the_new(
    versions: list[int], finish: str, continues: bool
) -> None:
    others = [generation([1], [1]), generation([1], [2], "stop")]
    assert engine.continued([*others, generation([1, 2, 3], versions, finish)], version=2) is continues
    assert not engine.continued(others, version=2)


def test_recomputation_repeats_the_forward_pass_of_the_layers() -> None:
    """Without targets there is no output layer: 3 forward passes are needed, and 4 computed."""
    architecture = read_architecture(str(FULL.shape))
    needed, computed = step.operations(architecture, replace(FULL, trained=0.0), 4, recompute=True)
    assert needed / computed == pytest.approx(0.75)
    needed, computed = step.operations(architecture, FULL, 4, recompute=True)
    assert 0.75 < needed / computed < 0.78
    needed, computed = step.operations(architecture, FULL, 4, recompute=False)
    assert needed == computed
    weights, tokens = (
        2.775e9,
        4 * 4 * 2048,
    )  # Parameters of the layers; attention and output layer add to their products.
    assert 1.0 < needed / (6 * weights * tokens) < 1.1


def test_the_memory_estimate_of_a_step_is_close_to_its_training_states() -> None:
    """Each parameter takes 18 bytes: bfloat16, a float32 gradient, and three values of Adam in float32."""
    states = 18 * 3_085_938_688
    assert states < step.estimate(FULL, 8, Layers.te, recompute=True) < 1.6 * states


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
