"""Packs, hashes and sends the weights of a version in buckets, from the actor to every receiving process.

A bucket holds named tensors, each with a checksum, in one contiguous byte range. The bytes are a numpy array in host
memory or a tensor in device memory; a device bucket is packed, hashed and checked on its device. Unpacking returns the
packed bytes or raises an error that names the tensor. The digest of a version depends on every name, dtype, shape and
byte, but not on tensor order or on the split into buckets.

In the cpu profile all buckets are in host memory. In the gpu profile every sender packs on its GPU and every receiver
gets the bucket in the memory of its own GPU, whatever carries the bytes in between.

Each byte is copied once, and hashed by the sender and by every receiver. The hash of a tensor combines the hashes of
its pieces. Several threads pack host pieces, because one core reaches about half of the memory bandwidth; each thread
copies and hashes a piece (XXH3) block by block, while the block is in the core's cache. Device pieces are hashed by
`hash_pieces`, so host and device hashes differ.

`open_sender` and `open_receiver` make the two ends of a transport from a spec. Contract of all transports:
- A sender numbers its buckets from 1 over its lifetime. The caller packs each bucket into memory that the sender lends
  (`next_slot`), calls `send`, and passes the small handle that `send` returns to the receivers by other means.
- A receiver turns each handle, in order, into a bucket. The bytes are valid until `release`, the next `receive` or
  `close`, whichever comes first; copy them to keep them. A transport does not check the bytes; `unpack` does. A
  receiver calls `release` for a bucket before the sender does.
- The sender overwrites or removes bytes only after `Sender.release` reports that every receiver has taken the bucket.
  Two buckets can be in flight, so the sender packs the next bucket while receivers read the previous one.
- Every wait has a timeout and raises RunError naming the missing members.
- A broadcast needs all its members: if one dies, hangs or leaves, the others raise PeerLost at once, and take part in
  nothing further. The driver hosts their `Meeting`, and ends it when it notices that a member has died, because NCCL may
  not. The members of other transports do not wait for each other.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, groupby
from math import prod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing import reductions

from rlsys.config.schema import Device, SyncMode
from rlsys.errors import PeerLost, RunError
from rlsys.files import named
from rlsys.weights.sockets import environment, listener
from rlsys.weights.weight_map import ADAPTER_PREFIX, aligned, packed

T = TypeVar("T")
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
_COPY_BYTES = 256 * 1024 * 1024  # Size limit of a measured copy; larger copies run at the same speed.
COPY_ROUNDS = 3


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
            # Receivers map shared memory read-only, so torch warns; the contract above forbids writes anyway.
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


def copy_gb_s(nbytes: int, device: torch.device) -> float:
    """Return the speed in GB/s (10^9) of copying `nbytes` on `device`: best of a few rounds, one thread on a CPU."""
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


SLOTS = 2  # Buckets in flight at a time: one is read while the next is packed.
STORAGE_DEVICE, EVENT_SYNC_REQUIRED = 6, 14  # Arguments of torch's `rebuild_cuda_tensor`.
_FILE_S, _FILE_POLL_S = 60.0, 0.05
"""Longest delay until a complete file is visible on other hosts (file system caches), and interval for polling it."""
_MEMBER_POLL_S, _WORK_POLL_S = 0.02, 0.0005
"""Polling intervals for missing members of a broadcast group, and for completion of a broadcast."""
_END_POLL_S = 0.1  # Polling interval for the end of a meeting.
_ENDED = "ended"  # Key of a meeting's store that is set at its end.
_PATIENCE = 2.0  # Timeout of the process group, as a multiple of `TransportSpec.timeout_s`.


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """Settings of one process in a transport, equal for all processes except `rank`."""

    mode: SyncMode
    rank: int  # Rank 0 sends; the other ranks receive.
    members: tuple[str, ...]  # Name of each rank, for error messages.
    bucket_bytes: int  # Size of the largest bucket.
    timeout_s: float  # Timeout of every wait for another process.
    device: Device  # Broadcast backend: gloo for CPU, NCCL for GPU. `ipc` needs GPU.
    address: tuple[str, int] | None  # Host and port of the `Meeting` of a broadcast's members.
    folder: str  # Folder of bucket files (`disk`), visible to all members.

    @property
    def name(self) -> str:
        """Name of this process, for error messages."""
        return self.members[self.rank]


@dataclass(frozen=True, slots=True)
class SharedMemoryLocation:
    """Location of a bucket in shared memory of the sending process."""

    host: str  # `host_identity` of the sender; `pid` is valid only there.
    pid: int
    descriptor: int  # File descriptor of the memory in process `pid`.
    offset: int  # Byte offset of the bucket.


@dataclass(frozen=True, slots=True)
class DeviceMemoryLocation:
    """Location of a bucket in GPU memory."""

    host: str  # `host_identity` of the sender.
    pid: int  # Process that owns the memory.
    handles: tuple[bytes, ...]  # One single-use handle per receiver, in rank order.


@dataclass(frozen=True, slots=True)
class BucketHandle:
    """A bucket without its bytes."""

    number: int
    records: tuple[TensorRecord, ...]
    nbytes: int
    location: SharedMemoryLocation | DeviceMemoryLocation | str | None
    """Location in shared memory or on a GPU, or a file path; None for a broadcast."""


def bucket_memory(nbytes: int, device: torch.device | None) -> Memory:
    """Allocate memory for a bucket: on `device`, or in host memory if it is None. Raises RunError if it is full."""
    if device is None:
        return np.empty(nbytes, dtype=np.uint8)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as problem:
        raise RunError(
            f"{device} has no room for the {nbytes} bytes of a bucket of weights: lower cluster.sync_bucket_bytes, or "
            f"free memory of that GPU, such as with the keys of rollout.engine ({problem})"
        ) from problem


def _device_of(spec: TransportSpec) -> torch.device | None:
    """Return this process's GPU; None on a CPU. Raises RunError if the spec needs a GPU and the process sees none."""
    if spec.device is Device.cpu and spec.mode is not SyncMode.ipc:
        return None
    if spec.device is Device.cpu or not torch.cuda.is_available():
        raise RunError(
            f"cluster.sync_mode={spec.mode} with cluster.device={spec.device} sends weights through GPU memory, but "
            f"{spec.name} sees no GPU: use cluster.sync_mode=tensor on a CPU, or check CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", torch.cuda.current_device())


class Sender(ABC):
    """Sending end of a transport. Lends its memory slots in turn, one per bucket in flight.

    Slots on a device are allocated when an export begins and freed when all its buckets are taken; between exports they
    use no memory. Slots in host memory are kept, because new host memory is slow to write.
    """

    def __init__(self, spec: TransportSpec, device: torch.device | None = None, slots: int = SLOTS) -> None:
        """`device` holds the slots; by default this process's GPU, or host memory on a CPU.

        With one slot, `send` must have read the bucket when it returns.
        """
        self._spec, self._count = spec, slots
        self.device = device or _device_of(spec)
        """Device of the slots; None for host memory."""
        self._slots: Sequence[Memory] = ()
        self._sent = self._taken = 0
        """Number of buckets sent, and number of buckets that every receiver has taken."""

    def next_slot(self) -> Memory:
        """Return memory for the next bucket, [bucket_bytes].

        Raises RuntimeError if two buckets are sent that are not released yet.
        """
        if self._sent - self._taken >= SLOTS:
            raise RuntimeError(
                f"Bucket {self._sent + 1} has no room: {self._sent} were sent, but only {self._taken} released."
            )
        self._slots = self._slots or [bucket_memory(self._spec.bucket_bytes, self.device) for _ in range(self._count)]
        return self._slots[self._sent % len(self._slots)]

    @abstractmethod
    def send(self, bucket: Bucket) -> BucketHandle:
        """Send the bucket packed into the memory that `next_slot` returned last; return its handle.

        Raises RunError if the transport fails, e.g. if a receiver did not take the previous broadcast.
        """

    def release(self, taken: int) -> None:
        """Record that every receiver has taken the first `taken` buckets, and free their memory for reuse."""
        self._taken = taken
        if self.device is not None and taken == self._sent:
            self._slots = ()

    def close(self) -> None:
        """Free all resources; idempotent."""
        self._slots, self._sent, self._taken = (), 0, 0

    def _handle(
        self, bucket: Bucket, location: SharedMemoryLocation | DeviceMemoryLocation | str | None
    ) -> BucketHandle:
        """Count `bucket` as sent and return its handle; `next_slot` then returns the next slot."""
        self._sent += 1
        return BucketHandle(self._sent, bucket.records, bucket.data.nbytes, location)


class Receiver(ABC):
    """Receiving end of a transport. Any thread may use it, but only one thread at a time."""

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        """Buckets arrive on `device`; by default on this process's GPU, or in host memory on a CPU."""
        self._spec, self._device = spec, device or _device_of(spec)
        self._memory: Memory | None = None
        """Memory of the last bucket."""

    @abstractmethod
    def receive(self, handle: BucketHandle) -> Bucket:
        """Return the bucket of `handle`. Raises RunError if its bytes do not arrive, e.g. because the sender exited."""

    def release(self) -> None:
        """End the use of the last bucket's bytes.

        Blocks until the device has finished reading them and frees its memory; host memory is kept for the next bucket.
        """
        if self._device is not None and self._memory is not None:
            await_device(self._device)
            self._memory = None

    def close(self) -> None:
        """Free all resources; idempotent."""
        self.release()
        self._memory = None

    def _room(self, nbytes: int) -> Memory:
        """Release the last bucket; return memory on the receiver's device for one of `nbytes`."""
        self.release()
        if self._memory is None:
            size = self._spec.bucket_bytes if self._device is None else nbytes
            self._memory = bucket_memory(size, self._device)
        return self._memory[:nbytes]

    def _arrived(self, host: Bucket) -> Bucket:
        """Return a bucket that arrived in host memory, copied to the receiver's device if it has one."""
        if self._device is None:
            return host
        room = self._room(host.data.nbytes)
        assert isinstance(room, Tensor)
        return Bucket(room.copy_(host.flat), host.records)


class SharedSender(Sender):
    """Packs buckets into memory shared by the processes of one host; receivers read it in place.

    The memory is anonymous (memfd_create). The kernel frees it when the last process that has it open or mapped exits
    or is killed, and the size of /dev/shm does not limit it. Pages are allocated on first write. A GPU packs on the
    device and copies whole buckets to this memory, whose pages are locked for that.
    """

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        """Raises RunError if the host lacks memory that can be locked for a GPU."""
        super().__init__(spec, device, slots=1)
        self._stride = aligned(spec.bucket_bytes)
        self._descriptor = os.memfd_create("weights")
        os.ftruncate(self._descriptor, SLOTS * self._stride)
        memory = np.frombuffer(mmap.mmap(self._descriptor, SLOTS * self._stride), dtype=np.uint8)
        self._shared = [memory[start : start + spec.bucket_bytes] for start in range(0, memory.nbytes, self._stride)]
        if self.device is None:
            self._slots = self._shared
        else:
            _lock_pages(memory, self.device)
        self._host = host_identity()

    def send(self, bucket: Bucket) -> BucketHandle:
        slot = self._sent % SLOTS
        if isinstance(bucket.data, Tensor):
            torch.from_numpy(self._shared[slot][: bucket.data.nbytes]).copy_(bucket.data)
        location = SharedMemoryLocation(self._host, os.getpid(), self._descriptor, slot * self._stride)
        return self._handle(bucket, location)

    def close(self) -> None:
        """See `Sender`. The memory itself is freed with the last bucket that refers to it."""
        super().close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            if self.device is not None:
                _unlock_pages(self._shared[0], self.device)
        self._descriptor, self._shared = -1, []


def _lock_pages(memory: NDArray[np.uint8], device: torch.device) -> None:
    """Lock the pages of `memory`, so that a GPU copies to it at full speed; no-op for a CPU. Raises RunError."""
    if device.type == "cuda" and int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)):
        raise RunError(
            f"cluster.sync_mode=tensor could not lock {memory.nbytes} bytes of host memory for {device}: free host "
            "memory, or lower cluster.sync_bucket_bytes."
        )


def _unlock_pages(memory: NDArray[np.uint8], device: torch.device) -> None:
    """Undo `_lock_pages` for the memory that begins where `memory` does."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class SharedReceiver(Receiver):
    """Maps the sender's memory read-only through /proc/<pid>/fd, so each receive checks that the sender is alive."""

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        super().__init__(spec, device)
        self._host = host_identity()
        self._inode, self._mapped = -1, np.empty(0, dtype=np.uint8)

    def receive(self, handle: BucketHandle) -> Bucket:
        location = handle.location
        assert isinstance(location, SharedMemoryLocation)
        if location.host != self._host:
            raise RunError(
                f"cluster.sync_mode=tensor needs the actor and {self._spec.name} on one host: use cluster.sync_mode=broadcast."
            )
        self._map(location)
        data = self._mapped[location.offset : location.offset + handle.nbytes]
        return self._arrived(Bucket(data, handle.records))

    def close(self) -> None:
        super().close()
        self._inode, self._mapped = -1, np.empty(0, dtype=np.uint8)

    def _map(self, location: SharedMemoryLocation) -> None:
        """Map the memory at `location` unless it is mapped already."""
        try:
            descriptor = os.open(f"/proc/{location.pid}/fd/{location.descriptor}", os.O_RDONLY)
        except OSError as problem:
            raise PeerLost(
                f"{self._spec.name} cannot open the weights in the memory of {self._spec.members[0]}, process "
                f"{location.pid} ({problem.strerror}): that process exited, or belongs to another user; look at its "
                "log."
            ) from problem
        try:
            inode = os.fstat(descriptor).st_ino
            if inode != self._inode:
                mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                self._mapped, self._inode = np.frombuffer(mapped, dtype=np.uint8), inode
        finally:
            os.close(descriptor)


def host_identity() -> str:
    """Return the boot ID and PID namespace of this process; equal for processes that see the same /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class DiskSender(Sender):
    """Writes each bucket to a file: for hosts that share only a folder, and for inspecting sent buckets.

    A file appears under its name only when complete, and is deleted when all receivers have taken it. A killed sender
    leaves at most three files.
    """

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        super().__init__(spec, device, slots=1)
        self._folder = Path(spec.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, Path] = {}

    def send(self, bucket: Bucket) -> BucketHandle:
        number = self._sent + 1
        file = self._folder / f"bucket-{number:06d}"
        partial = file.with_name(f".{file.name}.partial")
        try:
            with named(file), partial.open("wb", buffering=0) as out:
                write_all(out, bytes_of(bucket.flat).data)
                partial.rename(file)
        finally:
            partial.unlink(missing_ok=True)
        self._files[number] = file
        return self._handle(bucket, str(file.resolve()))

    def release(self, taken: int) -> None:
        super().release(taken)
        for number in [number for number in self._files if number <= taken]:
            self._files.pop(number).unlink(missing_ok=True)

    def close(self) -> None:
        self.release(self._sent)
        super().close()


class DiskReceiver(Receiver):
    """Reads bucket files into its own memory."""

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        super().__init__(spec, device)
        self._read = np.empty(spec.bucket_bytes, dtype=np.uint8)

    def receive(self, handle: BucketHandle) -> Bucket:
        assert isinstance(handle.location, str)
        file = Path(handle.location)
        self._await(file)
        data = self._read[: handle.nbytes]
        with file.open("rb", buffering=0) as source:
            rest = data.data
            while rest and (count := source.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise RunError(
                f"{self._spec.name} found {file} {len(rest)} bytes too short: check that its disk is not full."
            )
        return self._arrived(Bucket(data, handle.records))

    def close(self) -> None:
        super().close()
        self._read = np.empty(0, dtype=np.uint8)

    def _await(self, file: Path) -> None:
        limit = min(_FILE_S, self._spec.timeout_s)
        until = time.monotonic() + limit
        while not file.is_file():
            if time.monotonic() > until:
                raise RunError(
                    f"{self._spec.name} waited {limit:g} s for {file}: {self._spec.members[0]} exited, or the hosts do "
                    "not share output_dir, which cluster.sync_mode=disk needs; use cluster.sync_mode=broadcast."
                )
            time.sleep(_FILE_POLL_S)


class Meeting:
    """Hosts the store in which the members of a broadcast find each other; belongs to the driver, which outlives them."""

    def __init__(self, host: str) -> None:
        descriptor, port = listener(host, 0)
        self._store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        self.address = (host, port)

    def end(self) -> None:
        """Make every member raise PeerLost that waits for another member, now or later. Idempotent."""
        self._store.set(_ENDED, "1")


class BroadcastSender(Sender):
    """Broadcasts buckets to a process group in which it is rank 0; sends one bucket while the next is packed."""

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        """Blocks until every receiver has joined. Raises PeerLost naming the missing receivers."""
        super().__init__(spec, device)
        self._group = _Group(spec, self.device)
        self._in_flight: dist.Work | None = None

    def send(self, bucket: Bucket) -> BucketHandle:
        """See `Sender`. Returns when the previous broadcast is complete and this one has started."""
        self._finish()
        try:
            self._in_flight = self._group.broadcast(bucket.flat)
        except RuntimeError as problem:
            raise self._lost(self._sent + 1) from problem
        return self._handle(bucket, None)

    def release(self, taken: int) -> None:
        """See `Sender`. The last broadcast of an export refers to its memory until it is complete."""
        if taken == self._sent:
            self._finish()
        super().release(taken)

    def close(self) -> None:
        self._in_flight = None
        self._group.leave()
        super().close()

    def _finish(self) -> None:
        """Block until the broadcast in flight, if any, is complete."""
        work, self._in_flight = self._in_flight, None
        if work is None:
            return
        try:
            self._group.complete(work)
        except (RuntimeError, TimeoutError) as problem:
            raise self._lost(self._sent) from problem

    def _lost(self, number: int) -> PeerLost:
        missing = self._group.missing_receivers(number)
        return PeerLost(
            f"bucket {number} of the weights was not received by {' and '.join(missing) or 'a receiver'}: it exited or "
            f"hung for {self._spec.timeout_s:g} s; look at its log."
        )


class BroadcastReceiver(Receiver):
    """Receives broadcasts as a rank above 0 of the process group."""

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        """Blocks until every member has joined. Raises PeerLost naming the missing members."""
        super().__init__(spec, device)
        self._group = _Group(spec, self._device)
        self._received = 0

    def receive(self, handle: BucketHandle) -> Bucket:
        if handle.number != self._received + 1:
            raise RuntimeError(f"Bucket {handle.number} cannot be received after bucket {self._received}.")
        bucket = Bucket(self._room(handle.nbytes), handle.records)
        try:
            self._group.complete(self._group.broadcast(bucket.flat))
            self._group.store.set(f"taken/{self._spec.rank}", str(handle.number))
        except (RuntimeError, TimeoutError) as problem:
            raise PeerLost(
                f"bucket {handle.number} of the weights did not reach {self._spec.name}: {self._spec.members[0]} or "
                f"another receiver exited or hung for {self._spec.timeout_s:g} s; look at their logs."
            ) from problem
        self._received = handle.number
        return bucket

    def close(self) -> None:
        self._group.leave()
        super().close()


class _Group:
    """A process group separate from torch's default one: gloo on CPUs, NCCL on GPUs.

    The store of the members' `Meeting` records the members that have joined and the buckets that each member has taken,
    so errors can name the missing members. A member that leaves, also because a broadcast failed, ends the meeting:
    neither backend tells all the other members.

    NCCL needs a separate device per member, and differs from gloo in two ways:
    - The first broadcast connects the members and blocks until all take part. However, a receiver takes part only once
      it has a bucket's handle, which the sender's `send` returns. So the constructor broadcasts one byte.
    - `wait` blocks a CUDA stream, not the caller, and a watchdog of torch looks for failures and the group's timeout. It
      kills the process, or has the monitor of the process's other groups kill it minutes later. So the group is made
      without a watchdog, and `complete` polls.
    """

    def __init__(self, spec: TransportSpec, device: torch.device | None) -> None:
        """`device` is the memory's device, None for host memory."""
        self._spec = spec
        self.store = _join(spec)
        self._group: Any = None
        try:
            # Connecting blocks until all members take part, and cannot be interrupted.
            connecting = _in_background(partial(self._connect, device))
            self._await(connecting.done)
            self.complete(connecting.result())
        except (RuntimeError, TimeoutError) as problem:
            self.leave()
            raise PeerLost(
                f"{spec.name} joined the others, but cannot exchange data with them ({problem}): one of "
                f"{' and '.join(spec.members)} exited or hung; look at their logs."
            ) from problem

    def broadcast(self, flat: Tensor) -> dist.Work:
        """Start an asynchronous broadcast of `flat` from rank 0. Raises RuntimeError after `leave`."""
        if self._group is None:
            raise RuntimeError("this process has left the group")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work: dist.Work = self._group.broadcast([flat], options)
        return work

    def complete(self, work: dist.Work) -> None:
        """Block until `work` is done, on the device too.

        Leaves the group and raises RuntimeError on failure and at the end of the meeting, TimeoutError on a hang.
        """
        try:
            self._await(work.is_completed)
            work.wait()
        except (RuntimeError, TimeoutError):
            self.leave()
            raise

    def missing_receivers(self, number: int) -> list[str]:
        """Return the names of receivers that have not taken bucket `number`."""

        def taken(key: str) -> int:
            return int(self.store.get(key)) if self.store.check([key]) else 0

        members = enumerate(self._spec.members)
        return [name for rank, name in members if rank and taken(f"taken/{rank}") < number]

    def leave(self) -> None:
        """Leave the group and end the meeting; pending waits of other members fail. Idempotent."""
        with suppress(RuntimeError):  # The driver may be gone.
            self.store.set(_ENDED, "1")
        if self._group is not None:
            abandoned, self._group = [self._group], None
            abandoned[0].abort()
            # Gloo's destructor waits for broadcasts that wait for other members, so no caller may run it.
            _in_background(abandoned.clear)

    def _connect(self, device: torch.device | None) -> dist.Work:
        # A clone, because a store serves no other thread while one waits for a key.
        self._group = _open_group(self._spec, dist.PrefixStore("group", cast("Any", self.store).clone()))
        return self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))

    def _await(self, done: Callable[[], bool]) -> None:
        _wait(done, self.store, self._spec.timeout_s, _WORK_POLL_S)


def _wait(done: Callable[[], bool], store: dist.Store, timeout_s: float, poll_s: float) -> None:
    """Poll `done` until it is true. Raises RuntimeError if the meeting of `store` ends, TimeoutError after `timeout_s`."""
    now = time.monotonic()
    until, next_look = now + timeout_s, now + _END_POLL_S
    while not done():
        now = time.monotonic()
        if now > until:
            raise TimeoutError(f"waited {timeout_s:g} s")
        if now > next_look:
            next_look = now + _END_POLL_S
            if store.check([_ENDED]):
                raise RuntimeError("a member has left, or is dead")
        time.sleep(poll_s)


def _in_background(action: Callable[[], T]) -> Future[T]:
    """Run `action` in a thread that may block for ever without keeping the process alive."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(action())
        except BaseException as problem:  # noqa: BLE001 - raised where the result is read
            result.set_exception(problem)

    threading.Thread(target=run, daemon=True).start()
    return result


def _join(spec: TransportSpec) -> dist.TCPStore:
    """Join the meeting and block until all members have joined. Raises PeerLost naming missing members."""
    assert spec.address is not None
    host, port = spec.address
    missing = [spec.name]

    def all_here() -> bool:
        missing[:] = [name for rank, name in enumerate(spec.members) if not store.check([f"here/{rank}"])]
        return not missing

    try:
        limit = timedelta(seconds=spec.timeout_s)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        store.set(f"here/{spec.rank}", "1")
        _wait(all_here, store, spec.timeout_s, _MEMBER_POLL_S)
    except (OSError, RuntimeError) as problem:
        raise PeerLost(
            f"{' and '.join(missing)} did not join the weight transport at {host}:{port} ({problem}): look at its log."
        ) from problem
    return store


def _open_group(spec: TransportSpec, store: dist.Store) -> Any:
    limit = timedelta(seconds=_PATIENCE * spec.timeout_s)
    if spec.device is Device.cpu:
        return dist.ProcessGroupGloo(store, spec.rank, len(spec.members), limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    # The constructor reads it, and then starts neither a watchdog nor its monitor. TORCH_NCCL_ASYNC_ERROR_HANDLING=0 would
    # not do: such a watchdog throws nothing, but tells all monitors of the process to end it.
    with environment({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
        return dist.ProcessGroupNCCL(store, spec.rank, len(spec.members), options)


class IpcSender(Sender):
    """Packs and hashes buckets on its own GPU and shares their memory (CUDA IPC): the bytes never leave the GPUs.

    `send` blocks until the bucket is written, and makes a single-use torch IPC handle for each receiver. A receiver
    maps the memory, checks it, copies what it needs, synchronises and unmaps it.

    - With pipeline parallelism, the first rank of every stage is a sender of its own stage's buckets, which saves a
      copy to rank 0. `skip` keeps the bucket counts of these senders equal.
    - torch frees shared memory only when every handle was used: a receiver that died can leave two buckets allocated.
    - Sender and receiver may see different GPUs or number them differently: the memory is mapped on the receiver's own
      device, and the CUDA driver opens handles of GPUs that a process does not see. If one GPU cannot read the memory
      of the other, the first `receive` raises RunError.
    """

    def send(self, bucket: Bucket) -> BucketHandle:
        """See `Sender`. Waits until the device has written the bucket."""
        assert self.device is not None
        await_device(self.device)
        try:
            handles = tuple(_shared_once(bucket.flat) for _ in self._spec.members[1:])
        except RuntimeError as problem:
            raise RunError(
                f"{self._spec.name} cannot share the memory of its GPU ({problem}): unset PYTORCH_CUDA_ALLOC_CONF."
            ) from problem
        return self._handle(bucket, DeviceMemoryLocation(host_identity(), os.getpid(), handles))

    def skip(self) -> None:
        """Count a bucket that the sender of another stage sends."""
        self._sent += 1


class IpcReceiver(Receiver):
    """Maps buckets from a sender's GPU onto its own device."""

    def receive(self, handle: BucketHandle) -> Bucket:
        location = handle.location
        assert isinstance(location, DeviceMemoryLocation)
        assert self._device is not None
        self.release()
        if location.host != host_identity():
            raise RunError(
                f"cluster.sync_mode=ipc needs the actor and {self._spec.name} on one host: use cluster.sync_mode=broadcast."
            )
        try:
            mapped = self._memory = _map_handle(location.handles[self._spec.rank - 1], self._device)
        except (RuntimeError, OSError, EOFError) as problem:
            raise PeerLost(
                f"{self._spec.name} cannot open the weights on the GPU of process {location.pid} of the actor group "
                f"({problem}): the process exited (look at its log), the two GPUs cannot read each other's memory "
                "(nvidia-smi topo -p2p r), or the containers do not share /dev/shm and the PID namespace. In the last "
                "two cases use cluster.sync_mode=tensor."
            ) from problem
        return Bucket(mapped, handle.records)


def await_device(device: torch.device) -> None:
    """Block until all work of this process on `device` is done, on every stream; no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _shared_once(tensor: Tensor) -> bytes:
    """Return a single-use pickle (torch rebuild function, arguments) that rebuilds the tensor in another process."""
    return bytes(ForkingPickler.dumps(reductions.reduce_tensor(tensor)))


def _map_handle(handle: bytes, device: torch.device) -> Tensor:
    rebuild, arguments = pickle.loads(handle)
    if device.type == "cuda":
        changed: list[Any] = list(arguments)
        changed[STORAGE_DEVICE] = device.index
        # The sender has synchronised already. An event of a GPU invisible to this process may fail to open, and torch
        # never closes opened events.
        changed[EVENT_SYNC_REQUIRED] = False
        arguments = tuple(changed)
    tensor: Tensor = rebuild(*arguments)
    return tensor


_ENDS: dict[SyncMode, tuple[type[Sender], type[Receiver]]] = {
    SyncMode.tensor: (SharedSender, SharedReceiver),
    SyncMode.broadcast: (BroadcastSender, BroadcastReceiver),
    SyncMode.disk: (DiskSender, DiskReceiver),
    SyncMode.ipc: (IpcSender, IpcReceiver),
}


def open_sender(spec: TransportSpec, device: torch.device | None = None) -> Sender:
    """Open the sending end; a broadcast blocks until all receivers join. Raises RunError if that fails.

    `device` is for tests, in which memory of the CPU stands in for a GPU's.
    """
    return _ENDS[spec.mode][0](spec, device)


def open_receiver(spec: TransportSpec, device: torch.device | None = None) -> Receiver:
    """Open a receiving end; a broadcast blocks until all members join. Raises RunError if that fails.

    See `open_sender` for `device`.
    """
    return _ENDS[spec.mode][1](spec, device)
