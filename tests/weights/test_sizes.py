"""The smallest bucket is as large as the largest parameter of a real model, no more and no less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlsys.config.schema import Dtype
from rlsys.weights.transport import BucketFullError, pack_into
from rlsys.weights.weight_map import WeightMap, architecture_of, largest_tensor_bytes

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "vocabulary": Qwen2Config(vocab_size=501, intermediate_size=52, num_key_value_heads=2, **SIZES),
    "tied": LlamaConfig(vocab_size=501, intermediate_size=52, num_key_value_heads=2, tie_word_embeddings=True, **SIZES),
    "gate and up": LlamaConfig(vocab_size=100, intermediate_size=301, num_key_value_heads=2, **SIZES),
    "query, key, value": Qwen3Config(vocab_size=100, intermediate_size=52, num_key_value_heads=6, head_dim=24, **SIZES),
    "gate and up of an expert": Qwen3MoeConfig(
        vocab_size=100,
        intermediate_size=999,
        moe_intermediate_size=301,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        **SIZES,
    ),
}


@pytest.mark.parametrize("dtype", list(Dtype), ids=str)
@pytest.mark.parametrize("largest", CONFIGS)
def test_every_parameter_fits_and_none_would_in_less(largest: str, dtype: Dtype, tmp_path: Path) -> None:
    config: PretrainedConfig = CONFIGS[largest]
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    size = largest_tensor_bytes(tmp_path, dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    parameters = [entry.hf for entry in WeightMap(architecture_of(config)).entries()]
    assert {name for parts in parameters for name in parts} == set(tensors)
    room = torch.empty(size, dtype=torch.uint8).numpy()
    full = 0
    for parts in parameters:
        bucket = pack_into(room, [(name, tensors[name]) for name in parts])
        try:
            # What is left over of the last tensor's alignment does not count.
            pack_into(room[: size - 64], [(name, tensors[name]) for name in parts])
        except BucketFullError:
            full += 1
        assert len(bucket.records) == len(parts)
    assert full >= 1


def test_it_needs_no_torch(tmp_path: Path) -> None:
    shape = {
        "model_type": "llama",
        "hidden_size": 10,
        "num_attention_heads": 5,
        "num_hidden_layers": 1,
        "intermediate_size": 3,
        "vocab_size": 4,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    script = (
        "import sys; from rlsys.config.schema import Dtype; from rlsys.weights.weight_map import largest_tensor_bytes\n"
        f"print(largest_tensor_bytes({str(tmp_path)!r}, Dtype.float32), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # Query, key and value: 10 x 10 numbers of 4 bytes each, on multiples of 64.
    assert done.stdout.split() == [str(3 * 448), "False"]
