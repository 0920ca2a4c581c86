"""Test of the operations of a sequence against the operations that torch counts."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import architecture_of


def test_cost_of_a_sequence_is_that_of_a_forward_pass_of_transformers() -> None:
    config = Qwen3Config(
        vocab_size=70,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
        attn_implementation="eager",
    )
    model, flops = AutoModelForCausalLM.from_config(config), flops_of(architecture_of(config))
    for tokens in (1, 64):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.long))
        # Leave out the rotary table, an outer product of positions and frequencies that is computed once per model.
        counted = sum(counter.get_flop_counts()["Global"].values()) - 2 * tokens * config.head_dim // 2
        # Eager attention also computes the half above the diagonal, which it then masks.
        assert flops.of(tokens, targets=tokens) + flops.per_square * tokens**2 == counted
