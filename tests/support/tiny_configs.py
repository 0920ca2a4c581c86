"""Configs of tiny random models, one function for each family that is trained."""

from collections.abc import Callable

from transformers import (
    DeepseekV2Config,
    Exaone4Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.paths import PROJECT

VOCAB = 100


def qwen2(layers: int = 3, tied: bool = True) -> PretrainedConfig:
    return Qwen2Config(**_sizes(layers, tied))


def qwen3(layers: int = 3, tied: bool = False) -> PretrainedConfig:
    return Qwen3Config(**_sizes(layers, tied), head_dim=24)


def qwen3_moe(layers: int = 3, tied: bool = False, norm_topk: bool = True) -> PretrainedConfig:
    return Qwen3MoeConfig(
        **_sizes(layers, tied),
        head_dim=24,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        norm_topk_prob=norm_topk,
    )


def llama3(layers: int = 3, tied: bool = False) -> PretrainedConfig:
    """A Llama with the rotary scaling of Llama 3.1; a context of 100 reaches all three frequency ranges."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1234.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return LlamaConfig(**{**_sizes(layers, tied), "rope_parameters": rope})


def mistral(layers: int = 3, tied: bool = False, window: int | None = None) -> PretrainedConfig:
    return MistralConfig(**_sizes(layers, tied), head_dim=24, sliding_window=window)


def ministral(layers: int = 3, tied: bool = False, window: int = 8) -> PretrainedConfig:
    return MinistralConfig(**_sizes(layers, tied), head_dim=24, sliding_window=window, layer_types=_kinds(layers))


def gemma3(layers: int = 3, tied: bool = True, window: int = 8) -> PretrainedConfig:
    thetas = {"full_attention": 1234.0, "sliding_attention": 345.0}
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    return Gemma3TextConfig(
        **{**_sizes(layers, tied), "rope_parameters": rope},
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=window,
        layer_types=_kinds(layers),
        **_TOKENS,
    )


def _kinds(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def phi3(layers: int = 3, tied: bool = False, window: int | None = None) -> PretrainedConfig:
    """A Phi-4 with rotary positions on 12 of a head's 16 dimensions, as in Phi-4-mini."""
    rope = {"rope_type": "default", "rope_theta": 1234.0, "partial_rotary_factor": 0.75}
    return Phi3Config(**{**_sizes(layers, tied), "rope_parameters": rope}, sliding_window=window, **_TOKENS)


def glm4(layers: int = 3, tied: bool = False, bias: bool = True) -> PretrainedConfig:
    sizes = _sizes(layers, tied)
    rope = {"rope_type": "default", "rope_theta": 1234.0, "partial_rotary_factor": 0.5}
    return Glm4Config(**{**sizes, "rope_parameters": rope}, head_dim=24, attention_bias=bias, **_TOKENS)


def deepseek(
    layers: int = 3, tied: bool = False, q_lora_rank: int | None = None, yarn: bool = False
) -> PretrainedConfig:
    """A DeepSeek-V2-Lite with a dense first layer; heads of queries and keys are larger than those of values."""
    sizes = {**_sizes(layers, tied), "num_key_value_heads": 4}
    if yarn:
        sizes["rope_parameters"] = YARN
    return DeepseekV2Config(
        **sizes,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        routed_scaling_factor=1.5,
        **_TOKENS,
    )


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1234.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 1,
    "beta_slow": 0.1,
    "mscale": 0.6,
    "mscale_all_dim": 0.9,
}
"""Of the four frequencies of a `deepseek`, one stays, one is interpolated, and two are divided."""


def gpt_oss(
    layers: int = 3, tied: bool = False, window: int = 8, truncate: bool = False, attention_factor: float | None = None
) -> PretrainedConfig:
    """A gpt-oss whose original context of 16 reaches fast, slow and interpolated pairs of dimensions."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1234.0,
        "factor": 8.0,
        "beta_fast": 2.0,
        "beta_slow": 0.25,
        "truncate": truncate,
        "original_max_position_embeddings": 16,
        **({} if attention_factor is None else {"attention_factor": attention_factor}),
    }
    return GptOssConfig(
        **{**_sizes(layers, tied), "rope_parameters": rope},
        head_dim=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=window,
        layer_types=_kinds(layers),
        **_TOKENS,
    )


def exaone4(layers: int = 3) -> PretrainedConfig:
    """An EXAONE 4.0 with global layers without rotary positions; its family is not built in: `OWN_FAMILY`."""
    return Exaone4Config(**_sizes(layers, tied=False), head_dim=24, sliding_window=8, layer_types=_kinds(layers))


_TOKENS = {"pad_token_id": None, "eos_token_id": 1}
"""In transformers, a padding token's embedding is not trained."""
OWN_FAMILY = str(PROJECT / "examples/extend/family.yaml")
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "deepseek_v2": deepseek,
    "gemma3_text": gemma3,
    "glm4": glm4,
    "gpt_oss": gpt_oss,
    "llama": llama3,
    "ministral": ministral,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def _sizes(layers: int, tied: bool) -> dict[str, object]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1234.0},
        "tie_word_embeddings": tied,
    }
