"""The plan's figures, against transformers' own count and numbers worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from typer.testing import CliRunner

from rlsys.apps.cli.main import app
from rlsys.cluster.planning.plan import count_parameters, make_plan, render_plan
from rlsys.config.schema import RunConfig
from rlsys.weights.weight_map import architecture_of

TinyRun = Callable[..., RunConfig]
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 130,
}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=True)),
        (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=False)),
        (Qwen2ForCausalLM, Qwen2Config(**{**SMALL, "num_key_value_heads": 6}, tie_word_embeddings=True)),
        (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=False)),
        (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
        (LlamaForCausalLM, LlamaConfig(**SMALL, head_dim=16, tie_word_embeddings=False)),
        (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
        ),
    ],
)
def test_the_count_is_that_of_the_real_model(model: type, config: PretrainedConfig) -> None:
    # `num_parameters` counts a tied tensor once.
    assert count_parameters(architecture_of(config)) == model(config).num_parameters()


def test_the_count_of_the_published_model() -> None:
    """Qwen2.5-3B: 3.09 billion parameters, 2.77 without embeddings, says its model card."""
    shape = {
        "model_type": "qwen2",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }
    assert round(count_parameters(architecture_of(shape)) / 1e9, 2) == 3.09
    assert round((count_parameters(architecture_of(shape)) - 151936 * 2048) / 1e9, 2) == 2.77


def test_groups_and_batches_by_hand(tiny_run: TinyRun) -> None:
    plan = make_plan(
        tiny_run(
            "cluster.placement={actor: 0-3, inference: 4-5, rollout: 6-8}",
            "actor.parallel.tp=2",
            "inference.parallel.pp=2",
            "trainer.steps=20",
        )
    )
    assert plan["world_size"] == 9
    assert {key: plan["groups"]["actor"][key] for key in ("ranks", "tp", "pp", "cp", "dp")} == {
        "ranks": [0, 1, 2, 3],
        "tp": 2,
        "pp": 1,
        "cp": 1,
        "dp": 2,
    }
    assert (plan["groups"]["inference"]["pp"], plan["groups"]["inference"]["dp"]) == (2, 1)
    assert (plan["groups"]["rollout"]["engines"], plan["groups"]["rollout"]["tp"]) == (3, 1)
    assert plan["batch"] == {
        "prompts_per_step": 32,
        "episodes_per_step": 256,
        "episodes_per_update": [64],
        "updates": 80,
    }


def test_uneven_mini_batches_have_two_sizes(tiny_run: TinyRun) -> None:
    """10 of 32 questions, 8 episodes each."""
    plan = make_plan(tiny_run("trainer.mini_batches=10", "trainer.steps=20"))
    assert plan["batch"]["episodes_per_update"] == [3 * 8, 4 * 8]
    assert plan["batch"]["updates"] == 200
    assert "24 or 32 to an optimiser step" in render_plan(plan)


def test_memory_by_hand(tiny_run: TinyRun) -> None:
    """Float32, DP 4: weights, gradients, and two moments in four shards; the total is of parts, not all at once."""
    plan = make_plan(
        tiny_run(
            "cluster.placement={actor: 0-3, inference: 4, rollout: 5}",
            "rollout.engine.kv_cache_tokens=1000000",
        )
    )
    count, gib = plan["model"]["parameters"], 2**30
    actor, inference, rollout = (plan["groups"][name] for name in ("actor", "inference", "rollout"))
    # The embedding is padded from 320 to 384 tokens.
    held = count + 64 * 64
    always = {"parameters": held * 4, "gradients": held * 4, "optimizer": held * 8 / 4}
    for part, size in always.items():
        assert actor["memory_gib"][part] == pytest.approx(size / gib, abs=1e-4)
    passing = actor["memory_gib"]["activations"] + max(actor["memory_gib"]["logits"], actor["memory_gib"]["backward"])
    assert actor["memory_gib_per_rank"] == pytest.approx(sum(always.values()) / gib + passing, abs=1e-3)
    assert inference["memory_gib"]["reference"] == pytest.approx(held * 4 / gib, abs=1e-4)
    cache = 1_000_000 * 4 * 2 * (2 * 16) * 4  # tokens, layers, key and value, 2 heads of 16, float32
    assert rollout["memory_gib_per_rank"] == pytest.approx((count * 4 + cache) / gib, abs=1e-4)


def test_the_text_shows_every_group(tiny_run: TinyRun) -> None:
    lines = render_plan(make_plan(tiny_run())).splitlines()
    for group, rank in (("actor", "0"), ("inference", "1"), ("rollout", "2")):
        (line,) = [line for line in lines if line.strip().startswith(group)]
        assert f"ranks {rank}:" in line
        assert "GiB" in line


def test_a_dry_run_prints_the_plan_as_json(tiny_run: TinyRun, files: list[str]) -> None:
    arguments = ["train", "-c", "searchr1_tiny_cpu", "--dry-run", "--json", *files]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    plan = make_plan(tiny_run())
    assert json.loads(result.stdout) == plan


def test_the_installed_command_prints_the_same_plan(tiny_run: TinyRun, files: list[str]) -> None:
    arguments = ["train", "--config-name", "searchr1_tiny_cpu", "--dry-run", "--json", *files]
    done = subprocess.run(
        [sys.executable, "-m", "rlsys.apps.cli.main", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == make_plan(tiny_run())
