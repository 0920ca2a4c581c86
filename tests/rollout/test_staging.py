"""Tests of a staged version: buckets, checksums, and the predicted tensors of each rank.

Each row of a tensor is filled with a number that identifies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlsys.rollout.sglang_weights import Layout, SglangWeights, sha256_prefix
from rlsys.rollout.staging import StagedVersion
from rlsys.weights.bucket import ChecksumError, pack_into, unpack
from rlsys.weights.transport import bucket_memory
from rlsys.weights.weight_map import WeightMap, architecture_of
from tests.support import tiny_configs
from tests.support.tensors import digest_of, pack

TENSORS = [(f"model.layers.{n}.input_layernorm.weight", torch.arange(50.0) + n) for n in range(4)]
ATTENTION = "model.layers.0.self_attn"
SPLIT = (
    [(f"{ATTENTION}.q_proj.bias", torch.tensor([1.0])), *TENSORS],
    [(f"{ATTENTION}.{x}_proj.bias", torch.tensor([2.0])) for x in "kv"],
)
"""Tensors of two buckets, of which the engine fuses one of the first with those of the second."""


def weight_map(family: str = "qwen2", **changes: Any) -> WeightMap:
    """Map of a tiny model with two key-value heads, `changes` are fields of its architecture. Its sizes do not matter."""
    return WeightMap(replace(architecture_of(tiny_configs.FAMILIES[family]()), **changes))


def staged() -> StagedVersion:
    return StagedVersion(3, SglangWeights(weight_map(), Layout(tp=1, dtype=torch.float32), sha256_prefix))


def test_adapters_are_checked_with_the_version_and_not_given_to_the_engine() -> None:
    """The engine holds the weights with the adapters merged into them."""
    adapters = [(f"base_model.model.{ATTENTION}.q_proj.lora_{matrix}.weight", torch.ones(2, 3)) for matrix in "AB"]
    version, memory = staged(), bucket_memory(10_000, None)
    buckets = [pack_into(memory.copy(), tensors) for tensors in (SPLIT[0], [*SPLIT[1], adapters[0]], adapters[1:])]
    for bucket in buckets:
        version.stage(bucket)
    version.check(3, digest_of(buckets))
    with pytest.raises(ChecksumError):
        version.check(3, digest_of(buckets[:2]))
    out = [record.name for bucket in version.pop_buckets() for record, _ in unpack(bucket)]
    assert out == [name for tensors in SPLIT for name, _ in tensors]
    assert not version.weights.incomplete()
    assert not any("lora" in name for name in version.weights.hashes[0])


@pytest.mark.parametrize("case", ["from host memory", "kept on a device", "moved", "moved later"])
def test_staged_tensors_are_those_received_though_the_lent_memory_changes(case: str) -> None:
    version = staged()
    memory = bucket_memory(10_000, None if case == "from host memory" else torch.device("cpu"))
    buckets = []
    for tensors in SPLIT:
        buckets.append(pack_into(memory, tensors))
        version.stage(buckets[-1], to_host=case == "moved")
        memory[:] = 255
    if case == "moved later":
        version.move_to_host()
    assert version.nbytes == sum(bucket.flat.nbytes for bucket in buckets)
    version.check(3, digest_of(buckets))
    out = [held for bucket in version.pop_buckets() for held in unpack(bucket)]
    for (record, arrived), (name, tensor) in zip(out, [*SPLIT[0], *SPLIT[1]], strict=True):
        assert record.name == name
        assert torch.equal(arrived, tensor)
    assert list(version.pop_buckets()) == [], "tensors are kept after they were handed out"
    fused = {f"{ATTENTION}.qkv_proj.bias": sha256_prefix([torch.tensor([1.0, 2.0, 2.0])])}
    assert version.weights.mismatches([fused | {name: sha256_prefix([tensor]) for name, tensor in TENSORS}]) == []
    with pytest.raises(ChecksumError, match=SPLIT[1][0][0]):
        staged().stage(buckets[1], to_host=case == "moved")


def test_other_digest_or_version_is_refused() -> None:
    version = staged()
    (bucket,) = pack(TENSORS, bucket_bytes=1 << 20)
    with pytest.raises(ChecksumError):
        version.check(3, digest_of([bucket]))
    version.stage(bucket)
    version.check(3, digest_of([bucket]))
    with pytest.raises(ChecksumError):
        version.check(4, digest_of([bucket]))


def rows(first: int, count: int, width: int = 2) -> torch.Tensor:
    """Return a matrix [count, width] whose row i is filled with `first + i`."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].repeat(1, width)


def columns(first: int, count: int) -> torch.Tensor:
    return rows(first, count).T.contiguous()


def layout(**changes: Any) -> Layout:
    return Layout(**{"tp": 2, "dtype": torch.float32, **changes})


QWEN2, MOE, GLM4, PHI3 = weight_map(), weight_map("qwen3_moe", experts=2), weight_map("glm4"), weight_map("phi3")
LITE, LATENT = weight_map("deepseek_v2"), weight_map("deepseek_v2", q_lora_rank=20)
DOWN_TO_LATENTS = {"self_attn.kv_a_proj_with_mqa": rows(10, 2), "self_attn.q_a_proj": rows(0, 2)}
SHARED = {"mlp.shared_experts.up_proj": rows(10, 2), "mlp.shared_experts.gate_proj": rows(0, 2)}
QKV = {"self_attn.v_proj": rows(20, 2), "self_attn.q_proj": rows(0, 4), "self_attn.k_proj": rows(10, 2)}
GATE_UP = {"mlp.up_proj": rows(5, 3), "mlp.gate_proj": rows(1, 3)}
EXPERTS = {
    "mlp.experts.1.up_proj": rows(70, 4),
    "mlp.experts.0.gate_proj": rows(0, 4),
    "mlp.experts.1.gate_proj": rows(60, 4),
    "mlp.experts.0.up_proj": rows(10, 4),
}
HELD = [[0, 1, 10, 11, 60, 61, 70, 71], [2, 3, 12, 13, 62, 63, 72, 73]]
DOWN = {"mlp.experts.1.down_proj": columns(50, 4), "mlp.experts.0.down_proj": columns(40, 4)}
PADDED = layout(tp=1, width_padding=4)
LAYER = "model.layers.0"


@pytest.mark.parametrize(
    ("weights", "layout", "sent", "name", "held"),
    [
        (QWEN2, layout(), QKV, "self_attn.qkv_proj.weight", [[0, 1, 10, 20], [2, 3, 11, 21]]),
        (QWEN2, layout(tp=4), QKV, "self_attn.qkv_proj.weight", [[0, 10, 20], [1, 10, 20], [2, 11, 21], [3, 11, 21]]),
        (QWEN2, layout(), {"self_attn.o_proj": columns(0, 4)}, "self_attn.o_proj.weight", [[0, 0], [2, 2]]),
        (QWEN2, layout(), {"mlp.down_proj": columns(0, 4)}, "mlp.down_proj.weight", [[0, 0], [2, 2]]),
        (QWEN2, layout(), {"input_layernorm": torch.tensor([7.0, 8.0])}, "input_layernorm.weight", [[7, 8], [7, 8]]),
        (MOE, layout(), EXPERTS, "mlp.experts.w13_weight", HELD),
        (MOE, layout(), DOWN, "mlp.experts.w2_weight", [[40, 40, 50, 50], [42, 42, 52, 52]]),
        (MOE, layout(), {"mlp.gate": rows(90, 2)}, "mlp.gate.weight", [[90, 91], [90, 91]]),
        (QWEN2, PADDED, GATE_UP, "mlp.gate_up_proj.weight", [[1, 2, 3, 0, 5, 6, 7, 0]]),
        (QWEN2, PADDED, {"mlp.down_proj": torch.tensor([[1.0, 2.0, 3.0]])}, "mlp.down_proj.weight", [[1, 2, 3, 0]]),
        (GLM4, layout(), {"mlp.gate_up_proj": rows(0, 8)}, "mlp.gate_up_proj.weight", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (PHI3, layout(), {"self_attn.qkv_proj": rows(0, 8)}, "self_attn.qkv_proj.weight", [[0, 1, 4, 6], [2, 3, 5, 7]]),
        (LATENT, layout(), DOWN_TO_LATENTS, "self_attn.fused_qkv_a_proj_with_mqa.weight", [[0, 1, 10, 11]] * 2),
        (LITE, layout(), {"self_attn.kv_a_proj_with_mqa": rows(0, 2)}, "self_attn.kv_a_proj_with_mqa.weight", [[0, 1]] * 2),
        (LITE, layout(), {"self_attn.kv_b_proj": rows(0, 4)}, "self_attn.kv_b_proj.weight", [[0, 1], [2, 3]]),
        (GLM4, layout(), {"post_mlp_layernorm": torch.tensor([7.0, 8.0])}, "post_mlp_layernorm.weight", [[7, 8], [7, 8]]),
    ],
)  # fmt: skip
def test_tensor_of_each_rank_is_predicted(
    weights: WeightMap, layout: Layout, sent: dict[str, torch.Tensor], name: str, held: list[list[float]]
) -> None:
    """`held` has the first column of each rank's matrix, or the only row if the matrix has one."""
    predicted = prediction(weights, layout, {f"{LAYER}.{module}.weight": tensor for module, tensor in sent.items()})
    assert predicted == [{f"{LAYER}.{name}": values} for values in held]


def test_shared_expert_is_predicted_in_a_layer_with_experts() -> None:
    """The first layer has none."""
    sent = {f"model.layers.1.{module}.weight": tensor for module, tensor in SHARED.items()}
    name = "model.layers.1.mlp.shared_experts.gate_up_proj.weight"
    assert prediction(LITE, layout(), sent) == [{name: [0, 10]}, {name: [1, 11]}]


def prediction(weights: WeightMap, layout: Layout, sent: dict[str, torch.Tensor]) -> list[dict[str, list[float]]]:
    """The tensors that each rank holds."""
    seen: list[list[float]] = []

    def remember(parts: Sequence[torch.Tensor]) -> str:
        tensor = torch.cat(list(parts))
        seen.append((tensor if tensor.dim() == 1 else tensor[0] if len(tensor) == 1 else tensor[:, 0]).tolist())
        return str(len(seen) - 1)

    check = SglangWeights(weights, layout, remember)
    for name, tensor in sent.items():
        check.predict(name, tensor)
    return [{name: seen[int(key)] for name, key in hashes.items()} for hashes in check.hashes]


def test_vocabulary_is_padded_and_a_tied_output_layer_is_no_tensor_of_the_engine() -> None:
    sent = {"model.embed_tokens.weight": rows(1, 65), "lm_head.weight": rows(1, 65)}
    padded = [[*range(1, 65)], [65] + [0] * 63]
    tied = [{"model.embed_tokens.weight": values} for values in padded]
    assert prediction(QWEN2, layout(), sent) == tied
    both = [held | {"lm_head.weight": values} for held, values in zip(tied, padded, strict=True)]
    assert prediction(weight_map(tied=False), layout(), sent) == both
    # SGLang's Gemma 3 holds its embedding whole on every rank.
    whole = [{"model.embed_tokens.weight": [*range(1, 66)]}] * 2
    assert prediction(weight_map("gemma3_text"), layout(), sent) == whole


def test_missing_extra_and_changed_tensors_are_named() -> None:
    weights = SglangWeights(MOE, layout(tp=1), sha256_prefix)
    norm, names = torch.tensor([1.0]), [f"model.layers.{layer}.input_layernorm.weight" for layer in range(3)]
    for name in names:
        weights.predict(name, norm)
    weights.predict(f"{LAYER}.self_attn.q_proj.weight", rows(0, 2))
    weights.predict(f"{LAYER}.mlp.experts.1.down_proj.weight", rows(0, 2))
    reported = {names[0]: sha256_prefix([norm]), "unsent.weight": sha256_prefix([norm])}
    reported[names[1]] = sha256_prefix([norm + 1e-6])
    wrong = [
        names[1],
        names[2],
        f"{LAYER}.mlp.experts.w2_weight",
        f"{LAYER}.self_attn.qkv_proj.weight",
        "unsent.weight",
    ]
    assert weights.mismatches([reported]) == sorted(wrong)
