"""Tests of the whole system on real parts: `make demo` with a few steps.

All tests check the same run. Each assertion would fail if a stage were faked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlsys.orchestrator.run import METRIC_TABLES
from tests.support.jsonl import read_rows
from tests.support.paths import PROJECT
from tests.support.runs import LIMIT_S, PATIENT

POLICY = PROJECT / "examples/searchr1/tiny/policy"
STEPS = 2
SETTINGS = [f"trainer.steps={STEPS}", "trainer.prompts_per_step=24", "eval.interval=0", "eval.limit=64"]
SETTINGS += ["tracking.wandb=false", *PATIENT]

MARK = "RLSYS_TEST_OF_THE_DEMO"
"""Environment variable that marks all processes of the run."""

pytestmark = pytest.mark.engine


class FinishedRun:
    def __init__(self, folder: Path, printed: str) -> None:
        self.folder = folder
        self.printed = printed
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        self.rows = read_rows(folder / "metrics.jsonl")
        self.trace: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Run the demo like a user, in a new process."""
    outputs = tmp_path_factory.mktemp("outputs")
    command = [sys.executable, "-m", "examples.searchr1.tiny.demo", f"output_dir={outputs}", *SETTINGS]
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env=os.environ | {MARK: str(outputs)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder,) = outputs.iterdir()
    return FinishedRun(folder, done.stdout)


def test_the_policy_learns_to_search(run: FinishedRun) -> None:
    summary = run.summary
    assert summary["steps"] == STEPS
    assert summary["em_after"] > summary["em_before"] + 0.2
    assert summary["em_after_by_hop"]["2"] > summary["em_before_by_hop"]["2"]
    assert summary["searches_after"] > summary["searches_before"]


def test_scripted_policy_answers_the_world_by_searching(run: FinishedRun) -> None:
    assert run.summary["oracle_em"] >= 0.95
    assert run.summary["recall_at_3"] >= 0.95


def test_megatron_and_the_engine_agree_on_the_same_tokens(run: FinishedRun) -> None:
    differences = [row["logprob/max_diff"] for row in run.rows]
    assert 0 < max(differences) < 1e-3, "a difference of 0 would mean that one was copied"
    assert run.summary["first_ratio_max_dev"] < 1e-3


def test_every_version_reached_the_engine(run: FinishedRun) -> None:
    assert run.summary["weight_syncs"] == STEPS + 1
    assert [row["engine/0/version"] for row in run.rows] == list(range(1, STEPS + 1))
    assert run.rows[-1]["sync/bytes"] >= (POLICY / "model.safetensors").stat().st_size * 0.9


def test_training_overlaps_generation(run: FinishedRun) -> None:
    assert run.summary["overlap_s"] > 0
    spans = [event for event in run.trace if event.get("ph") == "X"]
    for step in range(1, STEPS + 1):
        of_step = [span for span in spans if span["args"].get("step") == step]
        names = {span["name"] for span in of_step}
        assert {"rollout.group", "logprob.compute", "train.accumulate", "train.apply"} <= names
        first_scored = min(span["ts"] for span in of_step if span["name"] == "logprob.compute")
        last_rolled = max(span["ts"] + span["dur"] for span in of_step if span["name"] == "rollout.group")
        assert first_scored < last_rolled, f"step {step} waited for its last rollout"


def test_converted_model_is_trained_and_answers_like_the_engine(run: FinishedRun) -> None:
    hf = run.folder / "hf"
    before, after = load_file(POLICY / "model.safetensors"), load_file(hf / "model.safetensors")
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) * 0.9, "training must have moved the weights"
    assert AutoModelForCausalLM.from_pretrained(hf).num_parameters() > 1_000_000
    assert run.summary["hf_engine_agreement"] >= 0.98


def test_run_folder_has_config_charts_trace_samples_and_tensorboard(run: FinishedRun) -> None:
    for name in ("config.yaml", "curves.png", "em.png", "reward.png", "stage_times.png", "trace.json"):
        assert (run.folder / name).stat().st_size > 0, name
    assert len(list((run.folder / "samples").glob("*.txt"))) == 10
    assert list(run.folder.rglob("events.out.tfevents.*"))
    assert "exact match" in run.printed


ELSEWHERE = (
    *("judge/", "tool/", "gateway/", "sources/", "distillation/", "correction/", "actor/llds_loss"),
    *("time/values", "time/switch", "time/checkpoint", "mfu/"),
)
CRITIC = ("rewards", "returns", "values", "v", "kl", "grad_norm", "lr")
"""Metrics of features that the demo lacks."""


def test_row_has_every_metric_that_is_declared_and_no_other(run: FinishedRun) -> None:
    logged = {name for row in run.rows for name in row} - {"step", "time"}
    assert json.loads((run.folder / "units.json").read_text()).keys() == logged
    declared = [one for heading, table in METRIC_TABLES.items() if heading != "Evaluations" for one in table]
    features = (*ELSEWHERE, *(f"critic/{name}" for name in CRITIC))
    missing = {one.names for one in declared if not any(map(one.covers, logged))}
    assert missing == {one.names for one in declared if one.names.startswith(features)}


def test_no_process_survives_the_run(run: FinishedRun) -> None:
    assert run.folder.exists()
    processes = psutil.process_iter(["environ", "cmdline"])
    left = [p for p in processes if (p.info["environ"] or {}).get(MARK) == str(run.folder.parent)]
    assert not [" ".join(p.info["cmdline"] or []) for p in left]
