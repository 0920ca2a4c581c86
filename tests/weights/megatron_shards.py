"""What each of Megatron's ranks holds of a model, written out row by row, as its layers read it."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

import torch
from torch import Tensor

from rlsys.weights.weight_map import Architecture


def expected_shard(arch: Architecture, name: str, checkpoint: Mapping[str, Tensor], rank: int, tp: int) -> Tensor:
    """The tensor `name` on a TP rank, from Hugging Face tensors; an expert's, cut by as many, too."""
    layer = name.split(".")[2] if name.startswith("decoder.layers") else ""
    block = f"model.layers.{layer}."
    expert = name.split(".")[6] if "local_experts" in name else None
    mlp = f"{block}mlp." if expert is None else f"{block}mlp.experts.{expert}."
    kind = name.rsplit(".", 1)[1]
    if "linear_qkv" in name:
        rows = []
        per_group = arch.heads // arch.kv_heads
        q, k, v = (checkpoint[f"{block}self_attn.{part}_proj.{kind}"] for part in "qkv")
        for group in range(arch.kv_heads):
            for head in range(group * per_group, (group + 1) * per_group):
                rows += [q[head * arch.head_dim + i] for i in range(arch.head_dim)]
            rows += [k[group * arch.head_dim + i] for i in range(arch.head_dim)]
            rows += [v[group * arch.head_dim + i] for i in range(arch.head_dim)]
        each = len(rows) // tp
        return torch.stack(rows[rank * each : (rank + 1) * each])
    if "linear_fc1" in name:
        gate, up = checkpoint[f"{mlp}gate_proj.weight"], checkpoint[f"{mlp}up_proj.weight"]
        each = len(gate) // tp
        mine = range(rank * each, (rank + 1) * each)
        return torch.stack([gate[row] for row in mine] + [up[row] for row in mine])
    if "linear_proj" in name or "linear_fc2" in name:
        whole = checkpoint[f"{block}self_attn.o_proj.weight" if "proj" in name else f"{mlp}down_proj.weight"]
        each = whole.shape[1] // tp
        return torch.stack([whole[:, rank * each + i] for i in range(each)], dim=1)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tied = arch.tied or name.startswith("embedding")
        whole = checkpoint["model.embed_tokens.weight" if tied else "lm_head.weight"]
        padded = next(rows for rows in range(len(whole), len(whole) + lcm(128, tp)) if rows % 128 == rows % tp == 0)
        mine = range(rank * padded // tp, (rank + 1) * padded // tp)
        return torch.stack([whole[row] if row < len(whole) else torch.zeros_like(whole[0]) for row in mine])
    return checkpoint[
        {
            "decoder.final_layernorm.weight": "model.norm.weight",
            "value_head.weight": "score.weight",
            "value_head.bias": "score.bias",
            f"decoder.layers.{layer}.input_layernorm.weight": f"{block}input_layernorm.weight",
            f"decoder.layers.{layer}.pre_mlp_layernorm.weight": f"{block}post_attention_layernorm.weight",
            f"decoder.layers.{layer}.self_attention.q_layernorm.weight": f"{block}self_attn.q_norm.weight",
            f"decoder.layers.{layer}.self_attention.k_layernorm.weight": f"{block}self_attn.k_norm.weight",
            f"decoder.layers.{layer}.mlp.router.weight": f"{block}mlp.gate.weight",
        }[name]
    ]
