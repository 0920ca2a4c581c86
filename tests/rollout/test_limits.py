"""What a worker refuses before it starts anything, and stand-ins that do not stand in for more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlsys.config.schema import Device, EngineConfig, RolloutConfig, SearchConfig, TaskConfig
from rlsys.errors import UserError
from rlsys.rollout import sglang_cpu
from rlsys.rollout.cpu_standins import sgl_kernel
from rlsys.rollout.engine import RolloutWorker
from tests.support import tiny


def test_sequences_that_the_engine_cannot_hold_are_refused(tmp_path: Path) -> None:
    words = tiny.tokenizer()
    path = tiny.save(tiny.train(tiny.FIRST, words, seed=0, steps=1), words, tmp_path)
    rollout = RolloutConfig(engine=EngineConfig(kv_cache_tokens=1000))
    task = TaskConfig(train_path="", eval_path="", max_total_tokens=1001)
    with pytest.raises(UserError, match=r"task\.max_total_tokens=1001 is more than the 1000"):
        RolloutWorker(path, rollout, task, SearchConfig(url="http://127.0.0.1:1"), Device.cpu, seed=0)
    with pytest.raises(UserError, match=r"search\.url is null"):
        RolloutWorker(path, rollout, task, SearchConfig(), Device.cpu, seed=0)


def test_a_stand_in_raises_when_it_is_called_and_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.rmsnorm was called"):
        sgl_kernel.rmsnorm()
    monkeypatch.setattr(sys, "path", ["first"])
    sglang_cpu.prepare(Device.gpu)
    assert sys.path == ["first"]
    sglang_cpu.prepare(Device.cpu)
    sglang_cpu.prepare(Device.cpu)
    assert sys.path == ["first", str(sglang_cpu.STANDINS)]
