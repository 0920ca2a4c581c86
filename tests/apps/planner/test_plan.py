"""Tests of `rlsys plan`: costs against the estimates of `planning.cost`, the answer's sums, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlsys.apps.cli.main import app
from rlsys.apps.planner.answer import Machines, Planner, machines_of, with_shape
from rlsys.apps.planner.whole_run import evaluation_s, whole_run
from rlsys.apps.planner.workload import Workload
from rlsys.cluster.planning.cost import StepCost
from rlsys.cluster.planning.hardware import REACHED, REACHED_SOURCE, SPEEDS
from rlsys.cluster.planning.memory import count_parameters, group_memory
from rlsys.cluster.planning.resolve import make_plan
from rlsys.cluster.planning.work import EXPECTED, HardwareCosts
from rlsys.config.schema import AsyncSchedule, RunConfig
from rlsys.errors import Code
from rlsys.observe.run_folder import open_run
from rlsys.observe.spans import PEAK_TFLOPS
from rlsys.trainer.batches import SampleSize
from rlsys.weights.weight_map import read_architecture
from tests.apps.planner.made import FREE, costs_of
from tests.support.composed import composed
from tests.support.made_run import made_run
from tests.support.refusals import refused

FEW = ("trainer.prompts_per_step=8", "algorithm.n_samples=2")
"""Episodes of a step that is simulated in a moment."""


@cache
def config_of(name: str = "searchr1_qwen2.5_3b_1node", *settings: str) -> RunConfig:
    return with_shape(composed(*settings, name=name))


def test_a_step_of_full_micro_batches_takes_as_long_as_the_estimate_says() -> None:
    """2,560 equal episodes, one in a micro-batch, on four data-parallel ranks; two optimiser steps."""
    config = config_of("searchr1_qwen2.5_3b_1node", f"actor.micro_batch_tokens={EXPECTED.total}")
    model = read_architecture(config.model.path)
    call, estimate = HardwareCosts(config, model).calls()["actor"], StepCost(config, model)
    one_after_another = call.seconds([[[0]] * 640] * 4, [SampleSize(EXPECTED.total, EXPECTED.generated)]) - call.call_s
    assert one_after_another + 2 * call.apply_s == pytest.approx(estimate.training_s(), rel=1e-6)


def test_a_micro_batch_launches_its_kernels_whatever_its_tokens() -> None:
    """Three passes through 36 layers: a forward pass, and a backward pass of twice as many operations."""
    config = config_of()
    model = read_architecture(config.model.path)
    call = HardwareCosts(config, model, reached=replace(REACHED, layer_s=0.001)).calls()["actor"]
    one, two = (call.batch_s([SampleSize(1000, 100)] * number) for number in (1, 2))
    assert 2 * one - two == pytest.approx(3 * 36 * 0.001)


def test_pipeline_stages_wait_for_the_first_and_the_last_micro_batch() -> None:
    config = config_of()
    model = read_architecture(config.model.path)
    call = replace(HardwareCosts(config, model).calls()["actor"], stages=4)
    sizes = [SampleSize(1000, 100)]
    one = call.batch_s(sizes)
    assert call.seconds([[[0]] * 8], sizes) - call.call_s == pytest.approx((8 + 3) * one)


def planner(config: RunConfig, **workload: Any) -> Planner:
    return Planner(config, "H100", REACHED, REACHED_SOURCE, replace(Workload(), **workload))


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """Prediction of a small step of the 3B experiment."""
    small = planner(config_of("searchr1_qwen2.5_3b_1node", "trainer.prompts_per_step=32"))
    return small.answer(small.run(measured=2), price_per_gpu_hour=2.0)


def test_answer_accounts_for_the_step(answer: dict[str, Any]) -> None:
    assert sum(answer["actor_s"].values()) == pytest.approx(answer["step_s"])
    assert max(answer["stages_s"].values()) <= answer["step_s"] * (1 + 1e-9)
    assert {"rollout", "inference", "training", "weight sync"} <= answer["stages_s"].keys()
    assert all(0 <= share <= 1 for share in answer["idle"].values())
    assert answer["staleness"] == {"mean": 0, "max": 0, "bound": 0}
    plan = make_plan(config_of())
    assert answer["memory_gib_per_rank"] == {
        name: group["memory_gib_per_rank"] for name, group in plan["groups"].items()
    }
    run = answer["run"]
    assert run["hours_of"]["steps"] == pytest.approx(answer["step_s"] * run["steps"] / 3600)
    assert run["cost"] == pytest.approx(sum(run["hours_of"].values()) * 8 * 2.0)
    assert answer["costs"]["speeds"].startswith("data sheet: NVIDIA H100")


def test_evaluations_checkpoints_and_failures_lengthen_a_run() -> None:
    """100 steps of 60 s on 8 devices; an evaluation decodes 100 answers of 50 tokens with 0.02 s a step."""
    engine = replace(FREE, step_s=0.02, max_running=1000)
    config = config_of("searchr1_qwen2.5_3b_1node", "trainer.steps=100", "eval.interval=10", "checkpoint.interval=20")
    config.eval.limit = 100
    workload = Workload(turn=50, spread=0, calls=0, calls_vary=0, failures=10, restart_s=400)
    model, costs = read_architecture(config.model.path), costs_of(engine, 1.0, 1.0)
    hours = whole_run(config, model, "H100", costs, workload, step_s=60, devices=8)
    assert hours["steps"] == pytest.approx(100 * 60 / 3600)
    assert hours["evaluations"] == pytest.approx(11 * 50 * 0.02 / 3600, rel=0.01)
    parts = group_memory(config, model, "actor").parts
    staged = parts["parameters"] + parts["optimizer"]
    assert hours["checkpoints"] == pytest.approx(5 * staged / SPEEDS["H100"].host / 3600)
    # 0.08 failures an hour; each costs 400 s and half of 20 steps.
    lost = 0.08 / 3600 * (400 + 10 * 60)
    total = sum(hours.values())
    assert hours["failures"] == pytest.approx(total * lost)
    written = replace(config, checkpoint=replace(config.checkpoint, background=False))
    slower = whole_run(written, model, "H100", costs, workload, step_s=60, devices=8)
    more = 5 * 14 * count_parameters(model) / 2e9 / 3600
    assert slower["checkpoints"] - hours["checkpoints"] == pytest.approx(more)


def test_an_evaluation_without_questions_takes_only_the_wait_for_tools() -> None:
    config, workload = config_of("searchr1_qwen2.5_3b_1node", "eval.limit=null"), Workload(eval_questions=0, tool_s=0)
    assert evaluation_s(config, costs_of(FREE, 1.0, 1.0), workload) == 0


def test_failures_that_undo_all_work_never_end() -> None:
    config = config_of("searchr1_qwen2.5_3b_1node", "trainer.steps=100")
    costs = costs_of(FREE, 1.0, 1.0)
    model = read_architecture(config.model.path)
    hours = whole_run(config, model, "H100", costs, Workload(failures=1e6), step_s=60, devices=8)
    assert hours["failures"] == float("inf")


def test_changes_that_help_are_simulated_and_sorted() -> None:
    config = config_of("searchr1_qwen2.5_3b_1node", *FEW)
    named: list[str] = []
    found = planner(config).helps(named.append)
    assert [one["saves_s"] for one in found] == sorted((one["saves_s"] for one in found), reverse=True)
    assert {*named} == {one["change"] for one in found}
    ahead = next(one for one in found if one["change"] == "async with max_staleness=1")
    schedule = replace(config.trainer, schedule=AsyncSchedule(kind="async", max_staleness=1))
    again = planner(replace(config, trainer=schedule))
    assert ahead["step_s"] == again.simulated(again.config, again.workload).step_s


def test_colocated_groups_switch_and_never_overlap() -> None:
    config = config_of("searchr1_qwen2.5_3b_1node_colocated", "trainer.prompts_per_step=16")
    colocated = planner(config)
    found = colocated.answer(colocated.run(measured=2))
    parts = found["stages_s"]
    assert sum(parts.values()) < found["step_s"]
    assert found["actor_s"]["waits for rollouts"] > 0


def test_a_critic_is_trained_beside_the_actor() -> None:
    with_critic = planner(config_of("searchr1_qwen2.5_3b_1node_ppo", "trainer.prompts_per_step=16"))
    found = with_critic.answer(with_critic.run(measured=1))
    assert found["stages_s"]["values"] > 0
    assert found["idle"].keys() == {"rollout", "actor", "inference", "critic"}


def test_every_gpu_has_a_data_sheet_and_a_known_peak() -> None:
    assert {"A100", "H100", "H200", "H20", "B200", "GB200", "CPU"} <= SPEEDS.keys()
    for name, speed in SPEEDS.items():
        assert speed.source
        assert name == "CPU" or speed.flops == PEAK_TFLOPS[name] * 1e12


def test_machines_are_read_and_applied() -> None:
    assert Machines.parse("2x8xh200") == Machines(2, 8, "H200")
    config, device = machines_of(config_of(), "8xH200")
    assert (device, config.cluster.nodes, config.cluster.devices_per_node) == ("H200", 1, 8)
    assert config.cluster.device_memory_gib == 141


@pytest.mark.parametrize(
    ("read", "text", "code", "key"),
    [
        (Machines.parse, "8", "malformed", "--on"),
        (Machines.parse, "0xH100", "malformed", "--on"),
        (Machines.parse, "8xT4", "unknown", "--on"),
        (lambda text: Workload().changed([text]), "length=3", "unknown", "--assume"),
        (lambda text: Workload().changed([text]), "turn=-3", "out_of_range", "--assume"),
    ],
)
def test_machines_and_assumptions_that_cannot_be_are_refused(
    read: Callable[[str], Any], text: str, code: Code, key: str
) -> None:
    with refused(code, key):
        read(text)


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (["--on", "16xH100"], "mismatch", "cluster.placement"),
        (["--assume", "turn=many"], "out_of_range", "--assume"),
        (["--calibrate", "/none/such"], "not_found", "/none/such"),
        (["--bench", "/none/such"], "not_found", "--bench"),
        (["model.path=/none/such"], "not_found", "model.path"),
        (["cluster.device_memory_gib=10"], "conflict", "cluster.device_memory_gib"),
        (["cluster.placement.rollout='4-5'"], "conflict", "cluster.placement.inference"),
    ],
)
def test_mistakes_are_refused(words: list[str], code: Code, key: str) -> None:
    with refused(code, key):
        CliRunner().invoke(app, ["plan", "-c", "searchr1_qwen2.5_3b_1node", *words], catch_exceptions=False)


@pytest.mark.parametrize("form", ["table", "json"])
def test_command_prints_the_prediction_and_writes_it_where_a_report_finds_it(form: str, tmp_path: Path) -> None:
    run, page = made_run(tmp_path / "run"), tmp_path / "plan.html"
    words = ["plan", "-c", "searchr1_qwen2.5_3b_1node", "--on", "8xH200", *FEW]
    words += ["--json"] if form == "json" else ["--html", str(page), "--save", str(run)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    printed = done.stdout
    assert done.exit_code == 0, done.output
    if form == "json":
        found = json.loads(printed)
        assert found["device"] == "H200"
        assert found["helps"]
    else:
        assert "8 x H200" in printed
        assert "bottleneck" in printed
        saved = open_run(run).plan()
        assert saved is not None
        assert f"step        {saved['step_s']:.1f} s" in printed
        (text,) = re.findall(r'id="model">(.*?)</script>', page.read_text())
        (shown,) = json.loads(text)["runs"]
        steps = [step["seconds"] for step in shown["time"]["steps"]]
        assert sum(steps) / len(steps) == pytest.approx(saved["step_s"], rel=1e-6)
        assert shown["time"]["groups"]["actor"]["busy"]["training"] > 0
        assert all(step["path"]["links"] for step in shown["time"]["steps"]), "each step has a critical path"
        assert shown["plan"]["seconds"][0]["predicted"] == saved["step_s"]
