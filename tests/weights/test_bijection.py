"""The weight map is a bijection, held against Hugging Face's own layers and by exhaustive round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.bijection import ShardLoader, WeightMap
from rlsys.weights.families import Architecture
from rlsys.weights.stages import stage_layers


def _architecture(family: str, layers: int, kv_heads: int, tied: bool) -> Architecture:
    return Architecture(
        family=family,
        layers=layers,
        hidden=16,
        heads=8,
        kv_heads=kv_heads,
        head_dim=4,
        ffn=12,
        vocab=50,
        tied=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=64,
    )


def _checkpoint(arch: Architecture) -> dict[str, Tensor]:
    """Names and shapes as transformers gives them, every element a different number."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab, arch.hidden),
        "model.norm.weight": (arch.hidden,),
    }
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab, arch.hidden)
    for layer in range(arch.layers):
        block = f"model.layers.{layer}."
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{block}self_attn.{part}_proj.weight"] = (rows, arch.hidden)
            if arch.qkv_bias:
                shapes[f"{block}self_attn.{part}_proj.bias"] = (rows,)
        if arch.qk_norm:
            shapes |= {f"{block}self_attn.{part}_norm.weight": (arch.head_dim,) for part in "qk"}
        shapes |= {
            f"{block}self_attn.o_proj.weight": (arch.hidden, q),
            f"{block}mlp.gate_proj.weight": (arch.ffn, arch.hidden),
            f"{block}mlp.up_proj.weight": (arch.ffn, arch.hidden),
            f"{block}mlp.down_proj.weight": (arch.hidden, arch.ffn),
            f"{block}input_layernorm.weight": (arch.hidden,),
            f"{block}post_attention_layernorm.weight": (arch.hidden,),
        }
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    numbers = iter(
        torch.arange(total, dtype=torch.float64).split([torch.Size(s).numel() for s in shapes.values()])
    )
    return {name: next(numbers).view(shape) for name, shape in shapes.items()}


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(["qwen2", "qwen3", "llama"]),
    tied=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4]),
    stages=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_every_tensor_comes_back_bit_for_bit(
    family: str, tied: bool, kv_heads: int, tp: int, stages: list[int], data: st.DataObject
) -> None:
    arch = _architecture(family, sum(stages), kv_heads, tied)
    weights, checkpoint = WeightMap(arch), _checkpoint(arch)
    assert weights.hf_names() == checkpoint.keys()
    order = data.draw(st.permutations(sorted(checkpoint)))
    back: dict[str, Tensor] = {}
    for number, layers in enumerate(stage_layers(arch.layers, len(stages), stages)):
        names = weights.stage_names(layers, first=number == 0, last=number == len(stages) - 1)
        shards: list[dict[str, Tensor]] = [{} for _ in range(tp)]
        for rank in range(tp):
            loader = ShardLoader(weights, names, rank, tp, shards[rank].__setitem__)
            for name in order:
                loader.feed(name, checkpoint[name])
            assert loader.missing() == []
        for name in names:
            entry = weights.entry(name)
            merged = weights.merge(entry, [shard[name] for shard in shards])
            if entry.rule.exported:
                assert not back.keys() & {hf for hf, _ in merged}, "a tensor is exported twice"
                back |= dict(merged)
    assert back.keys() == checkpoint.keys()
    for name, tensor in checkpoint.items():
        assert torch.equal(back[name], tensor), name


def test_query_groups_are_interleaved_and_gate_and_up_are_cut_apart() -> None:
    """The layout that Megatron's attention and MLP read, written out by hand."""
    arch = _architecture("llama", 1, 2, tied=True)
    weights, checkpoint = WeightMap(arch), _checkpoint(arch)
    entry = weights.entry("decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = (checkpoint[name] for name in entry.hf)
    # Group 1 of 2: query heads 4 to 7, then key head 1, then value head 1, four rows each.
    expected = torch.cat([q[16:32], k[4:8], v[4:8]])
    assert torch.equal(weights.shard(entry, [q, k, v], 1, 2), expected)
    entry = weights.entry("decoder.layers.0.mlp.linear_fc1.weight")
    gate, up = (checkpoint[name] for name in entry.hf)
    assert torch.equal(weights.shard(entry, [gate, up], 1, 2), torch.cat([gate[6:], up[6:]]))
    entry = weights.entry("embedding.word_embeddings.weight")
    last = weights.shard(entry, [checkpoint[entry.hf[0]]], 1, 2)
    assert last.shape == (64, 16)
    assert not last.any(), "rows 64 to 127 are padding of a vocabulary of 50"


def test_both_names_of_a_norm_mean_the_same_tensor() -> None:
    weights = WeightMap(_architecture("qwen2", 4, 2, tied=False))
    for local, fused in (
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ):
        names = [weights.entry(f"decoder.layers.3.{name}").hf for name in (local, fused)]
        assert names[0] == names[1]
        assert names[0][0].startswith("model.layers.3.")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda names: names - {"model.norm.weight"}, "lacks 1 tensors, first model.norm.weight"),
        (lambda names: names | {"model.layers.0.mlp.extra"}, "does not have, first model.layers.0.mlp.extra"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: object, sentence: str) -> None:
    weights = WeightMap(_architecture("qwen2", 2, 2, tied=True))
    weights.check_hf_names(weights.hf_names() | {"lm_head.weight"})
    with pytest.raises(UserError, match=sentence):
        weights.check_hf_names(change(weights.hf_names()))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("layers", "pp", "pp_layers"), [(5, 2, None), (5, 2, [5]), (5, 2, [5, 0]), (5, 2, [2, 2])]
)
def test_impossible_stages_are_refused(layers: int, pp: int, pp_layers: list[int] | None) -> None:
    with pytest.raises(UserError, match="pp"):
        stage_layers(layers, pp, pp_layers)
