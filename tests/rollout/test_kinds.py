"""Tests of the kinds of rollout.engine: keys, refusals, and the facts that plans and checks ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.cluster.planning.memory import GIB, engine_weights_bytes, group_memory, kv_cache_tokens, kv_token_bytes
from rlsys.config.compose import PROJECT_CONFIGS
from rlsys.config.schema import SglangConfig, TransformersConfig
from rlsys.orchestrator.validate import find_problems
from rlsys.rollout.kinds import engine_class
from rlsys.weights.weight_map import read_architecture
from tests.support import tiny_configs
from tests.support.composed import composed


@pytest.mark.parametrize(
    ("kind", "settings", "keys"),
    [
        ("sglang", ["rollout.engine.tp=2", "cluster.placement.rollout=2-3"], ["rollout.engine.tp"]),
        ("transformers", ["rollout.engine.tp=2", "cluster.placement.rollout=2-3"], ["rollout.engine.tp"]),
        ("transformers", ["trainer.schedule=async"], []),
        ("transformers", [], []),
    ],
)
def test_settings_that_an_engine_cannot_run_are_refused(kind: str, settings: list[str], keys: list[str]) -> None:
    problems = [*find_problems(composed(f"rollout.engine={kind}", *settings))]
    assert [problem.key for problem in problems if problem.key.startswith(("rollout.engine", "trainer"))] == keys


EXPERTS = PROJECT_CONFIGS / "model/shapes/qwen3-30b-a3b"


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ([], "mismatch"),
        ([f"model.path={EXPERTS}"], None),
        ([f"model.path={EXPERTS}", "rollout.engine=transformers"], None),
        ([f"model.path={EXPERTS}", "rollout.engine=examples.extend.engine.OneByOne"], "conflict"),
    ],
)
def test_replay_of_routes_needs_experts_and_an_engine_that_returns_them(settings: list[str], code: str | None) -> None:
    problems = find_problems(composed("algorithm.router_replay=r3", *settings))
    assert [one.code for one in problems if one.key == "algorithm.router_replay"] == [code] * (code is not None)


def test_shared_experts_and_latent_attention_have_neither_routes_to_replay_nor_adapters(tmp_path: Path) -> None:
    tiny_configs.deepseek().save_pretrained(tmp_path)
    config = composed(f"model.path={tmp_path}", "algorithm.router_replay=r3", "model.lora.rank=8")
    found = {problem.key: problem.code for problem in find_problems(config)}
    assert (found["algorithm.router_replay"], found["model.lora.rank"]) == ("unsupported", "unsupported")
    # In each of 3 layers, a token has a latent of 24 numbers, and 8 for its position.
    assert kv_token_bytes(config, read_architecture(tmp_path)) == 3 * (24 + 8) * 4


def test_plan_asks_the_engine_for_its_memory() -> None:
    settings = ["cluster.device=gpu", "cluster.device_memory_gib=10"]
    fast, slow = (
        composed(*settings, "rollout.engine.kv_cache_tokens=null"),
        composed(*settings, "rollout.engine=transformers"),
    )
    model = read_architecture(fast.model.path)
    weights, token = engine_weights_bytes(fast, model), kv_token_bytes(fast, model)
    assert kv_cache_tokens(fast, model) == pytest.approx((0.5 * 10 * GIB - weights) / token)
    assert kv_cache_tokens(slow, model) == 64 * slow.task.max_total_tokens
    assert "graphs" in group_memory(fast, model, "rollout").parts
    assert "graphs" not in group_memory(slow, model, "rollout").parts
    fixes = {type(one): engine_class(one).memory_fix(one) for one in (fast.rollout.engine, slow.rollout.engine)}
    assert "memory_fraction=0.5" in fixes[SglangConfig]
    assert "max_running=64" in fixes[TransformersConfig]
