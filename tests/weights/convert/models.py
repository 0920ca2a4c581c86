"""Tiny random models of each family, saved by transformers, and Megatron checkpoints of them, made by Megatron."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
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

from rlsys.weights.hf_io import SINGLE, HfReader
from tests.weights.ends import raw

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
    first, second = ({name: raw(tensor) for name, tensor in tensors_of(folder).items()} for folder in (one, other))
    assert first.keys() == second.keys()
    assert [name for name, content in first.items() if content != second[name]] == []


@torch.no_grad()
def logits_by_transformers(folder: Path, tokens: Tensor, critic: bool = False) -> Tensor:
    """Logits or values [row, token, vocabulary or 1] that transformers computes in float32."""
    kind = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), "every tensor is there, and no other"
    logits: Tensor = model.eval()(tokens).logits
    return logits


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    """Assert that float32 results of the same weights are equal but for rounding.

    Kernels may add in another order where operands lie at another alignment. Some 30 products of matrices follow one
    another in these models, of at most 96 terms each, so that rounding is below 30 x 96 x 2^-24 of the largest: 2e-4.
    """
    assert found.shape == expected.shape
    largest = expected.abs().max()
    assert largest > 0.1
    assert (found - expected).abs().max() < 30 * 96 * 2**-24 * largest


def moved(model: Path, out: Path, by: int) -> Path:
    """A copy of a model whose tensors lie `by` bytes further on in the file."""
    shutil.copytree(model, out)
    content = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * by
    (out / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return out


def json_of(path: Path) -> dict[str, object]:
    """A file of JSON."""
    content: dict[str, object] = json.loads(path.read_text())
    return content


def rewritten(model: Path, **changes: Tensor | None) -> Path:
    """The model with other tensors: `__` stands for a point, and None for none."""
    tensors = tensors_of(model) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, model / SINGLE, metadata={"format": "pt"})
    return model


def reconfigured(model: Path, **changes: object) -> Path:
    """The model with another config."""
    config = json_of(model / "config.json")
    (model / "config.json").write_text(json.dumps(config | changes))
    return model
