"""What SGLang is started with, on a GPU too, which the arguments do not need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from rlsys.config.schema import Device, EngineConfig
from rlsys.rollout import sglang_cpu
from rlsys.rollout.engine import Engine
from tests.support import tiny

DENSE, EXPERTS = Qwen2Config(), Qwen3MoeConfig()
CONFIG = EngineConfig(tp=2, memory_fraction=0.6)
NO_GRAPHS = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}


def arguments(
    folder: Path, model: PretrainedConfig, config: EngineConfig, device: Device, memory_saver: bool = False
) -> dict[str, Any]:
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return Engine(str(folder), config, device, seed=3, memory_saver=memory_saver)._arguments()


def test_a_gpu_gets_sglangs_own_choices_but_for_experts(tmp_path: Path) -> None:
    dense = arguments(tmp_path / "dense", DENSE, CONFIG, Device.gpu)
    assert (dense["tp_size"], dense["mem_fraction_static"], dense["random_seed"]) == (2, 0.6, 3)
    chosen = ("device", "attention_backend", "moe_runner_backend", "enable_memory_saver", *NO_GRAPHS)
    assert not dense.keys() & set(chosen)
    # Experts are predicted as they were sent: gate, then up, no row elsewhere.
    experts = arguments(tmp_path / "experts", EXPERTS, CONFIG, Device.gpu)
    assert experts == {**dense, "model_path": experts["model_path"], "moe_runner_backend": "triton"}


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_cuda_graphs_can_be_off(model: PretrainedConfig, tmp_path: Path) -> None:
    on = arguments(tmp_path, model, CONFIG, Device.gpu)
    off = arguments(tmp_path, model, replace(CONFIG, cuda_graphs=False), Device.gpu)
    assert off == {**on, **NO_GRAPHS}


def test_a_cpu_has_its_own(tmp_path: Path) -> None:
    found = arguments(tmp_path, EXPERTS, replace(CONFIG, cuda_graphs=False), Device.cpu, memory_saver=True)
    assert (found["device"], found["attention_backend"]) == ("cpu", "torch_native")
    assert not found.keys() & {"moe_runner_backend", "enable_memory_saver", *NO_GRAPHS}


@pytest.mark.engine
def test_sglang_knows_every_argument_and_value(tmp_path: Path) -> None:
    sglang_cpu.prepare(Device.cpu)
    import msgspec
    from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in msgspec.structs.fields(ServerArgs)}
    for device in Device:
        config = replace(CONFIG, cuda_graphs=False, attention_backend="fa3")
        given = arguments(tmp_path, EXPERTS, config, device, memory_saver=True)
        assert given.keys() <= known
    assert "triton" in MOE_RUNNER_BACKEND_CHOICES
    assert set(NO_GRAPHS.values()) == {Backend.DISABLED}
