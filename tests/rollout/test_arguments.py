"""Tests of SGLang's arguments for a CPU and a GPU, and of settings that are refused before a start."""

from __future__ import annotations

import asyncio
import importlib
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import DeepseekV2Config, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from rlsys.cluster.worker_group import NCCL_SETTINGS
from rlsys.config.schema import Device, RolloutConfig, SamplingConfig, SearchConfig, SglangConfig, TaskConfig
from rlsys.errors import Code
from rlsys.rollout import sglang_cpu
from rlsys.rollout.agent.recorder import OnTokens, TurnSampling, evaluation_sampling
from rlsys.rollout.interface import EngineError, EngineSetup
from rlsys.rollout.sglang_engine import SglangEngine
from rlsys.rollout.worker import RolloutWorker
from tests.support import tiny
from tests.support.refusals import refused
from tests.support.tiny_models import POLICY

EXPERTS = Qwen3MoeConfig()
CONFIG = SglangConfig(tp=2, memory_fraction=0.6, max_running=300)
MOST_IN_GRAPH = "cuda_graph_max_bs_decode"
NO_GRAPHS = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}


def arguments(
    folder: Path, model: PretrainedConfig, config: SglangConfig, device: Device, memory_saver: bool = False
) -> dict[str, Any]:
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    frees_memory = memory_saver and device is Device.gpu
    return SglangEngine(EngineSetup(str(folder), model, 0, device, config, 3, frees_memory))._arguments()


@pytest.mark.parametrize("mixture", [EXPERTS, DeepseekV2Config(n_routed_experts=64)], ids=lambda one: one.model_type)
def test_backends_are_sglangs_defaults_on_a_gpu_except_for_experts(tmp_path: Path, mixture: PretrainedConfig) -> None:
    dense = arguments(tmp_path / "dense", Qwen2Config(), CONFIG, Device.gpu)
    assert (dense["tp_size"], dense["mem_fraction_static"], dense["random_seed"]) == (2, 0.6, 3)
    chosen = {"device", "attention_backend", "moe_runner_backend", "enable_memory_saver", *NO_GRAPHS}
    # SGLang's graphs of prefills may compute silently wrong (sglang#37606).
    assert {name: dense[name] for name in chosen & dense.keys()} == {"cuda_graph_backend_prefill": "disabled"}
    # The expected hashes assume that an expert's rows stay in the order sent: gate, then up.
    experts = arguments(tmp_path / "experts", mixture, CONFIG, Device.gpu)
    assert experts == {**dense, "model_path": experts["model_path"], "moe_runner_backend": "triton"}
    assert experts.pop(MOST_IN_GRAPH) == CONFIG.max_running, "the largest batch must not decode without a graph"
    setup = EngineSetup(str(tmp_path / "experts"), mixture, 0, Device.gpu, CONFIG, 3, False, None, returns_routes=True)
    assert SglangEngine(setup)._arguments() == {
        **experts,
        MOST_IN_GRAPH: CONFIG.max_running,
        "enable_return_routed_experts": True,
    }
    no_graphs = replace(CONFIG, cuda_graphs=False)
    assert arguments(tmp_path / "experts", mixture, no_graphs, Device.gpu) == {**experts, **NO_GRAPHS}
    on_cpu = arguments(tmp_path / "experts", mixture, no_graphs, Device.cpu, memory_saver=True)
    assert {name: on_cpu[name] for name in chosen & on_cpu.keys()} == {
        "device": "cpu",
        "attention_backend": "torch_native",
    }


@pytest.mark.engine
def test_sglang_has_every_argument_and_value(tmp_path: Path) -> None:
    sglang_cpu.prepare(Device.cpu)
    import msgspec
    from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in msgspec.structs.fields(ServerArgs)}
    for device, graphs in product(Device, (False, True)):
        config = replace(CONFIG, cuda_graphs=graphs, attention_backend="fa3")
        given = arguments(tmp_path, EXPERTS, config, device, memory_saver=True)
        assert {*given, "enable_return_routed_experts"} <= known
    assert "triton" in MOE_RUNNER_BACKEND_CHOICES
    assert set(NO_GRAPHS.values()) == {Backend.DISABLED}


@pytest.mark.engine
def test_loop_from_before_sglang_can_start_programs() -> None:
    """Agents and MCP servers are such programs. SGLang's modules set a policy under which asyncio's loops cannot."""

    async def started() -> int:
        sglang_cpu.prepare(Device.cpu)
        importlib.import_module("rlsys.rollout.sglang_process")
        return await (await asyncio.create_subprocess_exec("true")).wait()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        assert runner.run(started()) == 0


@pytest.mark.engine
@pytest.mark.parametrize("nvls", ["0", "1"])
def test_sglang_keeps_the_nccl_settings_of_a_worker(nvls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_cpu.prepare(Device.cpu)
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import ServerArgs

    settings = NCCL_SETTINGS | {"NCCL_NVLS_ENABLE": nvls}
    monkeypatch.setattr(os, "environ", {**os.environ, **settings})
    monkeypatch.setattr(engine, "set_ulimit", lambda: None)
    monkeypatch.setattr(engine.mp, "set_start_method", lambda *_, **__: None)
    monkeypatch.setattr(engine.signal, "signal", lambda *_: None)
    engine._set_envs_and_config(ServerArgs(model_path=str(POLICY), device="cpu"))
    assert {name: os.environ[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("code", "key", "room", "search"),
    [
        ("out_of_range", "task.max_total_tokens", 1005, SearchConfig(url="http://127.0.0.1:1")),
        ("missing", "search.url", 1006, SearchConfig()),
        ("missing", "search.token_env", 1006, SearchConfig(url="http://127.0.0.1:1", token_env="RLSYS_NO_TOKEN_HERE")),
    ],
)
def test_worker_without_room_server_or_token_is_refused(code: Code, key: str, room: int, search: SearchConfig) -> None:
    rollout = RolloutConfig(engine=SglangConfig(kv_cache_tokens=room))
    task = TaskConfig(train_path="", eval_path="", max_total_tokens=1000)
    with refused(code, key):
        RolloutWorker(str(POLICY), rollout, task, search, Device.cpu, seed=0)


@pytest.mark.engine
@pytest.mark.parametrize(("context", "cache"), [(1006, 9999), (9999, 1006)])
def test_sglang_takes_every_input_of_the_longest_episode(
    context: int, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang_cpu.prepare(Device.cpu)
    from sglang.srt.managers import tp_worker
    from sglang.srt.managers.utils import validate_input_length

    monkeypatch.setattr(tp_worker, "get_schedule", Mock())
    worker = Mock(dllm_algorithm=None)
    worker.model_config.context_len = context
    worker.model_runner.effective_logical_max_total_num_tokens = cache
    worker.model_runner.token_to_kv_pool_allocator = None
    most = tp_worker.TpModelWorker.get_worker_info(worker)[5]
    room = min(context, cache) - SglangEngine.capabilities.reserved_tokens
    longest, longer = Mock(origin_input_ids=[0] * (room - 1)), Mock(origin_input_ids=[0] * room)
    assert validate_input_length(longest, most, False) is None
    assert validate_input_length(longer, most, False)


@pytest.mark.parametrize("on_tokens", [None, list], ids=["whole", "stream"])
async def test_reason_of_sglang_for_rejecting_a_request_is_the_engines(on_tokens: OnTokens | None) -> None:
    async def reject(**_: object) -> Any:
        raise ValueError("Input length (9 tokens) exceeds the maximum allowed length (3 tokens).")

    engine = SglangEngine(EngineSetup("model", EXPERTS, 0, Device.cpu, CONFIG, 3, False))
    engine._process = Mock(engine=Mock(async_generate=reject))
    with pytest.raises(EngineError, match="Input length"):
        await engine.generate([1] * 9, TurnSampling(0.0), "r", on_tokens)


def test_evaluation_samples_from_the_whole_vocabulary_unless_as_rollouts() -> None:
    rollouts = SamplingConfig(temperature=0.7, top_p=0.9, top_k=20, stop=["</a>"])
    assert evaluation_sampling(rollouts, 0.5, as_rollouts=False) == TurnSampling(0.5, 1.0, -1, ("</a>",))
    assert evaluation_sampling(rollouts, 0.0, as_rollouts=True) == TurnSampling(0.7, 0.9, 20, ("</a>",))
