"""Tests of PPO, EMA-PG, KL and reward variants, and guards: one real `rlsys train` each."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.jsonl import read_rows
from tests.support.paths import PROJECT
from tests.support.runs import NO_INFERENCE, NO_SEARCH, PLAIN_ENGINE, Finished, rlsys, small
from tests.support.serving import served
from tests.support.teachers import scored_by

pytestmark = [pytest.mark.slow, pytest.mark.engine]


POLICY = PROJECT / "examples/searchr1/tiny/policy"


def checkpoints(run: Finished, step: int) -> set[str]:
    """Folders that the worker groups saved after `step`."""
    folder = run.folder / "checkpoints" / f"global_step_{step}"
    return {path.name for path in folder.iterdir()} - {"data", "manifest.json"}


def test_ppo_with_an_own_optimiser_on_one_slot_trains_only_the_critic_during_warmup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    together = [PLAIN_ENGINE, "cluster=one_slot", "trainer.schedule.kind=sequential"]
    lion = ["actor.optimizer=examples.extend.optimizer.Lion", "actor.optimizer.lr=3e-5"]
    settings = ["algorithm=ppo", *together, *lion, "trainer.steps=3", "critic.warmup_steps=1", "checkpoint.interval=2"]
    run = Finished(tmp_path, *settings)
    assert run.summary["overlap_s"] == 0
    first, *others = run.rows
    assert "actor/policy_loss" not in first
    assert (first["critic/values/max"], first["critic/values/min"]) == (0.0, 0.0), "a new critic predicts 0"
    assert first["critic/kl"] == pytest.approx(0.0, abs=1e-6), "the policy still equals its reference"
    for row in others:
        assert row["critic/values/max"] > row["critic/values/min"]
        assert row["actor/grad_norm"] > 0
        assert row["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-5)
        assert row["critic/advantages/std"] == pytest.approx(1.0, abs=0.01)
    assert run.rows[1]["actor/first_ratio_dev_max"] < 1e-3
    last = others[-1]
    missed = abs(last["critic/values/mean"] - last["critic/returns/mean"])
    assert missed < abs(last["critic/returns/mean"]), "the critic must be closer than predicting 0"
    assert checkpoints(run, 3) == {"actor", "critic"}
    # Groups on one slot take turns in memory, also when a checkpoint is loaded.
    resumed = rlsys(*small(tmp_path, *settings, f"resume={run.folder / 'checkpoints' / 'global_step_2'}"))
    assert resumed.returncode == 0, resumed.stderr[-6000:]
    assert "resumes after step 2" in resumed.stdout + resumed.stderr


def test_ema_pg_reference_follows_the_policy_and_is_evaluated(tmp_path: Path) -> None:
    run = Finished(
        tmp_path,
        PLAIN_ENGINE,
        "algorithm=ema_pg",
        "algorithm.ref_policy_ema_update_period=1",
        "algorithm.eval_ref_policy=true",
        "trainer.steps=2",
    )
    first, second = run.rows
    assert first["kl/k3"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < second["kl/k3"] < 1, "the reference must follow the policy with a lag"
    assert second["actor/kl_loss"] > 0
    assert 0 <= run.summary["em_reference"] <= 1
    answers = (run.folder / "evaluations" / "reference_step_000002.jsonl").read_text().splitlines()
    assert len(answers) == 8
    assert checkpoints(run, 2) == {"actor", "reference"}


def test_policy_that_is_its_own_teacher_learns_nothing_from_it_at_first(tmp_path: Path) -> None:
    """The teacher is a folder, and the task's reward has no weight, so the first step has no advantage at all."""
    silent = [
        PLAIN_ENGINE,
        *NO_SEARCH,
        "algorithm=opd",
        "reward.terms={exact_match: 0}",
        "trainer.mini_batches=1",
    ]
    run = Finished(tmp_path, *silent, f"algorithm.teacher.model={POLICY}", "trainer.steps=1")
    (row,) = run.rows
    assert row["distillation/reverse_kl/max"] == pytest.approx(0.0, abs=1e-5)
    assert row["critic/advantages/max"] == pytest.approx(0.0, abs=1e-5)
    assert row["distillation/teacher_logprob"] < 0
    assert checkpoints(run, 1) == {"actor"}, "a frozen teacher is not saved"


def test_server_is_a_teacher_of_a_run_without_an_inference_group(tmp_path: Path) -> None:
    """The server computes with transformers, and has the weights at which the policy starts."""
    ours = [PLAIN_ENGINE, "algorithm.old_logprobs=engine", "task.token_mode=append", "task.train_eos=false"]
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    with served(scored_by(model, tokenizer)) as server:
        taught = ["algorithm=opd", f"algorithm.teacher.model={server.url}"]
        run = Finished(tmp_path, *taught, *ours, "trainer.mini_batches=1", "trainer.steps=2")
    first, second = run.rows
    assert first["distillation/reverse_kl/max"] == pytest.approx(0.0, abs=1e-3)
    assert second["distillation/reverse_kl/mean"] > first["distillation/reverse_kl/mean"]
    # One request compared the tokens. Those that are repeated because no connection was accepted are counted.
    assert 0 < len(server.seen) - 1 <= sum(row["distillation/requests"] for row in run.rows)
    assert first["distillation/request_s"] > 0


def test_guard_alarm_stops_the_run_with_a_checkpoint_and_a_message(tmp_path: Path) -> None:
    stop = [
        PLAIN_ENGINE,
        *NO_INFERENCE,
        *NO_SEARCH,
        "guards.action=stop",
        "guards.entropy_floor=100",
        "guards.patience=1",
    ]
    done = rlsys(*small(tmp_path, *stop, "trainer.steps=3"))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "actor/entropy is" in last
    assert "guards.entropy_floor=100" in last
    assert "Traceback" not in done.stderr
    (folder,) = tmp_path.glob("searchr1_tiny_cpu-*")
    assert (folder / "checkpoints" / "global_step_1" / "actor").is_dir()
    (row,) = read_rows(folder / "metrics.jsonl")
    assert row["guard/entropy"] == 1.0
