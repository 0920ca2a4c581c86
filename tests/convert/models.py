"""Tiny random models of each family, saved by transformers, and Megatron checkpoints of them, made by Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlsys.weights.hf_io import HfReader

_SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def configs(layers: int = 3) -> dict[str, PretrainedConfig]:
    """Each family, tied and not."""
    sizes = {**_SIZES, "num_hidden_layers": layers}
    return {
        "llama": LlamaConfig(**sizes, rope_parameters=_LLAMA3, tie_word_embeddings=False),
        "llama-tied": LlamaConfig(**sizes, rope_parameters=_LLAMA3, tie_word_embeddings=True),
        "qwen2": Qwen2Config(**sizes, tie_word_embeddings=False),
        "qwen2-tied": Qwen2Config(**sizes, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**sizes, head_dim=24, tie_word_embeddings=False),
        "qwen3-moe": Qwen3MoeConfig(
            **sizes, head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
    }


def make_model(
    folder: Path,
    family: str = "qwen2",
    dtype: torch.dtype = torch.bfloat16,
    critic: bool = False,
    tokenizer: bool = True,
    shard_size: str = "5GB",
    seed: int = 0,
    layers: int = 3,
) -> Path:
    """A random model whose norms and biases are random too, with a tokenizer's file."""
    torch.manual_seed(seed)
    config = configs(layers)[family]
    if critic:
        config.num_labels = 1
        model = AutoModelForTokenClassification.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1.0 + 0.1 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        (folder / "tokenizer.json").write_text('{"hello": 1}')
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder."""
    reader = HfReader(folder)
    return {name: reader.get(name) for name in reader.names()}


def assert_same_tensors(one: Path, other: Path) -> None:
    """Bit for bit, dtypes too."""
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def json_of(path: Path) -> dict[str, object]:
    """A file of JSON."""
    content: dict[str, object] = json.loads(path.read_text())
    return content
