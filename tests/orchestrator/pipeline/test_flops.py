"""The formula against a count of the operations that transformers really carries out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from rlsys.trainer.batches import Flops, flops_of
from rlsys.weights.weight_map import architecture_of

CONFIG = Qwen3Config(
    vocab_size=70,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=20,
    attn_implementation="eager",
)


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_a_sequence_costs_what_a_forward_pass_computes(tokens: int) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long))
    counted = counter.get_flop_counts()["Global"]
    # The rotary table: an outer product of positions and frequencies, once for the whole model.
    counted = sum(counted.values()) - 2 * tokens * CONFIG.head_dim // 2
    flops = flops_of(architecture_of(CONFIG))
    # Eager attention computes the half above the diagonal too, and masks it.
    above = flops.per_square * tokens**2
    assert flops.of(tokens, targets=tokens) + above == counted


def test_terms_by_hand() -> None:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 2,
    }
    rest = {"intermediate_size": 6, "vocab_size": 10, "max_position_embeddings": 8, "rms_norm_eps": 1e-6}
    flops = flops_of(architecture_of({"model_type": "llama", **sizes, **rest}))
    # A layer: q 4x8, k and v 4x2, o 8x4, three matrices 4x6 = 152 parameters. Output: 4x10.
    assert flops == Flops(per_token=608.0, per_target=80.0, per_square=32.0)
    assert flops.of(3, 1) == 3 * 608 + 80 + 9 * 32
