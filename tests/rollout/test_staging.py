"""Tests of a staged version: buckets, checksums, and the predicted tensors of each rank.

Each row of a tensor is filled with a number that identifies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlsys.rollout.sglang_weights import Layout, SglangWeights, sha256_prefix
from rlsys.rollout.staging import StagedVersion
from rlsys.weights.transport import ChecksumError, bucket_memory, pack_into, unpack
from tests.support.tensors import digest_of, pack

TENSORS = [(f"model.layers.{n}.input_layernorm.weight", torch.arange(50.0) + n) for n in range(4)]
SPLIT = [("m.q_proj.bias", torch.tensor([1.0])), *TENSORS], [(f"m.{x}_proj.bias", torch.tensor([2.0])) for x in "kv"]
"""Tensors of two buckets, of which the engine fuses one of the first with those of the second."""


def staged() -> StagedVersion:
    return StagedVersion(3, SglangWeights(Layout(tp=1, kv_heads=1, tied=True, dtype=torch.float32), sha256_prefix))


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
    fused = {"m.qkv_proj.bias": sha256_prefix([torch.tensor([1.0, 2.0, 2.0])])}
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
    return Layout(**{"tp": 2, "kv_heads": 2, "tied": True, "dtype": torch.float32, **changes})


QKV = {"v_proj": rows(20, 2), "q_proj": rows(0, 4), "k_proj": rows(10, 2)}
GATE_UP = {"up_proj": rows(5, 3), "gate_proj": rows(1, 3)}
EXPERTS = {
    "experts.1.up_proj": rows(70, 4),
    "experts.0.gate_proj": rows(0, 4),
    "experts.1.gate_proj": rows(60, 4),
    "experts.0.up_proj": rows(10, 4),
}
DOWN = {"experts.1.down_proj": columns(50, 4), "experts.0.down_proj": columns(40, 4)}
PADDED = layout(tp=1, width_padding=4)


@pytest.mark.parametrize(
    ("layout", "sent", "name", "held"),
    [
        (layout(), QKV, "qkv_proj.weight", [[0, 1, 10, 20], [2, 3, 11, 21]]),
        (layout(tp=4), QKV, "qkv_proj.weight", [[0, 10, 20], [1, 10, 20], [2, 11, 21], [3, 11, 21]]),
        (layout(), {"down_proj": columns(0, 4)}, "down_proj.weight", [[0, 0], [2, 2]]),
        (layout(), {"norm": torch.tensor([7.0, 8.0])}, "norm.weight", [[7, 8], [7, 8]]),
        (layout(), {"embed_tokens": rows(1, 65)}, "embed_tokens.weight", [[*range(1, 65)], [65] + [0] * 63]),
        (layout(experts=2), EXPERTS, "experts.w13_weight", [[0, 1, 10, 11, 60, 61, 70, 71], [2, 3, 12, 13, 62, 63, 72, 73]]),
        (layout(experts=2), DOWN, "experts.w2_weight", [[40, 40, 50, 50], [42, 42, 52, 52]]),
        (layout(experts=2), {"gate": rows(90, 2)}, "gate.weight", [[90, 91], [90, 91]]),
        (PADDED, GATE_UP, "gate_up_proj.weight", [[1, 2, 3, 0, 5, 6, 7, 0]]),
        (PADDED, {"down_proj": torch.tensor([[1.0, 2.0, 3.0]])}, "down_proj.weight", [[1, 2, 3, 0]]),
    ],
)  # fmt: skip
def test_tensor_of_each_rank_is_predicted(
    layout: Layout, sent: dict[str, torch.Tensor], name: str, held: list[list[float]]
) -> None:
    """`held` has the first column of each rank's matrix, or the only row if the matrix has one."""
    seen: list[list[float]] = []

    def remember(parts: Sequence[torch.Tensor]) -> str:
        tensor = torch.cat(list(parts))
        seen.append((tensor if tensor.dim() == 1 else tensor[0] if len(tensor) == 1 else tensor[:, 0]).tolist())
        return str(len(seen) - 1)

    weights = SglangWeights(layout, remember)
    for module, tensor in sent.items():
        weights.predict(f"layers.0.{module}.weight", tensor)
    assert [hashes.keys() for hashes in weights.hashes] == [{f"layers.0.{name}"}] * layout.tp
    assert [seen[int(key)] for hashes in weights.hashes for key in hashes.values()] == held


def test_missing_extra_and_changed_tensors_are_named() -> None:
    weights = SglangWeights(layout(tp=1, experts=2), sha256_prefix)
    norm = torch.tensor([1.0])
    for name in ("norm.weight", "extra.weight", "changed.weight"):
        weights.predict(name, norm)
    weights.predict("m.up_proj.weight", rows(0, 2))
    weights.predict("lm_head.weight", rows(0, 2))  # The embedding is tied, so the engine has no such tensor.
    weights.predict("m.experts.1.down_proj.weight", rows(0, 2))
    reported = {"norm.weight": sha256_prefix([norm]), "unsent.weight": sha256_prefix([norm])}
    reported["changed.weight"] = sha256_prefix([norm + 1e-6])
    wrong = ["changed.weight", "extra.weight", "m.experts.w2_weight", "m.gate_up_proj.weight", "unsent.weight"]
    assert weights.mismatches([reported]) == wrong
