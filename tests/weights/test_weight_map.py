"""Tests that the weight map is a bit-exact bijection for every family and layout, with layers in Megatron's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from rlsys.errors import Code
from rlsys.weights.weight_map import (
    Architecture,
    ShardLoader,
    WeightMap,
    architecture_of,
    chunk_layers,
    expert_block,
    stage_layers,
)
from tests.support import tiny_configs
from tests.support.refusals import refused

FAMILIES = {name: architecture_of(config()) for name, config in tiny_configs.FAMILIES.items()}
FAMILIES["deepseek_v2 with latent queries"] = architecture_of(tiny_configs.deepseek(q_lora_rank=20))
FAMILIES["exaone4"] = architecture_of(tiny_configs.exaone4(), tiny_configs.OWN_FAMILY)
QWEN2, MOE, LATENT = FAMILIES["qwen2"], FAMILIES["qwen3_moe"], FAMILIES["deepseek_v2 with latent queries"]


def checkpoint_of(weights: WeightMap) -> dict[str, Tensor]:
    """A checkpoint of the model, with different bits in all elements, some of which are infinite or NaN."""
    entries = weights.entries()
    shapes = {hf: shape for entry in entries for hf, shape in zip(entry.hf, entry.rule.shapes, strict=True)}
    sizes = list(map(prod, shapes.values()))
    parts = torch.arange(0x7F800000 - 20, 0x7F800000 - 20 + sum(sizes), dtype=torch.int32).view(torch.float32)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts.split(sizes), strict=True)}


def expected_shard(arch: Architecture, name: str, parts: Sequence[Tensor], rank: int, tp: int) -> Tensor:
    """The tensor `name` as Megatron reads it on a TP rank, built row by row from whole Hugging Face tensors."""
    if "linear_qkv" in name:
        rows = []
        per_group = arch.heads // arch.kv_heads
        query, key = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        q, k, v = parts if len(parts) == 3 else parts[0].split([query, key, key])
        for group in range(arch.kv_heads):
            for head in range(group * per_group, (group + 1) * per_group):
                rows += [q[head * arch.head_dim + i] for i in range(arch.head_dim)]
            rows += [k[group * arch.head_dim + i] for i in range(arch.head_dim)]
            rows += [v[group * arch.head_dim + i] for i in range(arch.head_dim)]
        each = len(rows) // tp
        return torch.stack(rows[rank * each : (rank + 1) * each])
    if "linear_fc1" in name:
        gate, up = parts if len(parts) == 2 else (parts[0][: arch.ffn], parts[0][arch.ffn :])
        each = len(gate) // tp
        mine = range(rank * each, (rank + 1) * each)
        return torch.stack([gate[row] for row in mine] + [up[row] for row in mine])
    (whole,) = parts
    if name.endswith("softmax_offset"):
        each = arch.heads // tp
        return torch.stack([whole[rank * each + i] for i in range(each)])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        each = whole.shape[1] // tp
        return torch.stack([whole[:, rank * each + i] for i in range(each)], dim=1)
    if name.endswith(("linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight")):
        each = len(whole) // tp
        return torch.stack([whole[rank * each + i] for i in range(each)])
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        padded = next(rows for rows in range(len(whole), len(whole) + lcm(128, tp)) if rows % 128 == rows % tp == 0)
        mine = range(rank * padded // tp, (rank + 1) * padded // tp)
        return torch.stack([whole[row] if row < len(whole) else torch.zeros_like(whole[0]) for row in mine])
    return whole


def same(one: Tensor, other: Tensor) -> bool:
    """Compare bits, so that NaNs of the same bits are equal."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def stage_names(weights: WeightMap, layers: range, first: bool, last: bool, experts: range) -> list[str]:
    """Names of the Megatron tensors of a pipeline stage and expert rank; a tied last stage has its own embedding."""
    entries = weights.entries()
    held = [entry for entry in entries if entry.layer in layers and (entry.expert is None or entry.expert in experts)]
    (embedding, *_), after = entries, [entry for entry in entries[1:] if entry.layer is None]
    ends = after + ([] if first else weights.copies()) if last else []
    return [entry.name for entry in [*([embedding] if first else []), *held, *ends]]


@dataclass(frozen=True)
class Case:
    """A model and a layout; `tp` may be larger than the number of query groups, and need not divide the model."""

    arch: Architecture
    tp: int
    ep: int
    stages: list[int]
    """Number of layers of each pipeline stage."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp = draw(st.integers(1, 4))
    unit = draw(st.sampled_from([1, tp]))
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stages = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    family = draw(st.sampled_from(list(FAMILIES.values())))
    arch = replace(
        family,
        layers=sum(stages),
        hidden=draw(st.integers(1, 9)),
        heads=groups * per_group,
        kv_heads=groups,
        head_dim=draw(st.integers(1, 3)) * unit,
        ffn=draw(st.integers(1, 5)) * unit,
        vocab=draw(st.integers(1, 300)),
        tied=draw(st.booleans()),
        experts=family.experts and draw(st.sampled_from([2, 4])),
        expert_ffn=draw(st.integers(1, 5)) * (tp if family.shared_experts else 1),
    )
    return Case(arch, tp, draw(st.sampled_from([1, 2])) if arch.experts else 1, stages)


def _divides(arch: Architecture, tp: int) -> bool:
    """Tell if the TP size divides every sharded tensor; experts are not sharded, but those that all tokens share."""
    fused = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
    mlp = arch.ffn if arch.dense_layers or not arch.experts else tp
    cut = [fused, arch.heads * (1 if arch.sinks else arch.head_dim), mlp]
    if arch.kv_lora_rank:
        heads = (arch.head_dim, arch.v_head_dim, arch.qk_nope_head_dim + arch.v_head_dim)
        cut = [*(arch.heads * size for size in heads), mlp]
    return all(size % tp == 0 for size in cut)


@settings(max_examples=50)
@given(case=cases(), values=st.booleans(), random=st.randoms())
@example(case=Case(QWEN2, 2, 1, [1, 2]), values=False, random=Random(1))
@example(case=Case(FAMILIES["phi3"], 2, 1, [2, 1]), values=False, random=Random(1))
@example(case=Case(FAMILIES["glm4"], 2, 1, [1, 2]), values=False, random=Random(1))
@example(case=Case(MOE, 2, 2, [2, 1]), values=False, random=Random(1))
@example(case=Case(FAMILIES["deepseek_v2"], 2, 2, [1, 2]), values=False, random=Random(1))
@example(case=Case(LATENT, 2, 2, [2, 1]), values=False, random=Random(1))
@example(case=Case(FAMILIES["gpt_oss"], 2, 2, [1, 2]), values=False, random=Random(1))
def test_every_layout_shards_as_megatron_reads_and_merges_bit_for_bit(case: Case, values: bool, random: Random) -> None:
    """Tensors come in any order; a TP size that does not divide them is refused."""
    arch, tp, ep, counts = case.arch, case.tp, case.ep, case.stages
    weights = WeightMap(arch, values)
    checkpoint = checkpoint_of(weights)
    order = random.sample(sorted(checkpoint), len(checkpoint))
    back: dict[str, Tensor] = {}
    for stage, layers in enumerate(stage_layers(arch.layers, len(counts), counts)):
        for ep_rank in range(ep):
            experts = expert_block(arch.experts, ep, ep_rank)
            names = stage_names(weights, layers, stage == 0, stage == len(counts) - 1, experts)
            if not _divides(arch, tp):
                with refused("mismatch", "tp"):
                    _sharded(weights, names, checkpoint, order, tp)
                return
            for name, pieces in _sharded(weights, names, checkpoint, order, tp).items():
                entry = weights.entry(name)
                if entry.rule.exported and (entry.expert is not None or ep_rank == 0):
                    merged = dict(weights.merge(entry, pieces[:1] if entry.expert is not None else pieces))
                    assert not back.keys() & merged.keys(), "a tensor is exported twice"
                    back |= merged
    assert back.keys() == checkpoint.keys()
    assert [name for name, tensor in checkpoint.items() if not same(back[name], tensor)] == []


def _sharded(
    weights: WeightMap, names: list[str], checkpoint: dict[str, Tensor], order: list[str], tp: int
) -> dict[str, list[Tensor]]:
    """Return the shards of all TP ranks of a stage and expert rank; compares each with what Megatron reads."""
    shards: dict[str, list[Tensor]] = {name: [] for name in names}
    arch = weights.architecture
    for rank in range(tp):
        loader = ShardLoader(weights, names, rank, tp, lambda name, shard: shards[name].append(shard))
        wanted = {hf for name in names for hf in weights.entry(name).hf}
        for number, hf in enumerate(order):
            assert loader.missing() == sorted(wanted & set(order[number:]))
            loader.feed(hf, checkpoint[hf])
        for name in names:
            entry = weights.entry(name)
            cut = (rank, tp) if entry.expert is None else (0, 1)
            parts = [checkpoint[hf] for hf in entry.hf]
            assert same(shards[name][rank], expected_shard(arch, name, parts, *cut)), name
            assert prod(weights.whole_shape(entry, tp)) in (shards[name][rank].numel() * n for n in (1, tp))
    return shards


@pytest.mark.parametrize(
    ("of_engine", "name", "numbers"),
    [
        ("mlp.experts.linear_fc1.weight2", "mlp.experts.local_experts.2.linear_fc1.weight", (2, 2)),
        ("mlp.experts.linear_fc2.weight13", "mlp.experts.local_experts.13.linear_fc2.weight", (2, 13)),
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", (2, None)),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight", (2, None)),
    ],
)
def test_transformer_engine_names_map_to_the_same_tensors(
    of_engine: str, name: str, numbers: tuple[int, int | None]
) -> None:
    entry = WeightMap(replace(MOE, experts=16)).entry(f"decoder.layers.2.{of_engine}")
    assert entry.name == f"decoder.layers.2.{name}"
    assert (entry.layer, entry.expert) == numbers


def test_layers_with_and_without_experts_have_tensors_of_their_own() -> None:
    weights = WeightMap(LATENT)
    fused = {"linear_q_up_proj": "q_layernorm", "linear_kv_up_proj": "kv_layernorm"}
    for layer, norm in fused.items():
        entry = weights.entry(f"decoder.layers.2.self_attention.{layer}.layer_norm_weight")
        assert entry.name == f"decoder.layers.2.self_attention.{norm}.weight"
    dense, routed = "mlp.linear_fc2.weight", ("mlp.router.weight", "mlp.shared_experts.linear_fc2.weight")
    absent = [f"decoder.layers.0.{name}" for name in routed] + [f"decoder.layers.{layer}.{dense}" for layer in (1, 2)]
    for name in absent:
        with pytest.raises(KeyError):
            weights.entry(name)
    assert weights.entry(f"decoder.layers.0.{dense}").hf == ("model.layers.0.mlp.down_proj.weight",)
    assert weights.entry(f"decoder.layers.2.{routed[0]}").hf == ("model.layers.2.mlp.gate.weight",)


def test_name_outside_of_the_model_is_unknown() -> None:
    layer, expert, dense = "3.input_layernorm.weight", "0.mlp.experts.linear_fc1.weight4", "0.mlp.linear_fc1.weight"
    for name in (*(f"decoder.layers.{rest}" for rest in (layer, expert, dense)), "value_head.weight"):
        with pytest.raises(KeyError):
            WeightMap(MOE).entry(name)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda names: names - {"model.norm.weight"}, "model.norm.weight"),
        (lambda names: names | {"model.layers.0.mlp.extra"}, "model.layers.0.mlp.extra"),
        (lambda names: names | {"score.weight"}, "score.weight"),
    ],
)
def test_missing_or_unknown_tensor_names_are_refused(change: Callable[[set[str]], set[str]], key: str) -> None:
    weights = WeightMap(replace(QWEN2, tied=True))
    weights.check_hf_names(weights.hf_names() | {"lm_head.weight"})
    with refused("mismatch", key):
        weights.check_hf_names(change(weights.hf_names()))


@pytest.mark.parametrize("tied", [True, False])
def test_critic_accepts_a_policy_checkpoint_only_when_headless_is_allowed(tied: bool) -> None:
    arch = replace(QWEN2, tied=tied)
    critic, policy = WeightMap(arch, values=True), WeightMap(arch).hf_names()
    critic.check_hf_names(policy | {"score.weight", "score.bias"})
    critic.check_hf_names(policy, headless=True)
    critic.check_hf_names(policy | {"score.weight"}, headless=True)
    with refused("mismatch", "score.bias"):
        critic.check_hf_names(policy)
    with refused("mismatch", "score.weight"):
        critic.check_hf_names(policy | {"score.bias"}, headless=True)


@pytest.mark.parametrize(
    ("layers", "pp", "virtual", "first", "last"),
    [(12, 2, 3, None, None), (12, 3, 2, 2, 4), (10, 3, 2, 2, None), (8, 4, 1, 1, 3)],
)
def test_virtual_stages_hold_the_same_layers_as_in_megatron(
    layers: int, pp: int, virtual: int, first: int | None, last: int | None
) -> None:
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=torch.float32,
    )
    stages = [None] if virtual == 1 else list(range(virtual))
    counts = [[get_num_layers_to_build(config, stage, rank) for stage in stages] for rank in range(pp)]
    chunks = chunk_layers(layers, counts)
    for rank in range(pp):
        for stage, held in zip(stages, chunks[rank], strict=True):
            assert held.start == get_transformer_layer_offset(config, stage, rank)
    assert sorted(layer for rank in chunks for held in rank for layer in held) == list(range(layers))


def test_virtual_stages_may_be_uneven_or_empty() -> None:
    """The chunks' order is rank 0, rank 1, rank 0, rank 1; the first chunk of the second rank is empty."""
    assert chunk_layers(4, [[2, 1], [0, 1]]) == [[range(2), range(2, 3)], [range(2, 2), range(3, 4)]]
    with pytest.raises(ValueError, match="4 layers"):
        chunk_layers(4, [[2, 1], [1]])


@pytest.mark.parametrize(
    ("cut", "code", "key"),
    [
        pytest.param(lambda: stage_layers(5, 2, [5, 0]), "out_of_range", "pp_layers", id="empty stage"),
        pytest.param(lambda: stage_layers(5, 2, [5]), "out_of_range", "pp_layers", id="too few stages"),
        pytest.param(lambda: stage_layers(5, 2, [2, 2]), "out_of_range", "pp_layers", id="too few layers"),
        pytest.param(lambda: stage_layers(5, 2), "mismatch", "pp", id="stages that do not divide the layers"),
        pytest.param(lambda: expert_block(6, 4, 0), "mismatch", "ep", id="ranks that do not divide the experts"),
        pytest.param(lambda: expert_block(0, 4, 0), "mismatch", "ep", id="no experts"),
    ],
)
def test_stages_and_expert_blocks_that_do_not_fit_the_model_are_refused(
    cut: Callable[[], object], code: Code, key: str
) -> None:
    with refused(code, key):
        cut()
