"""Families against transformers itself: what it reads from a config, and which tensors it writes."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlsys.errors import UserError
from rlsys.trainer.model.stage_model import inverse_frequencies
from rlsys.weights.weight_map import (
    Architecture,
    RopeScaling,
    ShardLoader,
    WeightMap,
    architecture_of,
    family_names,
    read_architecture,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_7B = QWEN_1_5B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
LLAMA_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN3_0_6B = QWEN_1_5B | {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = QWEN3_0_6B | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
PUBLISHED = {
    "DeepSeek-R1-Distill-Qwen-1.5B": (QWEN_1_5B, 1_777_088_000),
    "DeepSeek-R1-Distill-Qwen-7B": (QWEN_7B, 7_615_616_512),
    "DeepSeek-R1-Distill-Llama-8B": (LLAMA_8B, 8_030_261_248),
    "Qwen3-0.6B": (QWEN3_0_6B, 596_049_920),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
}
"""What these models publish as config.json, and how many parameters they have."""
NEEDED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
}
"""Without these transformers would take the sizes of some model, as good as none."""
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
TINY: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama without groups": LlamaConfig(**SIZES | {"num_key_value_heads": None}),
    "llama 3.1": LlamaConfig(**SIZES, rope_parameters=LLAMA3 | {"rope_theta": 5e5}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=6),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=6),
}


def of_transformers(config: PretrainedConfig) -> dict[str, Any]:
    """What a model that transformers builds of a config computes with, by the name of our field."""
    rope = config.rope_parameters
    moe = config.model_type == "qwen3_moe"
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "max_positions": config.max_position_embeddings,
        "rope": RopeScaling(8.0, 1.0, 4.0, 8192) if rope["rope_type"] == "llama3" else None,
        "experts": config.num_experts if moe else 0,
        "experts_per_token": config.num_experts_per_tok if moe else 0,
        "expert_ffn": config.moe_intermediate_size if moe else 0,
        "norm_topk": moe and config.norm_topk_prob,
    }


def written(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a folder."""
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


def mapped(weights: WeightMap) -> dict[str, tuple[int, ...]]:
    """The same by the map."""
    entries = weights.entries()
    return {hf: shape for entry in entries for hf, shape in zip(entry.hf, entry.rule.shapes, strict=True)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_whole(name: str, tmp_path: Path) -> None:
    config, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(tmp_path)
    for field, value in of_transformers(AutoConfig.from_pretrained(tmp_path)).items():
        assert getattr(architecture, field) == value, field
    assert sum(map(prod, mapped(WeightMap(architecture)).values())) == parameters


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", TINY)
def test_a_model_has_the_tensors_that_transformers_writes(model: str, tied: bool, tmp_path: Path) -> None:
    config = type(TINY[model])(**TINY[model].to_dict() | {"tie_word_embeddings": tied})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    assert architecture == architecture_of(config)
    for field, value in of_transformers(config).items():
        assert getattr(architecture, field) == value, field
    weights = WeightMap(architecture)
    assert mapped(weights) == written(tmp_path)
    assert weights.hf_names() == written(tmp_path).keys()


@pytest.mark.parametrize("model", ["llama 3.1", "qwen2", "qwen3", "qwen3_moe"])
def test_a_critic_has_the_tensors_that_transformers_writes(model: str, tmp_path: Path) -> None:
    config = type(TINY[model])(**TINY[model].to_dict() | {"num_labels": 1})
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    weights = WeightMap(read_architecture(tmp_path), values=True)
    assert mapped(weights) == written(tmp_path)
    weights.check_hf_names(set(written(tmp_path)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_config_leaves_out_means_what_it_means_to_transformers(name: str) -> None:
    config = PUBLISHED[name][0]
    for key in config.keys() - {"model_type"}:
        rest = {other: value for other, value in config.items() if other != key}
        if key in NEEDED or (key == "num_key_value_heads" and config["model_type"] != "llama"):
            with pytest.raises(UserError, match=f"^{key} is missing"):
                architecture_of(rest)
        else:
            architecture = architecture_of(rest)
            for field, value in of_transformers(AutoConfig.for_model(**rest)).items():
                assert getattr(architecture, field) == value, f"{field} without {key}"


@given(
    head_dim=st.integers(1, 96).map(lambda half: 2 * half),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1.0, 64.0),
    low=st.floats(0.5, 2.0),
    width=st.floats(0.5, 8.0),
    original=st.integers(16, 8192),
)
def test_frequencies_are_those_of_transformers_to_the_last_bit(
    head_dim: int, theta: float, factor: float, low: float, width: float, original: int
) -> None:
    rope = LLAMA3 | {"rope_theta": theta, "factor": factor, "low_freq_factor": low}
    rope |= {"high_freq_factor": low + width, "original_max_position_embeddings": original}
    for parameters in (rope, {"rope_type": "default", "rope_theta": theta}):
        sizes = SIZES | {"max_position_embeddings": 2**20, "head_dim": head_dim}
        config = LlamaConfig(**sizes, rope_parameters=parameters)
        expected = LlamaRotaryEmbedding(config).inv_freq
        found = inverse_frequencies(architecture_of(config))
        assert found.shape == (head_dim // 2,)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("config", "change", "sentence"),
    [
        (QWEN_7B, {"model_type": "gpt2"}, "model_type is gpt2.*use one of llama, qwen2, qwen3, qwen3_moe"),
        (QWEN_7B, {"use_sliding_window": True}, "use_sliding_window is true, which means .*window"),
        (QWEN_7B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is yarn"),
        (LLAMA_8B, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_type is linear"),
        (LLAMA_8B, {"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        (LLAMA_8B, {"attention_bias": True}, "attention_bias is true.*output projection"),
        (LLAMA_8B, {"mlp_bias": True}, "mlp_bias is true"),
        (LLAMA_8B, {"hidden_act": "gelu"}, "hidden_act is gelu.*only silu is"),
        (LLAMA_8B, {"quantization_config": {"bits": 4}}, "quantised weights.*leaving it out"),
        (LLAMA_8B, {"vocab_size": "many"}, "vocab_size is many; give a number"),
        (QWEN3_0_6B, {"num_hidden_layers": None}, "num_hidden_layers is missing; copy config.json"),
        (
            QWEN3_30B_A3B,
            {"mlp_only_layers": [0, 1]},
            r"mlp_only_layers is \[0, 1\], which means dense layers",
        ),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, which means dense layers"),
        (QWEN3_30B_A3B, {"shared_expert_intermediate_size": 8}, "an expert that all tokens share"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(
    config: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        architecture_of(config | change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; give a number of at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"hidden_size": float("inf")}, "hidden_size is Infinity"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 5}, "5 for keys and values, .* do not divide"),
        ({"num_attention_heads": 2**20, "num_key_value_heads": 1, "head_dim": None}, "do not divide"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; give a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is yes; give true or false"),
        ({"rope_scaling": "yarn"}, "rope_scaling is yarn; give an object"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; give an object"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, Any], sentence: str) -> None:
    for weights_only in (False, True):
        with pytest.raises(UserError, match=sentence):
            architecture_of(QWEN_7B | change, weights_only=weights_only)


def test_where_the_weights_alone_matter_what_is_computed_of_them_does_not() -> None:
    yarn = QWEN_7B | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(UserError, match="rope_type is yarn"):
        architecture_of(yarn)
    assert architecture_of(yarn, weights_only=True) == architecture_of(QWEN_7B)
    with pytest.raises(UserError, match="quantised weights"):
        architecture_of(yarn | {"quantization_config": {"bits": 4}}, weights_only=True)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("{", " is not JSON"),
        ("[]", ": model_type is None, which is not supported; use one of llama, "),
        pytest.param("[" * 200_000, " is not JSON", id="deep"),
        ('{"model_type": "gpt2"}', ": model_type is gpt2, which is not supported; use one of llama, "),
        ('{"model_type": "llama"}', ": num_hidden_layers is missing; copy config.json"),
        ('{"model_type": "llama", "rope_scaling": 4}', ": rope_scaling is 4; give an object"),
    ],
)
def test_a_config_that_is_refused_is_named(tmp_path: Path, content: str, wrong: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(UserError) as refused:
        read_architecture(tmp_path)
    assert str(refused.value).startswith(f"{file}{wrong}")


MISTRAL = """
extends: _decoder
only:
  sliding_window: {values: [], else: attention within a sliding window}
"""
RENAMED = """
extends: llama
config:
  layers: n_layer
tensors:
  decoder.final_layernorm.weight:
    cut: whole
    hf:
      transformer.ln_f.weight: [hidden]
  decoder.layers.{layer}.self_attention.q_layernorm.weight: null
  decoder.layers.{layer}.mlp.linear_fc2.weight:
    cut: rows
    hf:
      transformer.h.{layer}.wo: [ffn, 2]
"""


def test_a_family_is_one_file(tmp_path: Path) -> None:
    """A family that rlsys does not have, from its file to a model of transformers and back."""
    families, model = tmp_path / "families", tmp_path / "model"
    families.mkdir()
    config = MistralConfig(**SIZES, head_dim=6, sliding_window=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    with pytest.raises(UserError, match="model_type is mistral"):
        read_architecture(model)
    (families / "mistral.yaml").write_text(MISTRAL)
    architecture = read_architecture(model, families)
    weights = WeightMap(architecture, folder=families)
    assert mapped(weights) == written(model)
    tensors = load_file(model / "model.safetensors")
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    names = [entry.name for entry in weights.entries()]
    for rank, held in enumerate(shards):
        loader = ShardLoader(weights, names, rank, 2, held.__setitem__)
        for name, tensor in tensors.items():
            loader.feed(name, tensor)
    merged = [weights.merge(weights.entry(name), [held[name] for held in shards]) for name in names]
    back = dict(pair for pairs in merged for pair in pairs)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(UserError, match="sliding_window is 4096"):
        architecture_of(MistralConfig(**SIZES, sliding_window=4096), families)
    assert family_names(families) == sorted([*family_names(), "mistral"])


def test_a_family_says_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(RENAMED)
    keys = {key: value for key, value in LLAMA_8B.items() if key != "num_hidden_layers"}
    other = architecture_of(keys | {"model_type": "other", "n_layer": 32}, tmp_path)
    llama = architecture_of(LLAMA_8B)
    assert {**_fields(other), "family": "llama"} == _fields(llama)
    names = WeightMap(other, folder=tmp_path).hf_names()
    down = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(32)}
    renamed = {f"transformer.h.{layer}.wo" for layer in range(32)} | {"transformer.ln_f.weight"}
    assert names == WeightMap(llama).hf_names() - down - {"model.norm.weight"} | renamed
    weights = WeightMap(other, folder=tmp_path)
    entry = weights.entry("decoder.layers.7.mlp.linear_fc2.weight")
    assert entry.rule.shapes == ((14336, 2),)
    assert torch.equal(weights.shard(entry, [torch.arange(8).view(4, 2)], 1, 2), torch.tensor([[4, 5], [6, 7]]))


def _fields(architecture: Architecture) -> dict[str, Any]:
    return {name: getattr(architecture, name) for name in Architecture.__slots__}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("config: {layers_of_it: n}", "layers_of_it"),
        ("sizes: {}", "sizes"),
        ("only: {hidden_act: {values: [silu]}}", "hidden_act: else"),
        ("tensors: {a.b: {cut: diagonal, hf: {c: [hidden]}}}", "a.b: diagonal"),
        ("tensors: {a.b: {cut: rows, hf: {c: [width]}}}", "a.b: width"),
        ("tensors: {a.b: {cut: rows, hf: {c: [hidden]}, when: tuesday}}", "a.b: tuesday"),
        ("tensors: {a.b: {cut: rows, hf: {c: [hidden]}, alias: d}}", "a.b: alias"),
    ],
)
def test_a_word_without_meaning_in_a_family_is_pointed_at(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(f"extends: _decoder\n{text}\n")
    with pytest.raises(ValueError, match=f"other.yaml says {word}, which has no meaning"):
        architecture_of(LLAMA_8B | {"model_type": "other"}, tmp_path)
