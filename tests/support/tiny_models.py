"""Tiny models of the families that are trained at scale and of others, and a reward term that each can earn.

The Qwen2 is the tiny policy, which has learnt to search. The other models are random, and their tokenizer has one token
per character, so that random samples are tokenised again to the same tokens.
"""

from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
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
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from tests.support.paths import PROJECT
from tests.support.tensors import randomised, save_model

POLICY = PROJECT / "examples/searchr1/tiny/policy"
LAYERS = 4
"""Number of layers of each model."""
_UNKNOWN, _EOS = "<unk>", "<eos>"
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0}
_RANDOM: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "deepseek_v2": (
        DeepseekV2Config,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,  # SGLang reads it.
            "rope_parameters": _YARN
            | {"factor": 4.0, "original_max_position_embeddings": 512, "mscale": 0.707, "mscale_all_dim": 0.707},
            "pad_token_id": None,
        },
    ),
    "exaone4": (Exaone4Config, {"sliding_window": 32, "sliding_window_pattern": 2}),
    "gemma3_text": (
        Gemma3TextConfig,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
            "pad_token_id": None,
        },
    ),
    "glm4": (Glm4Config, {"head_dim": 32, "pad_token_id": None}),
    "gpt_oss": (
        GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 32,
            "rope_parameters": _YARN | {"factor": 8.0, "original_max_position_embeddings": 16, "truncate": False},
            "pad_token_id": None,
        },
    ),
    "llama": (
        LlamaConfig,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "ministral": (
        MinistralConfig,
        {"head_dim": 32, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
    ),
    "mistral": (MistralConfig, {"head_dim": 32, "sliding_window": None}),
    "phi3": (Phi3Config, {"pad_token_id": None}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "tie_word_embeddings": False,
            "head_dim": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
}
"""Family -> class of its config, and what it sets beside `_SIZES`."""
BUILT_IN = tuple(family for family in _RANDOM if family != "exaone4")
"""Built-in families with random models."""
ON_SGLANG = ("deepseek_v2", "gemma3_text", "glm4", "llama", "mistral", "phi3", "qwen3")
"""Built-in families of which tests/extensions/test_family.py trains a model with SGLang."""


def tiny_model(family: str, folder: Path, seed: int = 0) -> Path:
    """Folder of a model of `family` with its tokenizer: `POLICY`, or `folder` with a new model of random weights."""
    if family == "qwen2":
        return POLICY
    words = _characters()
    kind, own = _RANDOM[family]
    config = kind(**_SIZES | own, vocab_size=len(words), eos_token_id=words.eos_token_id)
    torch.manual_seed(seed)
    save_model(randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32), scale=0.1), folder)
    words.save_pretrained(folder)
    return folder


def _characters() -> PreTrainedTokenizerFast:
    alphabet = [_UNKNOWN, _EOS, " ", "\n", *ascii_letters, *digits, *punctuation]
    ids = {character: number for number, character in enumerate(alphabet)}
    raw = Tokenizer(models.WordLevel(ids, unk_token=_UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=_EOS, unk_token=_UNKNOWN, clean_up_tokenization_spaces=False
    )


def even_tokens(_question: Question, trajectory: Trajectory) -> float:
    """Reward term: the share of sampled tokens with an even id, which differs between random episodes."""
    sampled = trajectory.tokens[trajectory.loss_mask]
    return float((sampled % 2 == 0).mean()) if sampled.size else 0.0
