"""Weights in transit: named tensors packed into flat buckets of bytes, each tensor with a checksum.

A bucket is plain data in host memory, as a numpy array, or in a device's memory, as a tensor; either may be shared between
processes (`rlsys.weights.transport`). What is on a device is packed, hashed and checked there. Invariant: whoever unpacks gets
the bytes that were packed, or an error that names the tensor. The digest of a version depends on every name, dtype, shape and
byte, and not on order or on how tensors were spread over buckets.

A byte is copied once and hashed at both ends. The hash of a tensor is one of the hashes of its pieces. In host memory (XXH3)
that lets threads pack several pieces at a time: one core copies at about half the speed that memory has. A piece is copied and
hashed block by block, while the block is in the core's cache. On a device see `hash_pieces`; the hashes of the two differ.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rlsys.weights.sizes import aligned

Memory = NDArray[np.uint8] | Tensor
"""[bytes] uint8: in host memory an array, on a device a tensor. What is a tensor is hashed as on a device, wherever it lies."""

PIECE_BYTES = 4 * 1024 * 1024  # Of a tensor, hashed by itself.
BLOCK_BYTES = 256 * 1024  # Of a piece; source and copy fit into a core's cache together.
PACKERS = 2  # Threads that pack.
DEVICE_PIECE_BYTES = 16 * 1024 * 1024  # What is hashed at a time on a device; three times as much is needed beside it.
_WORD_BYTES = 8
_STEP, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)  # The numbers of SplitMix64.
_COPY_BYTES = 256 * 1024 * 1024  # Of a measurement; a copy of more runs at the same speed.
COPY_ROUNDS = 3


class ChecksumError(Exception):
    """Weights did not arrive as they were sent."""


class BucketFullError(Exception):
    """A tensor has no room in the memory that was given."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies in a bucket, and what it must hash to."""

    name: str
    dtype: str  # As torch names it, e.g. `bfloat16`.
    shape: tuple[int, ...]
    offset: int  # Bytes from the start of the bucket.
    checksum: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of one version."""

    data: Memory  # [bytes]
    records: tuple[TensorRecord, ...]

    @property
    def in_host(self) -> NDArray[np.uint8]:
        """The bytes of a bucket that is known to be in host memory. Raises TypeError for another."""
        if isinstance(self.data, Tensor):
            raise TypeError(f"A bucket on {self.data.device} was taken for one in host memory.")
        return self.data

    @property
    def flat(self) -> Tensor:
        """The bytes as a tensor that shares their memory, wherever they lie: do not write to it."""
        if isinstance(self.data, Tensor):
            return self.data
        with warnings.catch_warnings():
            # A receiver has no right to write to shared memory; the contract above is what torch warns about.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            return torch.from_numpy(self.data)

    def copy(self, to_host: bool = False) -> Bucket:
        """The same in memory of its own, on the same device or in host memory; it is hashed as before."""
        if isinstance(self.data, Tensor):
            target = torch.device("cpu") if to_host else self.data.device
            return Bucket(self.data.to(target, copy=True), self.records)
        return Bucket(self.data.copy(), self.records)


def checksum(name: str, tensor: Tensor) -> str:
    """Hash of a tensor's name, dtype, shape and bytes, as 32 hex digits (XXH3, 128 bits).

    The bytes go in as the hashes of their pieces.
    """
    return _joined_hash(name, tensor, (xxhash.xxh3_128_digest(piece.data) for piece in _pieces(_bytes_of(tensor))))


def digest(checksums: Mapping[str, str]) -> str:
    """One hash of a whole version from its tensors' checksums by name; their order does not matter."""
    total = xxhash.xxh3_128()
    for name in sorted(checksums):
        total.update(f"{name}={checksums[name]};".encode())
    return total.hexdigest()


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Copy tensors into buckets of at most `bucket_bytes`, each in memory of its own, in order.

    A tensor larger than that gets a bucket of its own. At most one bucket is held at a time.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        nbytes = aligned(tensor.nbytes)
        if pending and size + nbytes > bucket_bytes:
            yield pack_into(np.empty(size, dtype=np.uint8), pending)
            pending, size = [], 0
        pending.append((name, tensor))
        size += nbytes
    if pending:
        yield pack_into(np.empty(size, dtype=np.uint8), pending)


def pack_into(memory: Memory, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
    """Copy tensors of any device and strides to `memory`, [bytes], in order; the bucket is the part that is used.

    Where it returns, the copies are complete. Raises BucketFullError, naming the tensor, if they do not fit.
    """
    parts = _pack_on_device(memory, tensors) if isinstance(memory, Tensor) else _pack_in_host(memory, tensors)
    records = tuple(
        TensorRecord(name, _dtype_name(copy), tuple(copy.shape), start, _joined_hash(name, copy, pieces))
        for name, copy, start, pieces in parts
    )
    end = records[-1].offset + records[-1].nbytes if records else 0
    return Bucket(memory[:end], records)


def unpack(bucket: Bucket) -> Iterator[tuple[TensorRecord, Tensor]]:
    """The tensors of a bucket, as views of its memory: do not write to them.

    Raises ChecksumError with the first tensor that is not what was sent; on a device before any is given out.
    """
    flat = bucket.flat
    pieces = [flat[record.offset : record.offset + record.nbytes] for record in bucket.records]
    for record, piece in zip(bucket.records, pieces, strict=True):
        if piece.numel() != record.nbytes:
            raise ChecksumError(f"Tensor {record.name} is cut short in transit.")
    tensors = [
        _typed(piece, getattr(torch, record.dtype), record.shape)
        for record, piece in zip(bucket.records, pieces, strict=True)
    ]
    for record, tensor, found in zip(bucket.records, tensors, _hashes(bucket, tensors, pieces), strict=True):
        if found != record.checksum:
            raise ChecksumError(f"Tensor {record.name} did not arrive as it was sent.")
        yield record, tensor


_Part = tuple[str, Tensor, int, Iterable[bytes]]  # Name, copy, offset, and the hashes of its pieces.


def _pack_in_host(memory: NDArray[np.uint8], tensors: Iterable[tuple[str, Tensor]]) -> list[_Part]:
    with ThreadPoolExecutor(PACKERS, "pack") as packers:
        parts = [
            (name, copy, start, _copy(copy, source, packers))
            for name, source, copy, start in _laid_out(torch.from_numpy(memory), tensors)
        ]
    return [(name, copy, start, [piece.result() for piece in pieces]) for name, copy, start, pieces in parts]


def _pack_on_device(memory: Tensor, tensors: Iterable[tuple[str, Tensor]]) -> list[_Part]:
    parts = []
    for name, source, copy, start in _laid_out(memory, tensors):
        copy.copy_(source)
        parts.append((name, copy, start))
    hashes = hash_pieces([memory[start : start + copy.nbytes] for _, copy, start in parts])
    return [(*part, pieces) for part, pieces in zip(parts, hashes, strict=True)]


def _laid_out(memory: Tensor, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """Name, source, the place for its copy and the offset of that. Raises BucketFullError."""
    end = 0
    for name, tensor in tensors:
        start, end = aligned(end), aligned(end) + tensor.nbytes
        if end > memory.nbytes:
            raise BucketFullError(
                f"{name} takes {tensor.nbytes} bytes, and {memory.nbytes - start} of {memory.nbytes} are left."
            )
        yield name, tensor.detach(), _typed(memory[start:end], tensor.dtype, tensor.shape), start


def _hashes(bucket: Bucket, tensors: Sequence[Tensor], pieces: Sequence[Tensor]) -> Iterator[str]:
    """Of each tensor of a bucket, as it is hashed where the bucket lies; `pieces` are the tensors' bytes."""
    names = [record.name for record in bucket.records]
    if isinstance(bucket.data, Tensor):
        return map(_joined_hash, names, tensors, hash_pieces(pieces))
    return map(checksum, names, tensors)


def _typed(flat: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # Bytes without an extent may have a stride of 0, which torch refuses to view as anything else.
    return flat.view(dtype).view(shape) if flat.numel() else torch.empty(shape, dtype=dtype, device=flat.device)


def _copy(target: Tensor, source: Tensor, packers: Executor) -> list[Future[bytes]]:
    """Copy `source` to `target`, of the same shape and dtype and in host memory; the hashes of its pieces."""
    copied = _bytes_of(target)
    if source.is_cpu and source.is_contiguous():
        pairs = zip(_pieces(copied), _pieces(_bytes_of(source)), strict=True)
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
    whole = xxhash.xxh3_128(f"{name}|{_dtype_name(tensor)}|{tuple(tensor.shape)}|".encode())
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def hash_pieces(flats: Sequence[Tensor]) -> list[list[bytes]]:
    """The hashes of all pieces of each of `flats`, 8 bytes a piece, in order; nothing for what is empty.

    In plain tensor operations: the same on every device, and computed where the bytes lie. `flats` are [bytes] uint8,
    all on one device, each starting at a multiple of 8 bytes. The last piece is filled up with zeros to whole words, so
    a length that matters has to be told by other means. With the words w_0, w_1, ... of a piece (8 bytes each, as the
    device orders them), its hash is the sum modulo 2^64 of mix(w_i + (i + 1) step), where mix and step are those of
    SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014); it does not depend on
    the order in which a device adds. A single word that changes always changes the hash; anything else does, but for
    one time in 2^64. It finds damage, not forgery. The calling thread waits for the device.
    """
    longest = min(max((flat.numel() for flat in flats), default=0), DEVICE_PIECE_BYTES)
    if not longest:
        return [[] for _ in flats]
    words = -(-longest // _WORD_BYTES)
    keys = torch.arange(1, words + 1, dtype=torch.int64, device=flats[0].device).mul_(_signed(_STEP))
    sums = [[_mixed_sum(piece, keys) for piece in _words(flat)] for flat in flats]
    # Read back at once: each read waits for the device.
    numbers = iter(torch.stack([total for of_flat in sums for total in of_flat]).tolist())
    return [[next(numbers).to_bytes(_WORD_BYTES, "little", signed=True) for _ in of_flat] for of_flat in sums]


def _words(flat: Tensor) -> Iterator[Tensor]:
    """Of at most `DEVICE_PIECE_BYTES`, as whole words [words] int64."""
    for start in range(0, flat.numel(), DEVICE_PIECE_BYTES):
        piece = flat[start : start + DEVICE_PIECE_BYTES]
        missing = -piece.numel() % _WORD_BYTES
        yield (torch.cat([piece, piece.new_zeros(missing)]) if missing else piece).view(torch.int64)


def _mixed_sum(words: Tensor, keys: Tensor) -> Tensor:
    mixed = words + keys[: words.numel()]
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        # An int64 moved to the right has copies of its sign on the left, where zeros belong.
        mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            mixed *= _signed(factor)
    return mixed.sum()


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number: torch has no arithmetic for uint64."""
    return number - (1 << 64) if number >> 63 else number


def copy_gb_s(nbytes: int, device: torch.device) -> float:
    """10^9 bytes a second at which `nbytes` are copied from one buffer to another: the fastest of a few.

    On a CPU by one thread. A GPU gets its memory back: it may be others' next.
    """
    size = min(nbytes, _COPY_BYTES)
    fastest = _fastest_s(size, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return size / fastest / 1e9


def _fastest_s(size: int, device: torch.device) -> float:
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    fastest = float("inf")
    for _ in range(COPY_ROUNDS):
        started = time.perf_counter()
        if device.type == "cuda":
            target.copy_(source)
            torch.cuda.synchronize(device)
        else:
            np.copyto(target.numpy(), source.numpy())
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
