"""Model families as data: how a Hugging Face config and its tensor names speak of a Megatron model.

A family is a row of `FAMILIES` (what its config implies) and the shared name table `_RULES`. Adding a
family with the same block (RMSNorm, rotary attention with query groups, SwiGLU) is adding a row.
Megatron names carry the *global* layer number, also under pipeline parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import lcm
from pathlib import Path
from typing import Any

from rlsys.errors import UserError

VOCAB_MULTIPLE = 128
"""Megatron's vocabulary is padded to a multiple of this, so that its shape is the same for most TP."""


class Cut(Enum):
    """How the Hugging Face tensors of a rule become one Megatron tensor, and how TP cuts that."""

    WHOLE = "whole"
    """One tensor, the same on every TP rank."""
    ROWS = "rows"
    """One tensor, cut along dimension 0."""
    COLUMNS = "columns"
    """One tensor, cut along dimension 1."""
    VOCAB = "vocab"
    """One tensor, padded with zero rows, cut along dimension 0."""
    QKV = "qkv"
    """Query, key and value, interleaved by query group, cut along dimension 0."""
    GATE_UP = "gate_up"
    """Gate and up projection: each is cut along dimension 0, a rank holds [gate_r; up_r]."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and choices of one model, read from its Hugging Face config."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """Input embedding and output layer share one matrix."""
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    max_positions: int

    def padded_vocab(self, tp: int) -> int:
        """Rows of Megatron's embedding under tensor parallelism of `tp`."""
        multiple = lcm(VOCAB_MULTIPLE, tp)
        return -(-self.vocab // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor and the Hugging Face tensors that it is made of."""

    megatron: tuple[str, ...]
    """Its names; `{}` is the layer. Transformer Engine fuses norms into the next linear layer and
    names them after it, so a norm has two names."""
    hf: tuple[str, ...]
    cut: Cut
    needs: str | None = None
    """Attribute of `Architecture` without which the tensor does not exist."""
    exported: bool = True
    """False for a copy of a tensor that another rule exports."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a `model_type` implies about tensors that exist."""

    qkv_bias: bool | str
    """Whether query, key and value have a bias, or the config key that says so."""
    qk_norm: bool


FAMILIES: dict[str, Family] = {
    "qwen2": Family(qkv_bias=True, qk_norm=False),
    "qwen3": Family(qkv_bias="attention_bias", qk_norm=True),
    "llama": Family(qkv_bias="attention_bias", qk_norm=False),
}

_M, _H = "decoder.layers.{}.", "model.layers.{}."
_RULES: tuple[Rule, ...] = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Cut.VOCAB),
    Rule(
        (f"{_M}input_layernorm.weight", f"{_M}self_attention.linear_qkv.layer_norm_weight"),
        (f"{_H}input_layernorm.weight",),
        Cut.WHOLE,
    ),
    Rule(
        (f"{_M}self_attention.linear_qkv.weight",),
        tuple(f"{_H}self_attn.{part}_proj.weight" for part in "qkv"),
        Cut.QKV,
    ),
    Rule(
        (f"{_M}self_attention.linear_qkv.bias",),
        tuple(f"{_H}self_attn.{part}_proj.bias" for part in "qkv"),
        Cut.QKV,
        needs="qkv_bias",
    ),
    Rule(
        (f"{_M}self_attention.q_layernorm.weight",), (f"{_H}self_attn.q_norm.weight",), Cut.WHOLE, "qk_norm"
    ),
    Rule(
        (f"{_M}self_attention.k_layernorm.weight",), (f"{_H}self_attn.k_norm.weight",), Cut.WHOLE, "qk_norm"
    ),
    Rule((f"{_M}self_attention.linear_proj.weight",), (f"{_H}self_attn.o_proj.weight",), Cut.COLUMNS),
    Rule(
        (f"{_M}pre_mlp_layernorm.weight", f"{_M}mlp.linear_fc1.layer_norm_weight"),
        (f"{_H}post_attention_layernorm.weight",),
        Cut.WHOLE,
    ),
    Rule(
        (f"{_M}mlp.linear_fc1.weight",),
        (f"{_H}mlp.gate_proj.weight", f"{_H}mlp.up_proj.weight"),
        Cut.GATE_UP,
    ),
    Rule((f"{_M}mlp.linear_fc2.weight",), (f"{_H}mlp.down_proj.weight",), Cut.COLUMNS),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), Cut.WHOLE),
)
_OUTPUT = "output_layer.weight"


def rules_of(architecture: Architecture) -> tuple[Rule, ...]:
    """The tensors that a model of this architecture has, in the order in which they are exported.

    With tied embeddings the last pipeline stage still holds a matrix of its own: a copy of the
    embedding that is loaded but not exported.
    """
    rules = tuple(rule for rule in _RULES if rule.needs is None or getattr(architecture, rule.needs))
    if architecture.tied:
        return (*rules, Rule((_OUTPUT,), ("model.embed_tokens.weight",), Cut.VOCAB, exported=False))
    return (*rules, Rule((_OUTPUT,), ("lm_head.weight",), Cut.VOCAB))


def read_architecture(path: str | Path) -> Architecture:
    """Read the config of the Hugging Face folder `path`.

    Raises UserError if it is no model folder, of an unknown family, or uses what no family here has
    (rotary scaling, sliding windows, biases in the MLP).
    """
    from transformers import AutoConfig

    if not (Path(path) / "config.json").is_file():
        raise UserError(f"model.path is {path}, which has no config.json; give a Hugging Face model folder.")
    return architecture_of(AutoConfig.from_pretrained(path))


def architecture_of(config: Any) -> Architecture:
    """The architecture of a transformers config object. Raises UserError as `read_architecture` does."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            f"model_type is {config.model_type}, which is not supported; use one of {', '.join(FAMILIES)}."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"rope_type is {rope['rope_type']}, which is not supported; only default is.")
    if getattr(config, "use_sliding_window", False):
        raise UserError("use_sliding_window is true, which is not supported; set it to false.")
    if getattr(config, "mlp_bias", False):
        raise UserError("mlp_bias is true, which is not supported; use a model without it.")
    if config.hidden_act != "silu":
        raise UserError(f"hidden_act is {config.hidden_act}, which is not supported; only silu is.")
    return Architecture(
        family=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=_flag(config, family.qkv_bias),
        qk_norm=family.qk_norm,
        norm_eps=config.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        max_positions=config.max_position_embeddings,
    )


def _flag(config: Any, choice: bool | str) -> bool:
    return bool(getattr(config, choice)) if isinstance(choice, str) else choice
