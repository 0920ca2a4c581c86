"""Weights in transit: named tensors packed into flat buckets of bytes, each tensor with a checksum.

A bucket is numpy and plain data, so it pickles without a copy through Ray's object store.
Invariant: whoever unpacks gets the bytes that were packed, or an error that names the tensor. The digest
of a version depends on every name, dtype, shape and byte, and not on order or on how tensors were
spread over buckets.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""Bytes; every tensor starts at a multiple, so that it can be viewed in its own dtype."""


class ChecksumError(Exception):
    """Weights did not arrive as they were sent."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies in a bucket, and what it must hash to."""

    name: str
    dtype: str
    """As torch names it, e.g. `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket."""
    checksum: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of one version."""

    data: NDArray[np.uint8]
    """[bytes]"""
    records: tuple[TensorRecord, ...]


def checksum(name: str, tensor: Tensor) -> str:
    """Hash of a tensor's name, dtype, shape and bytes, as 32 hex digits (XXH3, 128 bits)."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    digest = xxhash.xxh3_128(f"{name}|{dtype}|{tuple(tensor.shape)}|".encode())
    digest.update(_bytes_of(tensor).data)
    return digest.hexdigest()


def digest(checksums: Mapping[str, str]) -> str:
    """One hash of a whole version from its tensors' checksums by name; their order does not matter."""
    total = xxhash.xxh3_128()
    for name in sorted(checksums):
        total.update(f"{name}={checksums[name]};".encode())
    return total.hexdigest()


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Copy tensors into buckets of at most `bucket_bytes`, in order.

    A tensor larger than that gets a bucket of its own. At most one bucket is held at a time.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        nbytes = _aligned(tensor.nbytes)
        if pending and size + nbytes > bucket_bytes:
            yield _fill(pending, size)
            pending, size = [], 0
        pending.append((name, tensor.detach().cpu()))
        size += nbytes
    if pending:
        yield _fill(pending, size)


def unpack(bucket: Bucket) -> Iterator[tuple[TensorRecord, Tensor]]:
    """The tensors of a bucket, as views of its memory: do not write to them.

    Raises ChecksumError with the first tensor that is not what was sent.
    """
    with warnings.catch_warnings():
        # Ray hands out read-only arrays; the contract above is what torch warns about.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        flat = torch.from_numpy(bucket.data)
    for record in bucket.records:
        piece = flat[record.offset : record.offset + record.nbytes]
        if piece.numel() != record.nbytes:
            raise ChecksumError(f"Tensor {record.name} is cut short in transit.")
        tensor = piece.view(getattr(torch, record.dtype)).view(record.shape)
        if checksum(record.name, tensor) != record.checksum:
            raise ChecksumError(f"Tensor {record.name} did not arrive as it was sent.")
        yield record, tensor


def _fill(pending: list[tuple[str, Tensor]], size: int) -> Bucket:
    data = np.zeros(size, dtype=np.uint8)
    records: list[TensorRecord] = []
    offset = 0
    for name, tensor in pending:
        data[offset : offset + tensor.nbytes] = _bytes_of(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        records.append(TensorRecord(name, dtype, tuple(tensor.shape), offset, checksum(name, tensor)))
        offset += _aligned(tensor.nbytes)
    return Bucket(data, tuple(records))


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
