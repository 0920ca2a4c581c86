"""Tests of weight buckets: packing and unpacking, checksums and digests, the smallest bucket of a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.config.schema import Dtype
from rlsys.weights import bucket as bucket_module
from rlsys.weights.bucket import (
    Bucket,
    BucketFullError,
    ChecksumError,
    checksum,
    digest,
    hash_pieces,
    pack_into,
    unpack,
)
from rlsys.weights.weight_map import WeightMap, largest_tensor_bytes, read_architecture
from tests.support import tiny_configs
from tests.support.paths import PROJECT
from tests.support.tensors import pack, raw, some_tensors


@st.composite
def _tensors(draw: st.DrawFn) -> list[tuple[str, Tensor]]:
    tensors = []
    for number in range(draw(st.integers(1, 8))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        tensors.append((f"tensor{number}", (torch.randn(shape) * 100).to(dtype)))
    return tensors


@settings(max_examples=40)
@given(tensors=_tensors(), bucket_bytes=st.integers(1, 2000))
def test_unpacking_undoes_packing_in_host_memory_and_on_a_device(
    tensors: list[tuple[str, Tensor]], bucket_bytes: int
) -> None:
    in_host = list(pack(tensors, bucket_bytes))
    for bucket in in_host:
        assert len(bucket.data) <= bucket_bytes or len(bucket.records) == 1
        # Memory that another process shares is read-only.
        bucket.data.flags.writeable = False  # type: ignore[union-attr]
    for buckets in (in_host, [pack_into(torch.empty(30_000, dtype=torch.uint8), tensors)]):
        arrived = [(record, tensor) for bucket in buckets for record, tensor in unpack(bucket)]
        assert [record.name for record, _ in arrived] == [name for name, _ in tensors]
        for (_, sent), (record, tensor) in zip(tensors, arrived, strict=True):
            assert raw(tensor) == raw(sent)
            assert buckets is not in_host or record.checksum == checksum(record.name, sent)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_flipped_bit_is_detected_and_its_tensor_named(on_device: bool) -> None:
    """The error in a bucket on a device comes before the first tensor is returned."""
    (bucket,) = pack(some_tensors(1)[0], 10**6)
    if on_device:
        bucket = pack_into(torch.empty(50_000, dtype=torch.uint8), some_tensors(1)[0])
    for record in bucket.records:
        if record.nbytes:
            place = record.offset + record.nbytes - 1
            bucket.data[place] ^= 128
            with pytest.raises(ChecksumError, match=record.name):
                next(unpack(bucket)) if on_device else list(unpack(bucket))
            bucket.data[place] ^= 128
    with pytest.raises(ChecksumError, match=bucket.records[-1].name):
        list(unpack(Bucket(bucket.data[:-1], bucket.records)))


def test_digest_depends_on_name_dtype_shape_and_bytes_alone() -> None:
    base = {"a": torch.arange(6.0), "b": torch.zeros(2)}

    def digest_of(tensors: dict[str, Tensor], bucket_bytes: int = 10_000) -> str:
        buckets = pack(tensors.items(), bucket_bytes)
        return digest({record.name: record.checksum for bucket in buckets for record in bucket.records})

    reference = digest_of(base)
    assert digest_of(dict(reversed(base.items())), bucket_bytes=1) == reference
    changed = {
        "name": {"a": base["a"], "c": base["b"]},
        "dtype": {"a": base["a"].view(torch.int32), "b": base["b"]},
        "shape": {"a": base["a"].view(2, 3), "b": base["b"]},
        "bytes": {"a": base["a"], "b": torch.tensor([0.0, -0.0])},
        "missing": {"a": base["a"]},
    }
    digests = [digest_of(tensors) for tensors in changed.values()]
    assert len({reference, *digests}) == len(changed) + 1


def test_checksum_is_the_hash_of_the_hashes_of_4_mib_pieces() -> None:
    tensor = torch.randint(-100, 100, (1500, 1700), dtype=torch.int32)
    data = tensor.numpy().tobytes()
    assert 2 * 2**22 < len(data) < 3 * 2**22
    pieces = [data[start : start + 2**22] for start in range(0, len(data), 2**22)]
    expected = xxhash.xxh3_128(
        b"weight|int32|(1500, 1700)|" + b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces)
    ).hexdigest()
    assert checksum("weight", tensor) == expected
    transposed = tensor.t().contiguous().t()
    for same in (tensor, transposed):
        (bucket,) = pack([("weight", same)], 1)
        assert bucket.records[0].checksum == expected
        assert bucket.data.tobytes() == data


def hash_in_whole_numbers(data: bytes) -> bytes:
    """Compute the hash by its definition: a sum of SplitMix64 outputs over the words, each offset by its position."""
    every = (1 << 64) - 1
    whole = data + bytes(-len(data) % 8)
    total = 0
    for number in range(len(whole) // 8):
        word = int.from_bytes(whole[8 * number : 8 * number + 8], "little")
        mixed = (word + (number + 1) * 0x9E3779B97F4A7C15) & every
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & every
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & every
        total = (total + (mixed ^ (mixed >> 31))) & every
    return total.to_bytes(8, "little")


@settings(max_examples=40)
@given(several=st.lists(st.binary(max_size=200), max_size=4))
def test_device_hash_equals_its_definition_piece_by_piece(several: list[bytes]) -> None:
    piece = 64
    expected = [[hash_in_whole_numbers(data[at : at + piece]) for at in range(0, len(data), piece)] for data in several]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_module, "DEVICE_PIECE_BYTES", piece)
        assert hash_pieces([torch.tensor(list(data), dtype=torch.uint8) for data in several]) == expected


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        pytest.param("qwen2", {"vocab_size": 501}, Dtype.bfloat16, id="vocabulary"),
        pytest.param("llama", {"intermediate_size": 301}, Dtype.float32, id="gate and up"),
        pytest.param("qwen3", {"num_key_value_heads": 4}, Dtype.bfloat16, id="qkv"),
        pytest.param("qwen3_moe", {"moe_intermediate_size": 301}, Dtype.float32, id="expert"),
    ],
)
def test_largest_tensor_bytes_is_the_smallest_bucket_that_holds_every_parameter(
    family: str, changes: dict[str, int], dtype: Dtype, tmp_path: Path
) -> None:
    config = tiny_configs.FAMILIES[family]()
    config.update(changes)
    config.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    size = largest_tensor_bytes(architecture, dtype)
    room = np.empty(size, dtype=np.uint8)
    full = 0
    for entry in WeightMap(architecture).entries():
        shapes = zip(entry.hf, entry.rule.shapes, strict=True)
        parts = [(name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, shape in shapes]
        pack_into(room, parts)
        try:
            # Sizes are rounded up to multiples of 64 bytes, so take away 64.
            pack_into(room[: size - 64], parts)
        except BucketFullError:
            full += 1
    assert full >= 1


def test_weight_map_is_imported_without_torch() -> None:
    code = "import sys, rlsys.weights.weight_map; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0
