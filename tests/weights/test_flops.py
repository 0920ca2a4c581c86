"""Test of the operations of a sequence against the operations that torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    GptOssConfig,
    PretrainedConfig,
    Qwen3Config,
)

from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import architecture_of

SIZES = {
    "vocab_size": 70,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "attn_implementation": "eager",
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "experts_implementation": "eager",
}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "rotary_tables", "routers"),
    [
        (Qwen3Config(**SIZES), 1, 0),
        (Gemma3TextConfig(**SIZES, layer_types=KINDS, pad_token_id=None), 2, 0),
        (DeepseekV2Config(**SIZES | LATENT), 1, 2),
        (DeepseekV2Config(**SIZES | LATENT | {"q_lora_rank": 20}), 1, 2),
        (GptOssConfig(**SIZES, layer_types=KINDS, num_local_experts=6, experts_implementation="eager"), 1, len(KINDS)),
    ],
    ids=["qwen3", "gemma3", "deepseek_v2", "deepseek_v2, latent queries", "gpt-oss"],
)
def test_cost_of_a_sequence_is_that_of_a_forward_pass_of_transformers(
    config: PretrainedConfig, rotary_tables: int, routers: int
) -> None:
    """A sequence as long as the window has the same cost with and without it."""
    model, flops = AutoModelForCausalLM.from_config(config), flops_of(architecture_of(config))
    for tokens in (1, 64):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.long))
        # Leave out the rotary tables, outer products of positions and frequencies that are computed once per model.
        tables = rotary_tables * 2 * tokens * config.head_dim // 2
        if routers:  # Neglected, as they are in `Flops`.
            experts = architecture_of(config).experts
            tables += routers * 2 * tokens * config.hidden_size * experts
        counted = sum(counter.get_flop_counts()["Global"].values()) - tables
        # Eager attention also computes the half above the diagonal, which it then masks.
        squares = flops.per_square + flops.per_local_square
        assert flops.of(tokens, targets=tokens) + squares * tokens**2 == counted


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 200])
def test_cost_of_attention_is_that_of_the_pairs_of_tokens_that_see_each_other(tokens: int) -> None:
    flops = flops_of(architecture_of(Gemma3TextConfig(**SIZES, layer_types=KINDS, sliding_window=16)))
    position = torch.arange(tokens)
    distance = position[:, None] - position
    seen, near = ((distance >= 0) & (distance < limit) for limit in (tokens, 16))
    # A token counts as half a pair with itself; one pair is 2 operations for its score and 2 for its value.
    pairs = int(seen.sum()) - tokens / 2 + 2 * (int(near.sum()) - min(tokens, 16) / 2)
    attention = flops.of(tokens, 0) - flops.of(0, 0) - flops.per_token * tokens
    assert attention == 4 * 4 * 20 * pairs
