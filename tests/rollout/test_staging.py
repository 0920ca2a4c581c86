"""A staged version: what it takes, refuses and hands out, and what it predicts that the engine will hold.

Tensors are filled so that each row says where it comes from.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from rlsys.rollout.engine import Layout, StagedVersion, sha256_prefix
from rlsys.weights.transport import Bucket, ChecksumError, digest, pack, pack_into

TENSORS = [(f"model.layers.{n}.input_layernorm.weight", torch.arange(50.0) + n) for n in range(4)]
PREFIX = "model.layers.0"


def staged() -> StagedVersion:
    return StagedVersion(3, Layout(tp=1, kv_heads=1, tied=True, dtype=torch.float32), sha256_prefix)


def digest_of(*buckets: Bucket) -> str:
    return digest({record.name: record.checksum for bucket in buckets for record in bucket.records})


def test_what_is_handed_out_is_what_came_however_the_lent_memory_changes() -> None:
    version = staged()
    buckets = list(pack(TENSORS, bucket_bytes=300))
    for bucket in buckets:
        version.take(bucket)
        bucket.data[:] = 255
    assert version.nbytes == sum(tensor.nbytes for _, tensor in TENSORS)
    version.check(3, digest_of(*buckets))
    out = [
        bucket.data[record.offset : record.offset + record.nbytes].view(np.float32)
        for bucket in version.hand_out()
        for record in bucket.records
    ]
    np.testing.assert_array_equal(out, [tensor.numpy() for _, tensor in TENSORS])
    assert list(version.hand_out()) == [], "handed out twice, and so held twice"


def test_what_was_not_sent_is_refused() -> None:
    version = staged()
    (bucket,) = pack(TENSORS, bucket_bytes=1 << 20)
    with pytest.raises(ChecksumError):
        version.check(3, digest_of(bucket))
    version.take(bucket)
    version.check(3, digest_of(bucket))
    with pytest.raises(ChecksumError):
        version.check(4, digest_of(bucket))
    bucket.data[bucket.records[2].offset] ^= 1
    with pytest.raises(ChecksumError, match=TENSORS[2][0]):
        staged().take(bucket)


@pytest.mark.parametrize("how", ["kept", "moved", "moved later"])
def test_what_comes_on_a_device_is_checked_and_kept_there_or_moved(how: str) -> None:
    version = staged()
    room = torch.empty(10_000, dtype=torch.uint8)
    bucket = pack_into(room, TENSORS)
    version.take(bucket, to_host=how == "moved")
    room[:] = 255
    if how == "moved later":
        version.leave_device()
    version.check(3, digest_of(bucket))
    (out,) = version.hand_out()
    for record, (_, tensor) in zip(out.records, TENSORS, strict=True):
        arrived = out.flat[record.offset : record.offset + record.nbytes].view(torch.float32)
        assert torch.equal(arrived, tensor)
    assert version.mismatches([{name: sha256_prefix(tensor) for name, tensor in TENSORS}]) == []
    with pytest.raises(ChecksumError, match=TENSORS[0][0]):
        staged().take(bucket, to_host=how == "moved")


def rows(first: int, count: int, width: int = 2) -> torch.Tensor:
    """Row i is filled with `first + i`."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].repeat(1, width)


def columns(first: int, count: int) -> torch.Tensor:
    return rows(first, count).T.contiguous()


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
        f"{PREFIX}.mlp.down_proj.weight": columns(0, 4),
        f"{PREFIX}.input_layernorm.weight": torch.tensor([7.0, 8.0]),
    }
    assert row_numbers(layout, tensors) == [
        {
            f"{PREFIX}.self_attn.qkv_proj.weight": [0, 1, 10, 20],
            f"{PREFIX}.mlp.gate_up_proj.weight": [30, 31, 40, 41],
            f"{PREFIX}.mlp.down_proj.weight": [0, 0],
            f"{PREFIX}.input_layernorm.weight": [7, 8],
        },
        {
            f"{PREFIX}.self_attn.qkv_proj.weight": [2, 3, 11, 21],
            f"{PREFIX}.mlp.gate_up_proj.weight": [32, 33, 42, 43],
            f"{PREFIX}.mlp.down_proj.weight": [2, 2],
            f"{PREFIX}.input_layernorm.weight": [7, 8],
        },
    ]


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
    held = StagedVersion(0, Layout(tp=1, kv_heads=2, tied=False, dtype=torch.float32, experts=2), sha256_prefix)
    norm = torch.tensor([1.0])
    for name in ("model.norm.weight", "model.extra.weight", "model.changed.weight"):
        held.predict(name, norm)
    held.predict(f"{PREFIX}.mlp.up_proj.weight", rows(0, 2))
    held.predict(f"{PREFIX}.mlp.experts.1.down_proj.weight", rows(0, 2))
    reported = {"model.norm.weight": sha256_prefix(norm), "model.unsent.weight": sha256_prefix(norm)}
    reported["model.changed.weight"] = sha256_prefix(norm + 1e-6)
    assert held.mismatches([reported]) == [
        "model.changed.weight",
        "model.extra.weight",
        f"{PREFIX}.mlp.experts.w2_weight",
        f"{PREFIX}.mlp.gate_up_proj.weight",
        "model.unsent.weight",
    ]


def test_experts_lie_one_after_the_other_each_cut_over_ranks() -> None:
    layout = Layout(tp=2, kv_heads=2, tied=False, dtype=torch.float32, experts=2)
    experts = f"{PREFIX}.mlp.experts"
    tensors = {
        f"{experts}.1.up_proj.weight": rows(70, 4),
        f"{experts}.0.gate_proj.weight": rows(0, 4),
        f"{experts}.1.down_proj.weight": columns(50, 4),
        f"{PREFIX}.mlp.gate.weight": rows(90, 2),
        f"{experts}.1.gate_proj.weight": rows(60, 4),
        f"{experts}.0.up_proj.weight": rows(10, 4),
        f"{experts}.0.down_proj.weight": columns(40, 4),
    }
    first, second = row_numbers(layout, tensors)
    assert first[f"{experts}.w13_weight"] == [0, 1, 10, 11, 60, 61, 70, 71]
    assert second[f"{experts}.w13_weight"] == [2, 3, 12, 13, 62, 63, 72, 73]
    assert first[f"{experts}.w2_weight"] == [40, 40, 50, 50]
    assert second[f"{experts}.w2_weight"] == [42, 42, 52, 52]
    assert first[f"{PREFIX}.mlp.gate.weight"] == second[f"{PREFIX}.mlp.gate.weight"] == [90, 91]


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
