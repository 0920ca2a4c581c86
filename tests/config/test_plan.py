"""The plan's figures and docs/memory.md, against transformers' own count and numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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

from rlsys.cluster.planning.plan import MicroBatchLoad, count_parameters, group_memory, make_plan, render_plan
from rlsys.config.compose import load_config
from rlsys.config.schema import Layers, RunConfig
from rlsys.weights.weight_map import architecture_of, read_architecture
from scripts.memory_tables import PAGE, shape_of, with_tables

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


def test_groups_and_batches_by_hand(tiny_run: TinyRun) -> None:
    plan = make_plan(
        tiny_run(
            "cluster.placement={actor: 0-3, inference: 4-5, rollout: 6-8}",
            "actor.parallel.tp=2",
            "inference.parallel.pp=2",
            "trainer.steps=20",
        )
    )
    actor, inference, rollout = (plan["groups"][name] for name in ("actor", "inference", "rollout"))
    assert plan["world_size"] == 9
    assert actor["ranks"] == [0, 1, 2, 3]
    assert [actor[size] for size in ("tp", "pp", "cp", "dp")] == [2, 1, 1, 2]
    assert (inference["pp"], inference["dp"]) == (2, 1)
    assert (rollout["engines"], rollout["tp"]) == (3, 1)
    assert plan["batch"] == {
        "prompts_per_step": 32,
        "episodes_per_step": 256,
        "episodes_per_update": [64],
        "updates": 80,
    }
    uneven = make_plan(tiny_run("trainer.mini_batches=10", "trainer.steps=20"))
    assert (uneven["batch"]["episodes_per_update"], uneven["batch"]["updates"]) == ([3 * 8, 4 * 8], 200)
    assert "24 or 32" in render_plan(uneven)


def test_an_engines_memory_by_hand(tiny_run: TinyRun) -> None:
    rollout = make_plan(tiny_run("rollout.engine.kv_cache_tokens=1000000"))
    cache = 1_000_000 * 4 * 2 * (2 * 16) * 4  # tokens, layers, key and value, 2 heads of 16, float32
    held = rollout["model"]["parameters"] * 4 + cache
    assert rollout["groups"]["rollout"]["memory_gib_per_rank"] == pytest.approx(held / 2**30, abs=1e-4)


def test_the_page_is_what_the_experiments_say() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run python scripts/memory_tables.py"


def test_a_3b_actor_by_hand() -> None:
    """Transformer Engine, recomputation, DP 4; 3,085,938,688 parameters, of which the embedding is tied."""
    config = load_config("searchr1_qwen2.5_3b_1node")
    config.model.layers = Layers.te
    model = read_architecture(shape_of(config.model.path))
    tokens, hidden, vocab, parameters = 16384, 2048, 151936, 3_085_938_688
    load = MicroBatchLoad(tokens, targets=1000, width=tokens)
    found = group_memory(config, model, "actor", load).parts
    assert found["parameters"] == 2 * parameters
    assert found["gradients"] == 4 * parameters
    assert found["optimizer"] == 12 * parameters / 4
    # Each layer's input, the rounded-off final norm's output left to the head's targets; 4 bytes of 1/rms a token.
    assert found["activations"] == pytest.approx(36 * tokens * hidden * 2 + tokens * (2 * hidden + 4))
    # Logits, their gradient, and four pieces of 128 MiB.
    assert found["logits"] == 1000 * (2 * 2 * vocab + 2 * hidden) + 4 * 128 * 2**20


def test_activations_of_a_te_layer_by_hand() -> None:
    """One layer more keeps: of both norms input, output and 4 bytes of 1/rms; of attention queries, keys, values, output
    and 4 bytes of each head's softmax; of the MLP gate, up and their product. 16 heads and 2 key heads of 128."""
    config = load_config("searchr1_qwen2.5_3b_1node")
    config.model.layers, config.model.recompute = Layers.te, False
    model = read_architecture(shape_of(config.model.path))
    load = MicroBatchLoad(1000, targets=10, width=1000)
    layers = (model.layers, model.layers + 1)
    less, more = (group_memory(config, replace(model, layers=n), "actor", load) for n in layers)
    by_hand = 2 * (2 * 2 * 2048 + 4) + 2 * (2048 + 2 * 256 + 2048) + 4 * 16 + 2 * 3 * 11008
    assert more.parts["activations"] - less.parts["activations"] == pytest.approx(1000 * by_hand)
