"""Tests of model families against transformers: config values, tensor names and shapes, refused configs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlsys.cluster.planning.memory import count_parameters
from rlsys.errors import Code
from rlsys.weights.family_file import family_names, unsupported_types
from rlsys.weights.weight_map import (
    RopeScaling,
    WeightMap,
    YarnScaling,
    architecture_of,
    read_architecture,
)
from tests.support.hf_models import configs, make_model
from tests.support.refusals import refused
from tests.trainer.reference import by_checkpoint_names
from tests.weights.published import (
    DEEPSEEK_V2_LITE,
    GEMMA3_1B,
    GPT_OSS_20B,
    LLAMA3,
    LLAMA_8B,
    MISTRAL_7B,
    MXFP4,
    PHI_4,
    PUBLISHED,
    QWEN3_30B_A3B,
    QWEN_7B,
)

WINDOWED = ("gemma3_text", "gpt_oss", "ministral", "mistral", "phi3")
"""Families whose models may have a sliding window."""
FREE = ("deepseek_v2", "llama", "phi3")
"""Families that have as many key-value heads as attention heads unless config.json says otherwise."""
NEEDED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_routed_experts", "n_shared_experts", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}
"""Required keys; the defaults of transformers for them are the sizes of some arbitrary model."""


def of_transformers(config: PretrainedConfig) -> dict[str, Any]:
    """Return the sizes and options of the model that transformers builds, keyed by the field names of `Architecture`."""
    rope = config.rope_parameters
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    window = config.sliding_window if config.model_type in WINDOWED else None
    latent = config.model_type == "deepseek_v2"
    sizes = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    oss = config.model_type == "gpt_oss"
    moe = config.model_type == "qwen3_moe" or oss
    experts = config.num_experts if moe else config.n_routed_experts if latent else 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim if latent else head_dim,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "max_positions": config.max_position_embeddings,
        "rotary_fraction": rope.get("partial_rotary_factor", 1.0),
        "window": window,
        "local_layers": tuple(n for n, kind in enumerate(kinds) if window and kind == "sliding_attention"),
        "local_rope_theta": local.get("rope_theta"),
        "query_scale": getattr(config, "query_pre_attn_scalar", None),
        "qkv_bias": config.attention_bias if config.model_type == "glm4" else config.model_type in ("qwen2", "gpt_oss"),
        "rope": _scaling(config, rope),
        "experts": experts,
        "experts_per_token": config.num_experts_per_tok if experts else 0,
        "expert_ffn": (config.intermediate_size if oss else config.moe_intermediate_size) if experts else 0,
        "norm_topk": oss or (moe and config.norm_topk_prob),
        "dense_layers": config.first_k_dense_replace if latent else 0,
        "shared_experts": config.n_shared_experts if latent else 0,
        "routed_scale": config.routed_scaling_factor if latent else 1.0,
    } | {size: getattr(config, size) for size in sizes if latent}


def _scaling(config: PretrainedConfig, rope: dict[str, Any]) -> RopeScaling | YarnScaling | None:
    if rope["rope_type"] == "yarn":
        keys = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        mscales = rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0)
        factor = ROPE_INIT_FUNCTIONS["yarn"](config, None)[1]
        return YarnScaling(*(rope[key] for key in keys), *mscales, rope.get("truncate", True), factor)
    return RopeScaling(8.0, 1.0, 4.0, 8192) if rope["rope_type"] == "llama3" else None


def ours(config: Any, names: dict[str, Any]) -> dict[str, Any]:
    """The fields in `names` of the architecture that rlsys reads from a config."""
    architecture = architecture_of(config)
    return {name: getattr(architecture, name) for name in names}


def written(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers wrote to a folder, those of stacked experts one by one."""
    tensors = by_checkpoint_names(load_file(folder / "model.safetensors").items())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def mapped(weights: WeightMap) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors in the weight map."""
    entries = weights.entries()
    return {hf: shape for entry in entries for hf, shape in zip(entry.hf, entry.rule.shapes, strict=True)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_like_transformers_with_any_key_left_out(name: str, tmp_path: Path) -> None:
    config, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = of_transformers(AutoConfig.from_pretrained(tmp_path))
    assert ours(config, expected) == expected
    assert sum(map(prod, mapped(WeightMap(read_architecture(tmp_path))).values())) == parameters
    assert count_parameters(read_architecture(tmp_path)) == parameters
    for key in config.keys() - {"model_type"}:
        rest = {other: value for other, value in config.items() if other != key}
        if key in NEEDED or (key == "num_key_value_heads" and config["model_type"] not in FREE):
            with refused("missing", key):
                architecture_of(rest)
        else:
            expected = of_transformers(AutoConfig.for_model(**rest))
            assert ours(rest, expected) == expected, f"without {key}"


@pytest.mark.parametrize(
    ("family", "critic"), [*((family, False) for family in configs()), ("llama-tied", True), ("qwen3-moe", True)]
)
def test_weight_map_lists_the_tensors_that_transformers_writes(family: str, critic: bool, tmp_path: Path) -> None:
    make_model(tmp_path, family, critic=critic)
    config = configs()[family]
    architecture = read_architecture(tmp_path)
    assert architecture == architecture_of(config)
    weights = WeightMap(architecture, values=critic)
    assert mapped(weights) == written(tmp_path)
    weights.check_hf_names(set(written(tmp_path)))


@pytest.mark.parametrize(
    ("config", "change", "code", "key"),
    [
        (QWEN_7B, {"use_sliding_window": True}, "unsupported", "use_sliding_window"),
        (LLAMA_8B, {"rope_scaling": {"rope_type": "llama3"}}, "missing", "factor"),
        (LLAMA_8B, {"attention_bias": True}, "unsupported", "attention_bias"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [0, 1]}, "unsupported", "mlp_only_layers"),
        (QWEN3_30B_A3B, {"shared_expert_intermediate_size": 8}, "unsupported", "shared_expert_intermediate_size"),
        (DEEPSEEK_V2_LITE, {"topk_method": "group_limited_greedy"}, "unsupported", "topk_method"),
        (DEEPSEEK_V2_LITE, {"scoring_func": "sigmoid"}, "unsupported", "scoring_func"),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "unsupported", "norm_topk_prob"),
        (DEEPSEEK_V2_LITE, {"rms_norm_eps": 1e-5}, "unsupported", "rms_norm_eps"),
        (DEEPSEEK_V2_LITE, {"moe_layer_freq": 2}, "unsupported", "moe_layer_freq"),
        (DEEPSEEK_V2_LITE, {"first_k_dense_replace": -1}, "out_of_range", "first_k_dense_replace"),
        (DEEPSEEK_V2_LITE, {"first_k_dense_replace": 27}, "mismatch", "first_k_dense_replace"),
        (
            DEEPSEEK_V2_LITE,
            {"rope_scaling": DEEPSEEK_V2_LITE["rope_scaling"] | {"beta_slow": 0}},
            "out_of_range",
            "beta_slow",
        ),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "mismatch", "num_experts_per_tok"),
        (LLAMA_8B, {"hidden_act": "gelu"}, "unsupported", "hidden_act"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "unsupported", "decoder_sparse_step"),
        (QWEN_7B, {"tie_word_embeddings": "yes"}, "wrong_type", "tie_word_embeddings"),
        (GEMMA3_1B, {"hidden_activation": "silu"}, "unsupported", "hidden_activation"),
        (GEMMA3_1B, {"final_logit_softcapping": 30.0}, "unsupported", "final_logit_softcapping"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "unsupported", "attn_logit_softcapping"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "unsupported", "use_bidirectional_attention"),
        (GEMMA3_1B, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "unsupported", "rope_type"),
        (
            GEMMA3_1B,
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "unsupported",
            "local_rope_type",
        ),
        (GEMMA3_1B, {"rope_parameters": {"full_attention": 3}}, "wrong_type", "full_attention"),
        (GEMMA3_1B, {"rope_scaling": {"sliding_attention": "default"}}, "wrong_type", "sliding_attention"),
        (GPT_OSS_20B, {"attention_bias": False}, "unsupported", "attention_bias"),
        (GPT_OSS_20B, {"swiglu_limit": 10.0}, "unsupported", "swiglu_limit"),
        (GPT_OSS_20B, {"rope_scaling": {"rope_type": "yarn"}}, "missing", "factor"),
        (DEEPSEEK_V2_LITE, {"truncate": False}, "unsupported", "truncate"),
        (DEEPSEEK_V2_LITE, {"attention_factor": 1.5}, "unsupported", "attention_factor"),
        (GPT_OSS_20B, {"rope_scaling": LLAMA3}, "unsupported", "rope_type"),
        (GPT_OSS_20B, {"rope_scaling": GPT_OSS_20B["rope_scaling"] | {"beta_fast": 0}}, "out_of_range", "beta_fast"),
        (GPT_OSS_20B, {"quantization_config": MXFP4}, "unsupported", "quantization_config"),
        (GEMMA3_1B, {"sliding_window_pattern": 0}, "out_of_range", "sliding_window_pattern"),
        (GEMMA3_1B, {"layer_types": ["linear_attention"] * 26}, "unsupported", "layer_types"),
        (GEMMA3_1B, {"layer_types": ["full_attention"]}, "mismatch", "layer_types"),
        (QWEN_7B, {"num_hidden_layers": True}, "wrong_type", "num_hidden_layers"),
        (QWEN_7B, {"rope_parameters": [1]}, "wrong_type", "rope_parameters"),
        (QWEN_7B, {"num_hidden_layers": 0}, "out_of_range", "num_hidden_layers"),
        (QWEN_7B, {"num_hidden_layers": 2.5}, "out_of_range", "num_hidden_layers"),
        (QWEN_7B, {"hidden_size": 10**400}, "out_of_range", "hidden_size"),
        (QWEN_7B, {"rms_norm_eps": float("nan")}, "out_of_range", "rms_norm_eps"),
        (QWEN_7B, {"num_key_value_heads": 5}, "mismatch", "num_attention_heads"),
        (QWEN_7B, {"num_attention_heads": 2**20, "num_key_value_heads": 1}, "mismatch", "num_attention_heads"),
    ],
)
def test_unsupported_or_invalid_config_is_refused(
    config: dict[str, Any], change: dict[str, Any], code: Code, key: str
) -> None:
    with refused(code, key):
        architecture_of(config | change)


def test_unsupported_rope_is_accepted_for_weights_only() -> None:
    yarn = QWEN_7B | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    with refused("unsupported", "rope_type"):
        architecture_of(yarn)
    assert architecture_of(yarn, weights_only=True) == architecture_of(QWEN_7B)
    scales = [1.0] * 48
    long = PHI_4 | {"rope_scaling": {"type": "longrope", "short_factor": scales, "long_factor": scales}}
    with refused("unsupported", "rope_type"):
        architecture_of(long)
    assert architecture_of(long, weights_only=True) == architecture_of(PHI_4)
    dynamic = DEEPSEEK_V2_LITE | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    plain = {key: value for key, value in DEEPSEEK_V2_LITE.items() if key != "rope_scaling"}
    assert architecture_of(dynamic, weights_only=True) == architecture_of(plain)
    with refused("unsupported", "quantization_config"):
        architecture_of(yarn | {"quantization_config": {"bits": 4}}, weights_only=True)
    quantised = GPT_OSS_20B | {"quantization_config": MXFP4}
    assert architecture_of(quantised, weights_only=True) == architecture_of(GPT_OSS_20B)


@pytest.mark.parametrize(
    ("content", "code", "key"),
    [
        pytest.param("[" * 200_000, "malformed", "config.json", id="deep"),
        ("[]", "unsupported", "model_type"),
        ('{"model_type": "llama"}', "missing", "num_hidden_layers"),
        (None, "not_found", "model.path"),
    ],
)
def test_refused_config_file_is_named(tmp_path: Path, content: str | None, code: Code, key: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with refused(code, file if key == file.name else key) as caught:
        read_architecture(tmp_path)
    assert str(tmp_path) in str(caught.value)


KINDS = ["full_attention", *["sliding_attention"] * 30, "full_attention"]


@pytest.mark.parametrize(
    ("change", "local"),
    [
        ({}, ()),
        ({"sliding_window": 4096}, range(32)),
        ({"sliding_window": 4096, "layer_types": KINDS}, range(32)),
        ({"model_type": "ministral", "sliding_window": 4096}, range(32)),
        ({"model_type": "ministral", "sliding_window": 4096, "layer_types": KINDS}, range(1, 31)),
        ({"model_type": "ministral", "sliding_window": 4096, "layer_types": ["full_attention"] * 32}, ()),
    ],
)
def test_layers_with_a_window_are_those_of_transformers(change: dict[str, Any], local: Sequence[int]) -> None:
    """A Mistral ignores the kinds of its layers."""
    found = architecture_of(MISTRAL_7B | change)
    assert found.local_layers == tuple(local)
    assert found.window == (4096 if local else None)


@pytest.mark.parametrize("kind", unsupported_types())
def test_known_type_that_is_not_built_is_refused_with_what_is_missing(kind: str) -> None:
    assert kind in CONFIG_MAPPING, "a type of transformers"
    with refused("unsupported", "model_type") as caught:
        architecture_of(LLAMA_8B | {"model_type": kind})
    assert unsupported_types()[kind] in str(caught.value)


@pytest.mark.parametrize("family", ["nothing", "nothing.yaml"])
def test_family_that_does_not_exist_is_refused_with_the_list(family: str) -> None:
    with refused("not_found" if "." in family else "unknown", "model.family") as caught:
        architecture_of(LLAMA_8B, family)
    assert all(name in str(caught.value) for name in family_names())
