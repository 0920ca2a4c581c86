"""Tests of the recorded environment of a run, and of what a machine lacks for a config."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.schema import (
    Attention,
    ClusterConfig,
    Device,
    Dtype,
    Layers,
    Mode,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
    SyncMode,
)
from rlsys.observe.environment import (
    RUN,
    Capabilities,
    commit_of,
    environment,
    read_launches,
    record_launch,
    unmet_requirements,
)
from tests.support.capabilities import H100


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the timeout, because programs start slowly on a busy machine and would be left out of the record."""
    monkeypatch.setattr("rlsys.observe.environment._TIMEOUT_S", 120)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_of_a_checkout_and_its_changes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init")
    assert commit_of(tmp_path) == (None, None), "no commit yet"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == (commit, True)
    (tmp_path / "within").mkdir()
    assert commit_of(tmp_path / "within") == (None, None), "an outer checkout does not count"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == (None, None), "no git"


def test_each_start_of_a_run_is_recorded_in_order(tmp_path: Path) -> None:
    for step in (0, 7):
        record_launch(tmp_path, step)
    first, second = read_launches(tmp_path)
    assert (first.after_step, second.after_step) == (0, 7)
    assert (second.environment, second.command) == (environment(), sys.argv)


@pytest.mark.parametrize("content", ["{", '{"lives": [1]}', '{"lives": [{"begun": 1}]}'])
def test_damaged_record_of_starts_is_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / RUN).write_text(content)
    record_launch(tmp_path, 3)
    assert [life.after_step for life in read_launches(tmp_path)] == [3]


@pytest.mark.parametrize(
    "script", ["echo 'NVIDIA H100, 580'; exit 1", "echo 'No devices'", f"exec {shutil.which('sleep')} 9999"]
)
def test_program_without_an_answer_is_left_out(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs that are asked, nvidia-smi and git, fail or hang."""
    if "sleep" in script:
        monkeypatch.setattr("rlsys.observe.environment._TIMEOUT_S", 0.5)
    (tmp_path / ".git").mkdir()
    for name in ("nvidia-smi", "git"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not {"gpus", "gpu driver", "cuda of torch"} & environment().keys()
    if "No devices" not in script:
        assert commit_of(tmp_path) == (None, None)


LAPTOP = Capabilities(torch="2.13.0+cpu")
A100 = replace(H100, compute_capability=(8, 0), flash_attn="2.8.3", flash_attn_4=None)
V100 = replace(H100, compute_capability=(7, 0), flash_attn_4=None)


def config(
    device: Device = Device.gpu,
    mode: Mode = Mode.disaggregated,
    sync: SyncMode = SyncMode.tensor,
    cp: int = 1,
    **model: Any,
) -> RunConfig:
    made = RunConfig(
        model=ModelConfig(path="model", **model),
        cluster=ClusterConfig(device=device, mode=mode, sync_mode=sync),
        rollout=RolloutConfig(engine=SglangConfig(dtype=model.get("dtype", Dtype.bfloat16))),
    )
    made.actor.parallel = ParallelConfig(cp=cp)
    return made


def keys(asked: RunConfig, here: Capabilities) -> list[str]:
    return [problem.key for problem in unmet_requirements(asked, here)]


FULL = config(mode=Mode.colocated, sync=SyncMode.ipc, cp=2, layers=Layers.te, attention=Attention.flash, fp8=True)
ANY_FLASH = config(attention=Attention.flash)


@pytest.mark.parametrize(
    ("here", "asked"),
    [
        (H100, config()),
        (H100, FULL),
        (LAPTOP, config(Device.cpu)),
        (V100, config(dtype=Dtype.float32, attention=Attention.unfused)),
        (replace(V100, transformer_engine=None), config(dtype=Dtype.float32, layers=Layers.local)),
        # Each GPU generation has its own FlashAttention.
        (A100, ANY_FLASH),
        (replace(H100, flash_attn="2.8.3", flash_attn_4=None), ANY_FLASH),
    ],
)
def test_sufficient_machine_lacks_nothing(here: Capabilities, asked: RunConfig) -> None:
    assert keys(asked, here) == []


def test_all_missing_capabilities_are_reported_at_once() -> None:
    # No device, no NCCL and no SGLang kernels are three problems of the one key cluster.device.
    everywhere = ["model.layers", *["cluster.device"] * 3, "cluster.mode"]
    assert keys(config(mode=Mode.colocated, layers=Layers.te, fp8=True), LAPTOP) == everywhere
    assert keys(config(), V100) == ["model.dtype", "rollout.engine.dtype"], "a V100 has no bfloat16"


@pytest.mark.parametrize(
    ("here", "asked", "key"),
    [
        (replace(H100, transformer_engine=None), config(layers=Layers.te), "model.layers"),
        (replace(H100, transformer_engine=None), config(attention=Attention.flash, fp8=True), "model.layers"),
        (H100, config(dtype=Dtype.float32), "model.attention"),
        (LAPTOP, config(Device.cpu, layers=Layers.te), "model.layers"),
        (H100, config(layers=Layers.local, attention=Attention.flash), "model.attention"),
        (replace(A100, flash_attn=None, flash_attn_4="4"), config(attention=Attention.flash), "model.attention"),
        (H100, config(layers=Layers.local, fp8=True), "model.fp8"),
        (A100, config(fp8=True), "model.fp8"),
        (replace(H100, sglang_kernel=None), config(), "cluster.device"),
        (replace(H100, nccl=False), config(), "cluster.device"),
        (replace(H100, torch_memory_saver=None), config(mode=Mode.colocated), "cluster.mode"),
        (replace(H100, foreign_apex="0.9.10"), config(), "model.fusions"),
        (H100, config(cp=2, attention=Attention.unfused), "actor.parallel.cp"),
    ],
)
def test_missing_capability_is_named_by_its_key(here: Capabilities, asked: RunConfig, key: str) -> None:
    assert keys(asked, here) == [key]
