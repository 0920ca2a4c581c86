"""Weights arrive as they were sent, or with an error that names the tensor."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.weights.transport import (
    BucketFullError,
    ChecksumError,
    checksum,
    digest,
    pack,
    pack_into,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int64]


@st.composite
def _tensors(draw: st.DrawFn) -> list[tuple[str, Tensor]]:
    count = draw(st.integers(1, 8))
    tensors = []
    for number in range(count):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        tensors.append((f"tensor{number}", (torch.randn(shape) * 100).to(dtype)))
    return tensors


@settings(max_examples=60, deadline=None)
@given(tensors=_tensors(), bucket_bytes=st.integers(1, 2000))
def test_unpacking_undoes_packing(tensors: list[tuple[str, Tensor]], bucket_bytes: int) -> None:
    buckets = pickle.loads(pickle.dumps(list(pack(tensors, bucket_bytes))))
    for bucket in buckets:
        assert len(bucket.data) <= bucket_bytes or len(bucket.records) == 1
        # Ray hands out read-only arrays.
        bucket.data.flags.writeable = False
    arrived = [(record, tensor) for bucket in buckets for record, tensor in unpack(bucket)]
    assert [record.name for record, _ in arrived] == [name for name, _ in tensors]
    for (_, sent), (record, tensor) in zip(tensors, arrived, strict=True):
        assert tensor.dtype == sent.dtype
        assert torch.equal(tensor, sent)
        assert record.checksum == checksum(record.name, sent)


def test_tensors_that_are_views_are_packed_by_value() -> None:
    whole = torch.arange(24.0).view(4, 6)
    (bucket,) = pack([("columns", whole[:, 1::2]), ("transposed", whole.t())], 10_000)
    arrived = {record.name: tensor for record, tensor in unpack(bucket)}
    assert torch.equal(arrived["columns"], whole[:, 1::2])
    assert torch.equal(arrived["transposed"], whole.t())


def test_a_single_wrong_bit_is_found_and_its_tensor_named() -> None:
    (bucket,) = pack([("first", torch.ones(5)), ("second", torch.ones(3, 3))], 10_000)
    damaged = bucket.data.copy()
    damaged[bucket.records[1].offset + 7] ^= 1
    with pytest.raises(ChecksumError, match="second"):
        list(unpack(replace(bucket, data=damaged)))
    with pytest.raises(ChecksumError, match="second"):
        list(unpack(replace(bucket, data=bucket.data[:70])))


def test_the_digest_covers_name_dtype_shape_and_bytes_but_not_order_or_buckets() -> None:
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


def test_a_bucket_holds_its_bytes_once_when_pickled() -> None:
    (bucket,) = pack([("weight", torch.zeros(100_000))], 10**6)
    frames: list[pickle.PickleBuffer] = []
    head = pickle.dumps(bucket, protocol=5, buffer_callback=frames.append)
    assert len(head) < 1000
    assert np.shares_memory(np.frombuffer(frames[0].raw(), dtype=np.uint8), bucket.data)


def test_tensors_are_packed_into_the_memory_that_is_given_and_no_further() -> None:
    memory = np.full(300, 7, dtype=np.uint8)
    tensors = [("first", torch.ones(5)), ("second", torch.arange(16, dtype=torch.int64))]
    bucket = pack_into(memory, tensors)
    assert [record.offset for record in bucket.records] == [0, 64]
    assert bucket.data.nbytes == 64 + 128
    assert np.shares_memory(bucket.data, memory)
    assert (memory[192:] == 7).all()
    assert memory[64:192].view(np.int64).tolist() == list(range(16))
    assert pack_into(memory[:192], tensors).records == bucket.records
    with pytest.raises(BucketFullError, match="second takes 128 bytes, and 127 of 191 are left"):
        pack_into(memory[:191], tensors)


def test_a_checksum_is_the_hash_of_the_hashes_of_4_mib_each() -> None:
    tensor = torch.randint(-100, 100, (1500, 1700), dtype=torch.int32)
    raw = tensor.numpy().tobytes()
    assert 2 * 2**22 < len(raw) < 3 * 2**22
    pieces = [raw[start : start + 2**22] for start in range(0, len(raw), 2**22)]
    expected = xxhash.xxh3_128(
        b"weight|int32|(1500, 1700)|" + b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces)
    ).hexdigest()
    assert checksum("weight", tensor) == expected
    turned = tensor.t().contiguous().t()
    for same in (tensor, turned):
        (bucket,) = pack([("weight", same)], 1)
        assert bucket.records[0].checksum == expected
        assert bucket.data.tobytes() == raw
