"""The smallest bucket is as large as the largest parameter of a real model, no more and no less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from rlsys.config.schema import Dtype
from rlsys.weights.bijection import WeightMap
from rlsys.weights.buckets import BucketFullError, pack_into
from rlsys.weights.families import architecture_of
from rlsys.weights.sizes import largest_tensor_bytes

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "vocabulary": Qwen2Config(vocab_size=501, intermediate_size=52, num_key_value_heads=2, **SIZES),
    "tied": LlamaConfig(
        vocab_size=501, intermediate_size=52, num_key_value_heads=2, tie_word_embeddings=True, **SIZES
    ),
    "gate and up": LlamaConfig(vocab_size=100, intermediate_size=301, num_key_value_heads=2, **SIZES),
    "query, key, value": Qwen3Config(
        vocab_size=100, intermediate_size=52, num_key_value_heads=6, head_dim=24, **SIZES
    ),
}


@pytest.mark.parametrize("dtype", list(Dtype), ids=str)
@pytest.mark.parametrize("largest", CONFIGS)
def test_every_parameter_fits_and_none_would_in_less(largest: str, dtype: Dtype, tmp_path: Path) -> None:
    config: PretrainedConfig = CONFIGS[largest]
    config.save_pretrained(tmp_path)
    size = largest_tensor_bytes(tmp_path, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    tensors = dict(model.named_parameters())
    weights = WeightMap(architecture_of(config))
    parameters = [weights.entry(name).hf for name in weights.stage_names(range(1), first=True, last=True)]
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


def test_it_needs_neither_torch_nor_defaults(tmp_path: Path) -> None:
    shape = {"hidden_size": 10, "num_attention_heads": 5, "intermediate_size": 3, "vocab_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    script = (
        "import sys; from rlsys.config.schema import Dtype; from rlsys.weights.sizes import largest_tensor_bytes\n"
        f"print(largest_tensor_bytes({str(tmp_path)!r}, Dtype.float32), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # Query, key and value: 10 x 10 numbers of 4 bytes each, on multiples of 64.
    assert done.stdout.split() == [str(3 * 448), "False"]
