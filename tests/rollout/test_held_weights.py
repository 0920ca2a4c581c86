"""The prediction of what an engine holds, on tensors whose rows say where they come from."""

from __future__ import annotations

import hashlib

import torch

from rlsys.rollout.engine import Layout, StagedVersion, sha256_prefix

PREFIX = "model.layers.0"


def rows(first: int, count: int, width: int = 2) -> torch.Tensor:
    """Row i is filled with `first + i`."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].repeat(1, width)


def row_numbers(layout: Layout, tensors: dict[str, torch.Tensor]) -> list[dict[str, list[float]]]:
    """By rank, the first column of each tensor that the engine should hold."""
    seen: dict[str, list[float]] = {}

    def remember(tensor: torch.Tensor) -> str:
        numbers = (tensor[:, 0] if tensor.dim() == 2 else tensor).tolist()
        seen[str(len(seen))] = numbers
        return str(len(seen) - 1)

    held = StagedVersion(0, layout, remember)
    for name, tensor in tensors.items():
        held.predict(name, tensor)
    return [{name: seen[key] for name, key in hashes.items()} for hashes in held.hashes]


def test_the_hash_is_eight_bytes_of_sha256() -> None:
    tensor = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    assert sha256_prefix(tensor) == hashlib.sha256(bytes.fromhex("c03f00c0")).hexdigest()[:16]


def test_rows_are_cut_over_ranks_before_they_are_fused() -> None:
    layout = Layout(tp=2, kv_heads=2, tied=False, dtype=torch.float32)
    tensors = {
        f"{PREFIX}.self_attn.v_proj.weight": rows(20, 2),
        f"{PREFIX}.self_attn.q_proj.weight": rows(0, 4),
        f"{PREFIX}.self_attn.k_proj.weight": rows(10, 2),
        f"{PREFIX}.mlp.up_proj.weight": rows(40, 4),
        f"{PREFIX}.mlp.gate_proj.weight": rows(30, 4),
        f"{PREFIX}.mlp.down_proj.weight": rows(0, 4).T.contiguous(),
        f"{PREFIX}.input_layernorm.weight": torch.tensor([7.0, 8.0]),
    }
    first, second = row_numbers(layout, tensors)
    assert first[f"{PREFIX}.self_attn.qkv_proj.weight"] == [0, 1, 10, 20]
    assert second[f"{PREFIX}.self_attn.qkv_proj.weight"] == [2, 3, 11, 21]
    assert first[f"{PREFIX}.mlp.gate_up_proj.weight"] == [30, 31, 40, 41]
    assert second[f"{PREFIX}.mlp.gate_up_proj.weight"] == [32, 33, 42, 43]
    assert first[f"{PREFIX}.mlp.down_proj.weight"] == [0, 0]
    assert second[f"{PREFIX}.mlp.down_proj.weight"] == [2, 2]
    assert first[f"{PREFIX}.input_layernorm.weight"] == second[f"{PREFIX}.input_layernorm.weight"] == [7, 8]


def test_few_kv_heads_are_repeated_over_ranks() -> None:
    layout = Layout(tp=4, kv_heads=2, tied=False, dtype=torch.float32)
    tensors = {
        f"{PREFIX}.self_attn.q_proj.bias": torch.arange(4.0),
        f"{PREFIX}.self_attn.k_proj.bias": torch.arange(10.0, 12.0),
        f"{PREFIX}.self_attn.v_proj.bias": torch.arange(20.0, 22.0),
    }
    held = [rank[f"{PREFIX}.self_attn.qkv_proj.bias"] for rank in row_numbers(layout, tensors)]
    assert held == [[0, 10, 20], [1, 10, 20], [2, 11, 21], [3, 11, 21]]


def test_the_vocabulary_is_padded_with_zeros_and_a_tied_output_layer_ignored() -> None:
    layout = Layout(tp=2, kv_heads=2, tied=True, dtype=torch.float32)
    tensors = {"model.embed_tokens.weight": rows(1, 65), "lm_head.weight": rows(1, 65)}
    first, second = row_numbers(layout, tensors)
    assert first == {"model.embed_tokens.weight": list(range(1, 65))}
    assert second == {"model.embed_tokens.weight": [65] + [0] * 63}


def test_every_kind_of_difference_is_named() -> None:
    held = StagedVersion(0, Layout(tp=1, kv_heads=2, tied=False, dtype=torch.float32), sha256_prefix)
    norm = torch.tensor([1.0])
    held.predict("model.norm.weight", norm)
    held.predict("model.extra.weight", norm)
    held.predict(f"{PREFIX}.mlp.up_proj.weight", rows(0, 2))
    reported = {"model.norm.weight": sha256_prefix(norm), "model.unsent.weight": sha256_prefix(norm)}
    partial = f"{PREFIX}.mlp.gate_up_proj.weight"
    assert held.mismatches([reported]) == ["model.extra.weight", partial, "model.unsent.weight"]


def test_experts_lie_one_after_the_other_each_cut_over_ranks() -> None:
    layout = Layout(tp=2, kv_heads=2, tied=False, dtype=torch.float32, experts=2)
    experts = f"{PREFIX}.mlp.experts"
    tensors = {
        f"{experts}.1.up_proj.weight": rows(70, 4),
        f"{experts}.0.gate_proj.weight": rows(0, 4),
        f"{experts}.1.down_proj.weight": rows(0, 4).T.contiguous() + 50,
        f"{PREFIX}.mlp.gate.weight": rows(90, 2),
        f"{experts}.1.gate_proj.weight": rows(60, 4),
        f"{experts}.0.up_proj.weight": rows(10, 4),
        f"{experts}.0.down_proj.weight": rows(0, 4).T.contiguous() + 40,
    }
    first, second = row_numbers(layout, tensors)
    assert first[f"{experts}.w13_weight"] == [0, 1, 10, 11, 60, 61, 70, 71]
    assert second[f"{experts}.w13_weight"] == [2, 3, 12, 13, 62, 63, 72, 73]
    assert first[f"{experts}.w2_weight"] == [40, 40, 50, 50]
    assert second[f"{experts}.w2_weight"] == [42, 42, 52, 52]
    assert first[f"{PREFIX}.mlp.gate.weight"] == second[f"{PREFIX}.mlp.gate.weight"] == [90, 91]


def test_an_expert_that_did_not_come_is_a_difference() -> None:
    held = StagedVersion(0, Layout(tp=1, kv_heads=2, tied=False, dtype=torch.float32, experts=2), sha256_prefix)
    held.predict(f"{PREFIX}.mlp.experts.1.down_proj.weight", rows(0, 2))
    assert held.mismatches([{}]) == [f"{PREFIX}.mlp.experts.w2_weight"]


def test_the_width_of_an_mlp_is_padded_on_a_cpu() -> None:
    layout = Layout(tp=1, kv_heads=2, tied=False, dtype=torch.float32, experts=1, width_padding=4)
    tensors = {
        f"{PREFIX}.mlp.gate_proj.weight": rows(1, 3),
        f"{PREFIX}.mlp.up_proj.weight": rows(5, 3),
        f"{PREFIX}.mlp.experts.0.gate_proj.weight": rows(10, 4),
        f"{PREFIX}.mlp.experts.0.up_proj.weight": rows(20, 4),
    }
    (held,) = row_numbers(layout, tensors)
    assert held[f"{PREFIX}.mlp.gate_up_proj.weight"] == [1, 2, 3, 0, 5, 6, 7, 0]
    assert held[f"{PREFIX}.mlp.experts.w13_weight"] == [10, 11, 12, 13, 20, 21, 22, 23]
    wide = StagedVersion(0, layout, lambda tensor: str(tensor.tolist()))
    wide.predict(f"{PREFIX}.mlp.down_proj.weight", torch.tensor([[1.0, 2.0, 3.0]]))
    assert wide.hashes == [{f"{PREFIX}.mlp.down_proj.weight": "[[1.0, 2.0, 3.0, 0.0]]"}]
