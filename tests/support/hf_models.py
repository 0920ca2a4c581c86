"""Tiny random models of each family, saved by transformers, and functions to compare and change their folders."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PretrainedConfig

from rlsys.weights.hf_io import SINGLE, HfReader, with_attention_scale
from tests.support import tiny_configs
from tests.support.tensors import randomised, raw, save_model


def configs(layers: int = 3) -> dict[str, PretrainedConfig]:
    """Config of each family, with and without tied embeddings."""
    return {
        "deepseek-moe": tiny_configs.deepseek(layers),
        "deepseek-moe-yarn": tiny_configs.deepseek(layers, q_lora_rank=20, yarn=True),
        "gemma3": tiny_configs.gemma3(layers),
        "glm4": tiny_configs.glm4(layers),
        "gpt-oss": tiny_configs.gpt_oss(layers),
        "llama": tiny_configs.llama3(layers),
        "llama-tied": tiny_configs.llama3(layers, tied=True),
        "ministral": tiny_configs.ministral(layers),
        "mistral": tiny_configs.mistral(layers),
        "phi3": tiny_configs.phi3(layers),
        "qwen2": tiny_configs.qwen2(layers, tied=False),
        "qwen2-tied": tiny_configs.qwen2(layers),
        "qwen3": tiny_configs.qwen3(layers),
        "qwen3-moe": tiny_configs.qwen3_moe(layers),
    }


def make_model(
    folder: Path,
    family: str = "qwen2",
    dtype: torch.dtype = torch.bfloat16,
    critic: bool = False,
    shard_size: str = "5GB",
    layers: int = 3,
) -> Path:
    """Write a random model, with random norms and biases and a tokenizer file. Returns `folder`."""
    torch.manual_seed(0)
    config, kind = configs(layers)[family], AutoModelForCausalLM
    if critic:
        config.num_labels, kind = 1, AutoModelForTokenClassification
    save_model(randomised(kind.from_config(config, dtype=dtype)), folder, max_shard_size=shard_size)
    (folder / "tokenizer.json").write_text('{"hello": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def quantised(model: Path) -> Path:
    """Replace the experts' matrices of the gpt-oss `model` by random MXFP4, as published models have them."""
    tensors = load_file(model / SINGLE)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 125, shape, dtype=torch.uint8)
    save_file(tensors, model / SINGLE, metadata={"format": "pt"})
    return reconfigured(model, quantization_config={"quant_method": "mxfp4"})


def tensors_of(folder: Path) -> dict[str, Tensor]:
    reader = HfReader(folder)
    return {name: reader.get(name) for name in reader.names()}


def assert_same_tensors(one: Path, other: Path) -> None:
    """Assert that two folders hold the same tensors, bit for bit and of the same dtypes."""
    first, second = ({name: raw(tensor) for name, tensor in tensors_of(folder).items()} for folder in (one, other))
    assert first.keys() == second.keys()
    assert [name for name, content in first.items() if content != second[name]] == []


@torch.no_grad()
def logits_by_transformers(
    folder: Path, tokens: Tensor, critic: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits [row, token, vocabulary], or values [row, token, 1] of a critic; transformers computes them in `dtype`."""
    kind = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    model, report = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), "missing or unexpected tensors"
    logits: Tensor = with_attention_scale(model.eval())(tokens).logits.float()
    return logits


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    """Assert that float32 results of the same weights are equal up to rounding.

    Kernels may add in another order on another processor or at another alignment. The 5 layers have about 50
    consecutive matrix products of at most 96 terms each: rounding is below 50 x 96 x 2^-24 of the largest value.
    """
    assert found.shape == expected.shape
    largest = expected.abs().max()
    assert largest > 0.1
    assert (found - expected).abs().max() < 50 * 96 * 2**-24 * largest


def json_of(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text())
    return content


def rewritten(model: Path, **changes: Tensor | None) -> Path:
    """Replace tensors of `model`; `__` in an argument's name stands for a dot, and None removes the tensor."""
    tensors = tensors_of(model) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, model / SINGLE, metadata={"format": "pt"})
    return model


def reconfigured(model: Path, **changes: object) -> Path:
    """Replace keys of the config.json of `model`."""
    config = json_of(model / "config.json")
    (model / "config.json").write_text(json.dumps(config | changes))
    return model
