"""The weight map is a bijection: every family through every way to cut it, bit for bit.

What a rank must hold is written out here once more, row by row, as Megatron's layers read it.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.weight_map import (
    Architecture,
    Entry,
    RopeScaling,
    ShardLoader,
    WeightMap,
    expert_block,
    stage_layers,
)

LAYERS = 5
LLAMA = Architecture(
    family="llama",
    layers=LAYERS,
    hidden=16,
    heads=8,
    kv_heads=2,
    head_dim=4,
    ffn=12,
    vocab=50,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
)
MODELS = {
    "llama": LLAMA,
    "llama-3.1": replace(LLAMA, rope=RopeScaling(8.0, 1.0, 4.0, 32)),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=6),
    "qwen3_moe": replace(
        LLAMA, family="qwen3_moe", qk_norm=True, head_dim=6, experts=4, experts_per_token=2, expert_ffn=8
    ),
}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def shapes_of(arch: Architecture, values: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers gives them."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab, arch.hidden),
        "model.norm.weight": (arch.hidden,),
    }
    if values:
        shapes |= {"score.weight": (1, arch.hidden), "score.bias": (1,)}
    elif not arch.tied:
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
            f"{block}input_layernorm.weight": (arch.hidden,),
            f"{block}post_attention_layernorm.weight": (arch.hidden,),
        }
        if arch.experts:
            shapes[f"{block}mlp.gate.weight"] = (arch.experts, arch.hidden)
        mlps = [f"mlp.experts.{expert}" for expert in range(arch.experts)] or ["mlp"]
        width = arch.expert_ffn if arch.experts else arch.ffn
        for mlp in mlps:
            shapes |= {f"{block}{mlp}.{part}_proj.weight": (width, arch.hidden) for part in ("gate", "up")}
            shapes[f"{block}{mlp}.down_proj.weight"] = (arch.hidden, width)
    return shapes


def checkpoint_of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every element has bits of its own, infinities and NaNs among them."""
    sizes = [prod(shape) for shape in shapes.values()]
    assert sum(sizes) <= 2**16, "bfloat16 has no more numbers"
    bits = torch.arange(sum(sizes), dtype=torch.int32).to(BITS[dtype])
    bits = bits << 16 if dtype is torch.float32 else bits
    parts = bits.view(dtype).split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, also where they are no numbers."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = BITS[one.dtype]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def expected_shard(arch: Architecture, name: str, checkpoint: dict[str, Tensor], rank: int, tp: int) -> Tensor:
    """What Megatron's layers read under `name` on a TP rank, put together row by row."""
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
        # 50 rows are padded to 128, for all TP sizes here.
        mine = range(rank * 128 // tp, (rank + 1) * 128 // tp)
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


def gather(weights: WeightMap, names: list[str], checkpoint: dict[str, Tensor], tp: int) -> dict[str, list[Tensor]]:
    """The shards of all TP ranks of one stage and expert block, held against what Megatron reads."""
    shards: dict[str, list[Tensor]] = {name: [] for name in names}
    for rank in range(tp):
        loader = ShardLoader(weights, names, rank, tp, lambda name, shard: shards[name].append(shard))
        for name in sorted(checkpoint):
            loader.feed(name, checkpoint[name])
        assert loader.missing() == []
        for name in names:
            cut = (rank, tp) if weights.entry(name).expert is None else (0, 1)
            assert same(shards[name][rank], expected_shard(weights.architecture, name, checkpoint, *cut)), name
    return shards


def stage_names(weights: WeightMap, layers: range, first: bool, last: bool, experts: range) -> list[str]:
    """Megatron tensors of a pipeline stage and expert rank."""
    entries = weights.entries()
    begin = next(number for number, entry in enumerate(entries) if entry.layer is not None)
    held = [entry for entry in entries if entry.layer in layers and (entry.expert is None or entry.expert in experts)]
    after = [entry for entry in entries[begin:] if entry.layer is None]
    # A tied last stage has a matrix of its own.
    ends = after + ([] if first else weights.copies()) if last else []
    return [entry.name for entry in [*(entries[:begin] if first else []), *held, *ends]]


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("pp_layers", [[5], [2, 3], [1, 3, 1]], ids=lambda counts: f"pp{len(counts)}")
@pytest.mark.parametrize("tp", [1, 2, 4], ids=lambda tp: f"tp{tp}")
@pytest.mark.parametrize(
    ("model", "ep"), [*((model, 1) for model in MODELS), ("qwen3_moe", 2)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("head", ["tied", "untied", "values"])
def test_every_tensor_comes_back_bit_for_bit(
    head: str, model: str, ep: int, tp: int, pp_layers: list[int], dtype: torch.dtype
) -> None:
    arch = replace(MODELS[model], tied=head == "tied")
    weights = WeightMap(arch, values=head == "values")
    checkpoint = checkpoint_of(shapes_of(arch, head == "values"), dtype)
    assert weights.hf_names() == checkpoint.keys()
    back: dict[str, Tensor] = {}
    seen: list[str] = []
    last = len(pp_layers) - 1
    for stage, layers in enumerate(stage_layers(arch.layers, len(pp_layers), pp_layers)):
        for ep_rank in range(ep):
            experts = expert_block(arch.experts, ep, ep_rank)
            names = stage_names(weights, layers, stage == 0, stage == last, experts)
            # A last stage that is not the first needs a tied matrix of its own.
            here = head == "untied" or (head == "tied" and last > 0)
            assert ("output_layer.weight" in names) == (stage == last and here)
            for name, pieces in gather(weights, names, checkpoint, tp).items():
                entry = weights.entry(name)
                if entry.rule.exported and (entry.expert is not None or ep_rank == 0):
                    seen.append(name)
                    merged = weights.merge(entry, pieces[:1] if entry.expert is not None else pieces)
                    assert not back.keys() & {hf for hf, _ in merged}, "a tensor is exported twice"
                    back |= dict(merged)
    assert back.keys() == checkpoint.keys()
    for name, tensor in checkpoint.items():
        assert same(back[name], tensor), name
    assert sorted(seen) == sorted(entry.name for entry in weights.entries())


@pytest.mark.parametrize("tp", [2, 4])
def test_experts_that_others_have_cut_come_back_too(tp: int) -> None:
    """Megatron can cut experts by TP as well; rlsys does not."""
    arch = MODELS["qwen3_moe"]
    weights, checkpoint = WeightMap(arch), checkpoint_of(shapes_of(arch))
    experts = [entry for entry in weights.entries() if entry.expert is not None]
    assert len(experts) == LAYERS * 4 * 2
    for entry in experts:
        parts = [checkpoint[name] for name in entry.hf]
        shards = [weights.shard(entry, parts, rank, tp) for rank in range(tp)]
        for rank, shard in enumerate(shards):
            assert same(shard, expected_shard(arch, entry.name, checkpoint, rank, tp))
        for (name, tensor), part in zip(weights.merge(entry, shards), parts, strict=True):
            assert same(tensor, part), name


def test_the_order_of_export_goes_layer_by_layer() -> None:
    arch = replace(MODELS["qwen3_moe"], layers=2, experts=2)
    entries = WeightMap(arch).entries()
    assert entries[0].name == "embedding.word_embeddings.weight"
    assert [entry.name for entry in entries[-2:]] == ["decoder.final_layernorm.weight", "output_layer.weight"]
    # Norms, attention, output projection, norms of query and key, and the router: 7; two tensors an expert.
    layer = [None] * 7 + [0, 0, 1, 1]
    assert [(entry.layer, entry.expert) for entry in entries[1:-2]] == [(n, e) for n in (0, 1) for e in layer]


@pytest.mark.parametrize(
    ("own", "engine", "hf"),
    [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        (
            "mlp.experts.local_experts.13.linear_fc2.weight",
            "mlp.experts.linear_fc2.weight13",
            "mlp.experts.13.down_proj.weight",
        ),
    ],
)
def test_transformer_engines_names_mean_the_same_tensors(own: str, engine: str, hf: str) -> None:
    weights = WeightMap(replace(MODELS["qwen3_moe"], experts=16))
    entry = weights.entry(f"decoder.layers.3.{own}")
    assert weights.entry(f"decoder.layers.3.{engine}") == entry
    assert (entry.name, entry.layer) == (f"decoder.layers.3.{own}", 3)
    assert entry.expert == (13 if "13" in own else None)
    assert entry.hf == (f"model.layers.3.{hf}",)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.5.input_layernorm.weight",
        "decoder.layers.0.mlp.experts.local_experts.4.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.weight4",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "value_head.weight",
        "decoder.layers.input_layernorm.weight",
        "rotary_pos_emb.inv_freq",
    ],
)
def test_a_name_that_the_model_has_not_is_unknown(name: str) -> None:
    weights = WeightMap(MODELS["qwen3_moe"])
    with pytest.raises(KeyError):
        weights.entry(name)


@st.composite
def _models(draw: st.DrawFn) -> Architecture:
    groups, per_group, head_dim = (draw(st.integers(1, 4)) for _ in range(3))
    experts = draw(st.sampled_from([0, 1, 3]))
    base = MODELS["qwen3_moe" if experts else draw(st.sampled_from(["llama", "qwen2", "qwen3"]))]
    return replace(
        base,
        layers=1,
        hidden=draw(st.integers(1, 9)),
        heads=groups * per_group,
        kv_heads=groups,
        head_dim=head_dim,
        ffn=draw(st.integers(1, 9)),
        vocab=draw(st.integers(1, 300)),
        tied=draw(st.booleans()),
        experts=experts,
        expert_ffn=draw(st.integers(1, 9)),
    )


def _divides(entry: Entry, arch: Architecture, tp: int) -> bool:
    """Whether each rank can have as much of a tensor as the others."""
    size = {
        "linear_qkv.weight": (arch.heads + 2 * arch.kv_heads) * arch.head_dim,
        "linear_qkv.bias": (arch.heads + 2 * arch.kv_heads) * arch.head_dim,
        "linear_proj.weight": arch.heads * arch.head_dim,
        "linear_fc1.weight": arch.expert_ffn if arch.experts else arch.ffn,
        "linear_fc2.weight": arch.expert_ffn if arch.experts else arch.ffn,
    }
    return size.get(".".join(entry.name.split(".")[-2:]), 0) % tp == 0


@given(arch=_models(), tp=st.integers(1, 6), values=st.booleans())
def test_a_tensor_has_the_shape_it_says_or_is_refused(arch: Architecture, tp: int, values: bool) -> None:
    weights, shapes = WeightMap(arch, values), shapes_of(arch, values)
    for entry in weights.entries():
        assert dict(zip(entry.hf, entry.rule.shapes, strict=True)) == {n: shapes[n] for n in entry.hf}
        parts = [torch.rand(shape) for shape in entry.rule.shapes]
        if not _divides(entry, arch, tp):
            with pytest.raises(UserError, match=f"tp is {tp}, which does not divide"):
                weights.shard(entry, parts, 0, tp)
            continue
        shards = [weights.shard(entry, parts, rank, tp) for rank in range(tp)]
        assert len({shard.shape for shard in shards}) == 1
        whole = weights.whole_shape(entry, tp)
        # A tensor is cut along one dimension, or not at all.
        times = [size // held for size, held in zip(whole, shards[0].shape, strict=True)]
        assert sorted(times)[:-1] == [1] * (len(whole) - 1)
        assert max(times) in (1, tp)
        assert prod(shards[0].shape) * max(times) == prod(whole)
        for (_, tensor), part in zip(weights.merge(entry, shards), parts, strict=True):
            assert torch.equal(tensor, part)


@given(arch=_models(), data=st.data())
def test_tensors_may_come_in_any_order(arch: Architecture, data: st.DataObject) -> None:
    weights = WeightMap(arch)
    checkpoint = {name: torch.rand(shape) for name, shape in shapes_of(arch).items()}
    order = data.draw(st.permutations(sorted(checkpoint)))
    stored: dict[str, Tensor] = {}
    names = [entry.name for entry in weights.entries()]
    loader = ShardLoader(weights, names, 0, 1, stored.__setitem__)
    for number, name in enumerate(order):
        assert loader.missing() == sorted(order[number:])
        loader.feed(name, checkpoint[name])
    back = {hf: tensor for name in names for hf, tensor in weights.merge(weights.entry(name), [stored[name]])}
    assert all(torch.equal(back[name], tensor) for name, tensor in checkpoint.items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda names: names - {"model.norm.weight"}, "lacks 1 tensors, first model.norm.weight"),
        (lambda names: names | {"model.layers.0.mlp.extra"}, "does not have, first model.layers.0.mlp.extra"),
        (lambda names: names | {"score.weight"}, "does not have, first score.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: object, sentence: str) -> None:
    weights = WeightMap(replace(MODELS["qwen2"], tied=True))
    weights.check_hf_names(weights.hf_names() | {"lm_head.weight"})
    with pytest.raises(UserError, match=sentence):
        weights.check_hf_names(change(weights.hf_names()))  # type: ignore[operator]


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_may_begin_as_a_policy_where_it_is_said(tied: bool) -> None:
    arch = replace(MODELS["qwen2"], tied=tied)
    critic, policy = WeightMap(arch, values=True), WeightMap(arch).hf_names()
    critic.check_hf_names(policy | {"score.weight", "score.bias"})
    critic.check_hf_names(policy, headless=True)
    with pytest.raises(UserError, match=r"lacks 2 tensors, first score\.bias"):
        critic.check_hf_names(policy)
    critic.check_hf_names(policy | {"score.weight"}, headless=True)
    with pytest.raises(UserError, match=r"lacks 1 tensors, first score\.weight"):
        critic.check_hf_names(policy | {"score.bias"}, headless=True)
