"""A staged version: what it takes, what it refuses, and what it hands out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlsys.rollout.engine import Layout, StagedVersion, sha256_prefix
from rlsys.weights.transport import ChecksumError, digest, pack, pack_into

TENSORS = [(f"model.layers.{n}.input_layernorm.weight", torch.arange(50.0) + n) for n in range(4)]


def staged() -> StagedVersion:
    return StagedVersion(3, Layout(tp=1, kv_heads=1, tied=True, dtype=torch.float32), sha256_prefix)


def test_what_it_hands_out_is_what_came_however_the_lent_memory_changes() -> None:
    version = staged()
    checksums = {}
    lent = None
    for bucket in pack(TENSORS, bucket_bytes=300):
        checksums |= {record.name: record.checksum for record in bucket.records}
        version.take(bucket)
        bucket.data[:] = 255
        lent = bucket
    assert lent is not None
    assert version.nbytes == sum(tensor.nbytes for _, tensor in TENSORS)
    version.check(3, digest(checksums))
    out = [
        bucket.data[record.offset : record.offset + record.nbytes].view(np.float32)
        for bucket in version.hand_out()
        for record in bucket.records
    ]
    np.testing.assert_array_equal(out, [tensor.numpy() for _, tensor in TENSORS])
    assert list(version.hand_out()) == [], "handed out twice, and so held twice"


def test_it_refuses_what_was_not_sent() -> None:
    version = staged()
    (bucket,) = pack(TENSORS, bucket_bytes=1 << 20)
    total = digest({record.name: record.checksum for record in bucket.records})
    with pytest.raises(ChecksumError, match="0 tensors came"):
        version.check(3, total)
    version.take(bucket)
    version.check(3, total)
    with pytest.raises(ChecksumError, match="version 4 was finished while version 3"):
        version.check(4, total)
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
    version.check(3, digest({record.name: record.checksum for record in bucket.records}))
    (out,) = version.hand_out()
    for record, (_, tensor) in zip(out.records, TENSORS, strict=True):
        arrived = out.flat[record.offset : record.offset + record.nbytes].view(torch.float32)
        assert torch.equal(arrived, tensor)
    reported = {name: sha256_prefix(tensor) for name, tensor in TENSORS}
    assert version.mismatches([reported]) == []
    room[bucket.records[1].offset] = 254
    with pytest.raises(ChecksumError, match=TENSORS[0][0]):
        staged().take(bucket, to_host=how == "moved")
