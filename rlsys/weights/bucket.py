"""Packs named tensors into buckets, and hashes and checks them.

A bucket holds named tensors, each with a checksum, in one contiguous byte range. The bytes are a numpy array in host
memory or a tensor in device memory; a device bucket is packed, hashed and checked on its device. Unpacking returns the
packed bytes or raises an error that names the tensor. The digest of a version depends on every name, dtype, shape and
byte, but not on tensor order or on the split into buckets.

Each byte is copied once, and hashed by the sender and by every receiver. The hash of a tensor combines the hashes of
its pieces. Several threads pack host pieces, because one core reaches about half of the memory bandwidth; each thread
copies and hashes a piece (XXH3) block by block, while the block is in the core's cache. Device pieces are hashed by
`hash_pieces`, so host and device hashes differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from math import prod
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rlsys.weights.weight_map import ADAPTER_PREFIX, aligned, packed

Memory = NDArray[np.uint8] | Tensor
"""[bytes] uint8: an array in host memory or a tensor on a device.

A tensor gets device hashes even if it is on the CPU.
"""

PIECE_BYTES = 4 * 1024 * 1024  # Size of a separately hashed part of a host tensor.
BLOCK_BYTES = 256 * 1024  # Copy unit within a piece; source and copy fit into a core's cache together.
PACKERS = 2  # Packing threads.
DEVICE_PIECE_BYTES = (
    16 * 1024 * 1024
)  # Size of a separately hashed part on a device; hashing needs three times this size as scratch memory.
_WORD_BYTES = 8
_STEP, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)  # `_STEP`, `_FACTORS` and `_SHIFTS` are the constants of SplitMix64.


class ChecksumError(Exception):
    """Received weights differ from the weights that were sent."""


class BucketFullError(Exception):
    """A tensor does not fit into the given memory."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Location of a tensor in a bucket, and its expected checksum."""

    name: str
    dtype: str  # Torch name, e.g. `bfloat16`.
    shape: tuple[int, ...]
    offset: int  # Bytes from the start of the bucket.
    checksum: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * getattr(torch, self.dtype).itemsize

    @property
    def of_adapter(self) -> bool:
        """True for a tensor of an adapter (LoRA), which an engine never holds: its weights have it merged into them."""
        return self.name.startswith(ADAPTER_PREFIX)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A block of whole tensors of one weight version."""

    data: Memory  # [bytes]
    records: tuple[TensorRecord, ...]

    @property
    def flat(self) -> Tensor:
        """The bucket's bytes as a tensor that shares their memory, on the CPU or a device; do not write to it."""
        if isinstance(self.data, Tensor):
            return self.data
        with warnings.catch_warnings():
            # Receivers map shared memory read-only, so torch warns; the contract of transports forbids writes anyway.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            return torch.from_numpy(self.data)

    def copy(self, to_host: bool = False) -> Bucket:
        """Return a copy with the same hashes, on the same device or, with `to_host`, on the CPU.

        The host copy of a GPU's bucket is pinned, so it crosses the bus at full speed in both directions. torch keeps
        freed pinned memory for the next copies.
        """
        if not isinstance(self.data, Tensor):
            return Bucket(self.data.copy(), self.records)
        if not to_host:
            return Bucket(self.data.clone(), self.records)
        host = torch.empty(self.data.shape, dtype=torch.uint8, pin_memory=self.data.is_cuda)
        return Bucket(host.copy_(self.data), self.records)


def checksum(name: str, tensor: Tensor) -> str:
    """Return the hash of a tensor's name, dtype, shape and piece hashes: 32 hex digits (XXH3, 128 bits)."""
    return _joined_hash(name, tensor, (xxhash.xxh3_128_digest(piece.data) for piece in _pieces(bytes_of(tensor))))


def digest(checksums: Mapping[str, str], base: str = "") -> str:
    """Return the hash of a whole version, given the checksum of each tensor by name; their order does not matter.

    `base` is the digest of the frozen model, if the version is adapters alone.
    """
    total = xxhash.xxh3_128(base.encode())
    for name in sorted(checksums):
        total.update(f"{name}={checksums[name]};".encode())
    return total.hexdigest()


def pack_into(memory: Memory, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
    """Copy tensors of any device and strides to `memory`, [bytes], in order; return the used part as a bucket.

    The copies are complete on return. Raises BucketFullError, naming the first tensor that does not fit.
    """
    parts: list[tuple[str, Tensor, int]] = []
    if isinstance(memory, Tensor):
        for name, source, copy, start in _laid_out(memory, tensors):
            parts.append((name, copy.copy_(source), start))
        hashes = hash_pieces([memory[start : start + copy.nbytes] for _, copy, start in parts])
    else:
        pending = []
        with ThreadPoolExecutor(PACKERS, "pack") as packers:
            for name, source, copy, start in _laid_out(torch.from_numpy(memory), tensors):
                parts.append((name, copy, start))
                pending.append(_copy(copy, source, packers))
        hashes = [[piece.result() for piece in pieces] for pieces in pending]
    records = tuple(
        TensorRecord(name, dtype_name(copy.dtype), tuple(copy.shape), start, _joined_hash(name, copy, pieces))
        for (name, copy, start), pieces in zip(parts, hashes, strict=True)
    )
    end = records[-1].offset + records[-1].nbytes if records else 0
    return Bucket(memory[:end], records)


def unpack(bucket: Bucket) -> Iterator[tuple[TensorRecord, Tensor]]:
    """Check and yield the tensors of a bucket as views of its memory: do not write to them.

    Raises ChecksumError naming the first tensor that differs from the one sent. A device bucket is checked whole before
    its first tensor is yielded.
    """
    flat, names = bucket.flat, [record.name for record in bucket.records]
    pieces, tensors = [], []
    for record in bucket.records:
        piece = flat[record.offset : record.offset + record.nbytes]
        if piece.numel() != record.nbytes:
            raise ChecksumError(f"Tensor {record.name} was truncated in transit.")
        pieces.append(piece)
        tensors.append(_typed(piece, getattr(torch, record.dtype), record.shape))
    if isinstance(bucket.data, Tensor):
        for record, found in zip(bucket.records, map(_joined_hash, names, tensors, hash_pieces(pieces)), strict=True):
            _require_same(record, found)
        yield from zip(bucket.records, tensors, strict=True)
    else:
        for record, tensor in zip(bucket.records, tensors, strict=True):
            _require_same(record, checksum(record.name, tensor))
            yield record, tensor


def _require_same(record: TensorRecord, found: str) -> None:
    if found != record.checksum:
        raise ChecksumError(f"Tensor {record.name} was corrupted in transit (checksum mismatch).")


def _laid_out(memory: Tensor, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """Yield (name, source, destination view, byte offset) for each tensor. Raises BucketFullError."""
    end = 0
    for name, tensor in tensors:
        start, end = aligned(end), aligned(end) + tensor.nbytes
        if end > memory.nbytes:
            raise BucketFullError(
                f"{name} takes {tensor.nbytes} bytes, but only {memory.nbytes - start} of {memory.nbytes} are left."
            )
        yield name, tensor.detach(), _typed(memory[start:end], tensor.dtype, tensor.shape), start


def _typed(flat: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # An empty tensor may have stride 0, and torch then raises on a view of another dtype.
    return flat.view(dtype).view(shape) if flat.numel() else torch.empty(shape, dtype=dtype, device=flat.device)


def _copy(target: Tensor, source: Tensor, packers: Executor) -> list[Future[bytes]]:
    """Copy `source` to `target` (same shape and dtype, in host memory); return its piece hashes as futures."""
    copied = bytes_of(target)
    if source.is_cpu and source.is_contiguous():
        pairs = zip(_pieces(copied), _pieces(bytes_of(source)), strict=True)
        return [packers.submit(_copy_piece, *pair) for pair in pairs]
    target.copy_(source)
    return [packers.submit(xxhash.xxh3_128_digest, piece.data) for piece in _pieces(copied)]


def _copy_piece(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> bytes:
    running = xxhash.xxh3_128()
    for start in range(0, target.nbytes, BLOCK_BYTES):
        block = target[start : start + BLOCK_BYTES]
        np.copyto(block, source[start : start + BLOCK_BYTES])
        running.update(block.data)
    return running.digest()


def _pieces(data: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    return (data[start : start + PIECE_BYTES] for start in range(0, data.nbytes, PIECE_BYTES))


def _joined_hash(name: str, tensor: Tensor, pieces: Iterable[bytes]) -> str:
    whole = xxhash.xxh3_128(f"{name}|{dtype_name(tensor.dtype)}|{tuple(tensor.shape)}|".encode())
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch and config.json, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the tensor's bytes in host memory, row-major; copy them only if they are not stored in that form."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def write_all(file: BinaryIO | Any, data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file: one system call writes at most 2 GB."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def hash_pieces(flats: Sequence[Tensor]) -> list[list[bytes]]:
    """Return the piece hashes of every tensor in `flats`, in order, 8 bytes per piece; an empty tensor has none.

    Plain tensor operations compute the hashes on the device that holds the bytes; the results are equal on every
    device. `flats` are [bytes] uint8 on one device, each starting at a multiple of 8 bytes. Zeros pad the last piece to
    whole 8-byte words, so the hash does not cover the length.

    The hash of a piece with words w_0, w_1, ... is the sum modulo 2^64 of mix(w_i + (i + 1) step), independent of the
    order of addition. The function `mix` and the constant `step` come from SplitMix64 (Steele, Lea, Flood, OOPSLA
    2014). A change of one word always changes the hash; any other change goes undetected with probability 2^-64. The
    hash detects damage, not forgery.

    Blocks until the device is done.
    """
    longest = min(max((flat.numel() for flat in flats), default=0), DEVICE_PIECE_BYTES)
    if not longest:
        return [[] for _ in flats]
    words = -(-longest // _WORD_BYTES)
    keys = torch.arange(1, words + 1, dtype=torch.int64, device=flats[0].device).mul_(_signed(_STEP))
    of_flats = [list(_words(flat)) for flat in flats]
    # Hash equally long neighbours together: a model with experts has thousands of small tensors of one size.
    runs = chain.from_iterable(
        packed(run, lambda piece: piece.nbytes, DEVICE_PIECE_BYTES)
        for _, run in groupby(chain.from_iterable(of_flats), Tensor.numel)
    )
    sums = [_mixed_sums(torch.stack(run), keys) for run in runs]
    # Read all sums at once, because each read synchronises with the device.
    numbers = iter(torch.cat(sums).tolist())
    return [[next(numbers).to_bytes(_WORD_BYTES, "little", signed=True) for _ in pieces] for pieces in of_flats]


def _words(flat: Tensor) -> Iterator[Tensor]:
    """Yield the pieces of `flat`, each of at most `DEVICE_PIECE_BYTES`, zero-padded and viewed as [words] int64."""
    for start in range(0, flat.numel(), DEVICE_PIECE_BYTES):
        piece = flat[start : start + DEVICE_PIECE_BYTES]
        missing = -piece.numel() % _WORD_BYTES
        yield (torch.cat([piece, piece.new_zeros(missing)]) if missing else piece).view(torch.int64)


def _mixed_sums(mixed: Tensor, keys: Tensor) -> Tensor:
    """Return the hash [pieces] of pieces [pieces, words], which it overwrites."""
    mixed += keys[: mixed.shape[1]]
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        # Right shift of int64 copies the sign bit; the mask makes it a logical shift.
        mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            mixed *= _signed(factor)
    return mixed.sum(dim=1)


def _signed(number: int) -> int:
    """Return the int64 with the same bits as an unsigned number: torch has no arithmetic for uint64."""
    return number - (1 << 64) if number >> 63 else number
