"""Packs, hashes and sends the weights of a version in buckets, from the actor to every receiving process.

A bucket holds named tensors, each with a checksum, in one contiguous byte range. The bytes are a numpy array in host
memory or a tensor in device memory; a device bucket is packed, hashed and checked on its device. Unpacking returns the
packed bytes or raises an error that names the tensor. The digest of a version depends on every name, dtype, shape and
byte, but not on tensor order or on the split into buckets.

Each byte is copied once, and hashed by the sender and by every receiver. The hash of a tensor combines the hashes of
its pieces. Several threads pack host pieces, because one core reaches about half of the memory bandwidth; each thread
copies and hashes a piece (XXH3) block by block, while the block is in the core's cache. Device pieces are hashed by
`hash_pieces`, so host and device hashes differ.

`open_sender` and `open_receiver` make the two ends of a transport from a spec. Buckets pass through host memory, except
with `ipc`, which keeps them on GPUs. Contract of all transports:
- A sender numbers its buckets from 1 over its lifetime. The caller packs each bucket into memory that the sender lends
  (`next_slot`), calls `send`, and passes the small handle that `send` returns to the receivers by other means.
- A receiver turns each handle, in order, into a bucket. The bytes are valid until `release`, the next `receive` or
  `close`, whichever comes first; copy them to keep them. A transport does not check the bytes; `unpack` does. A
  receiver calls `release` for a bucket before the sender does.
- The sender overwrites or removes bytes only after `Sender.release` reports that every receiver has taken the bucket.
  Two buckets can be in flight, so the sender packs the next bucket while receivers read the previous one.
- Every wait has a timeout and raises RunError naming the missing members.
"""

from __future__ import annotations

import mmap
import os
import pickle
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing import reductions

from rlsys.config.schema import Device, SyncMode
from rlsys.errors import RunError
from rlsys.weights.sockets import listener
from rlsys.weights.weight_map import aligned, packed

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


@dataclass(frozen=True, slots=True)
class Bucket:
    """A block of whole tensors of one weight version."""

    data: Memory  # [bytes]
    records: tuple[TensorRecord, ...]

    @property
    def in_host(self) -> NDArray[np.uint8]:
        """The bytes of this host bucket. Raises TypeError for a device bucket."""
        if isinstance(self.data, Tensor):
            raise TypeError(f"Expected a bucket in host memory, got one on {self.data.device}.")
        return self.data

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
        """Return a copy with the same hashes, on the same device or, with `to_host`, on the CPU."""
        if not isinstance(self.data, Tensor):
            return Bucket(self.data.copy(), self.records)
        return Bucket(self.data.to("cpu" if to_host else self.data.device, copy=True), self.records)


def checksum(name: str, tensor: Tensor) -> str:
    """Return the hash of a tensor's name, dtype, shape and piece hashes: 32 hex digits (XXH3, 128 bits)."""
    return _joined_hash(name, tensor, (xxhash.xxh3_128_digest(piece.data) for piece in _pieces(bytes_of(tensor))))


def digest(checksums: Mapping[str, str]) -> str:
    """Return the hash of a whole version, given the checksum of each tensor by name; their order does not matter."""
    total = xxhash.xxh3_128()
    for name in sorted(checksums):
        total.update(f"{name}={checksums[name]};".encode())
    return total.hexdigest()


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Copy tensors, in order, into host buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    for run in packed(tensors, lambda named: aligned(named[1].nbytes), bucket_bytes):
        yield pack_into(np.empty(sum(aligned(tensor.nbytes) for _, tensor in run), dtype=np.uint8), run)


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
    sums = [[_mixed_sum(piece, keys) for piece in _words(flat)] for flat in flats]
    # Read all sums at once, because each read synchronises with the device.
    numbers = iter(torch.stack([total for of_flat in sums for total in of_flat]).tolist())
    return [[next(numbers).to_bytes(_WORD_BYTES, "little", signed=True) for _ in of_flat] for of_flat in sums]


def _words(flat: Tensor) -> Iterator[Tensor]:
    """Yield the pieces of `flat`, each of at most `DEVICE_PIECE_BYTES`, zero-padded and viewed as [words] int64."""
    for start in range(0, flat.numel(), DEVICE_PIECE_BYTES):
        piece = flat[start : start + DEVICE_PIECE_BYTES]
        missing = -piece.numel() % _WORD_BYTES
        yield (torch.cat([piece, piece.new_zeros(missing)]) if missing else piece).view(torch.int64)


def _mixed_sum(words: Tensor, keys: Tensor) -> Tensor:
    mixed = words + keys[: words.numel()]
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        # Right shift of int64 copies the sign bit; the mask makes it a logical shift.
        mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            mixed *= _signed(factor)
    return mixed.sum()


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
    address: tuple[str, int]  # Host and free port of the sender's store, where the members of a broadcast meet.
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


class Sender(ABC):
    """Sending end of a transport. Lends its memory slots in turn, one per bucket in flight."""

    def __init__(self, pieces: Sequence[Memory] = ()) -> None:
        self._slots = pieces
        self._sent = self._taken = 0
        """Number of buckets sent, and number of buckets that every receiver has taken."""

    def next_slot(self) -> Memory:
        """Return memory for the next bucket, [bucket_bytes].

        Raises RuntimeError if all slots hold buckets that are not released yet.
        """
        if self._sent - self._taken >= len(self._slots):
            raise RuntimeError(
                f"Bucket {self._sent + 1} has no room: {self._sent} were sent, but only {self._taken} released."
            )
        return self._slots[self._sent % len(self._slots)]

    @abstractmethod
    def send(self, bucket: Bucket) -> BucketHandle:
        """Send the bucket packed into the memory that `next_slot` returned last; return its handle.

        Raises RunError if the transport fails, e.g. if a receiver did not take the previous broadcast.
        """

    def release(self, taken: int) -> None:
        """Record that every receiver has taken the first `taken` buckets, and free their memory for reuse."""
        self._taken = taken

    @abstractmethod
    def close(self) -> None:
        """Free all resources; idempotent."""

    def _handle(
        self, bucket: Bucket, location: SharedMemoryLocation | DeviceMemoryLocation | str | None
    ) -> BucketHandle:
        """Count `bucket` as sent and return its handle; `next_slot` then returns the next slot."""
        self._sent += 1
        return BucketHandle(self._sent, bucket.records, bucket.data.nbytes, location)


class Receiver(ABC):
    """Receiving end of a transport. Any thread may use it, but only one thread at a time."""

    @abstractmethod
    def receive(self, handle: BucketHandle) -> Bucket:
        """Return the bucket of `handle`. Raises RunError if its bytes do not arrive, e.g. because the sender exited."""

    def release(self) -> None:  # noqa: B027
        """End the use of the last bucket's bytes; no-op unless the receiver maps memory anew for each bucket."""

    def close(self) -> None:
        """Free all resources; idempotent."""
        self.release()


class SharedSender(Sender):
    """Packs buckets into memory shared by the processes of one host; receivers read it in place.

    The memory is anonymous (memfd_create). The kernel frees it when the last process that has it open or mapped exits
    or is killed, and the size of /dev/shm does not limit it. Pages are allocated on first write.
    """

    def __init__(self, spec: TransportSpec) -> None:
        self._stride = aligned(spec.bucket_bytes)
        self._descriptor = os.memfd_create("weights")
        os.ftruncate(self._descriptor, SLOTS * self._stride)
        memory = np.frombuffer(mmap.mmap(self._descriptor, SLOTS * self._stride), dtype=np.uint8)
        super().__init__([memory[start : start + spec.bucket_bytes] for start in range(0, memory.nbytes, self._stride)])
        self._host = host_identity()

    def send(self, bucket: Bucket) -> BucketHandle:
        assert not isinstance(bucket.data, Tensor), "a device bucket is not in the lent memory"
        location = SharedMemoryLocation(self._host, os.getpid(), self._descriptor, self._sent % SLOTS * self._stride)
        return self._handle(bucket, location)

    def close(self) -> None:
        """See `Sender`. The memory itself is freed with the last bucket that refers to it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._slots = -1, ()


class SharedReceiver(Receiver):
    """Maps the sender's memory read-only through /proc/<pid>/fd, so each receive checks that the sender is alive."""

    def __init__(self, spec: TransportSpec) -> None:
        self._spec, self._host = spec, host_identity()
        self.close()

    def receive(self, handle: BucketHandle) -> Bucket:
        location = handle.location
        assert isinstance(location, SharedMemoryLocation)
        if location.host != self._host:
            raise RunError(
                f"cluster.sync_mode=tensor needs the actor and {self._spec.name} on one host: use cluster.sync_mode=broadcast."
            )
        self._map(location)
        return Bucket(self._memory[location.offset : location.offset + handle.nbytes], handle.records)

    def close(self) -> None:
        self._inode, self._memory = -1, np.empty(0, dtype=np.uint8)

    def _map(self, location: SharedMemoryLocation) -> None:
        """Map the memory at `location` unless it is mapped already."""
        try:
            descriptor = os.open(f"/proc/{location.pid}/fd/{location.descriptor}", os.O_RDONLY)
        except OSError as problem:
            raise RunError(
                f"{self._spec.name} cannot open the weights in the memory of {self._spec.members[0]}, process "
                f"{location.pid} ({problem.strerror}): that process exited, or belongs to another user; look at its "
                "log."
            ) from problem
        try:
            inode = os.fstat(descriptor).st_ino
            if inode != self._inode:
                mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                self._memory, self._inode = np.frombuffer(mapped, dtype=np.uint8), inode
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

    def __init__(self, spec: TransportSpec) -> None:
        self._folder = Path(spec.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        # One array serves all slots: `send` has written a bucket to disk when it returns.
        super().__init__([np.empty(spec.bucket_bytes, dtype=np.uint8)] * SLOTS)
        self._files: dict[int, Path] = {}

    def send(self, bucket: Bucket) -> BucketHandle:
        number = self._sent + 1
        file = self._folder / f"bucket-{number:06d}"
        partial = file.with_name(f".{file.name}.partial")
        with partial.open("wb", buffering=0) as out:
            write_all(out, bucket.in_host.data)
        partial.rename(file)
        self._files[number] = file
        return self._handle(bucket, str(file.resolve()))

    def release(self, taken: int) -> None:
        super().release(taken)
        for number in [number for number in self._files if number <= taken]:
            self._files.pop(number).unlink(missing_ok=True)

    def close(self) -> None:
        self.release(self._sent)


class DiskReceiver(Receiver):
    """Reads bucket files into its own memory."""

    def __init__(self, spec: TransportSpec) -> None:
        self._spec = spec
        self._memory = np.empty(spec.bucket_bytes, dtype=np.uint8)

    def receive(self, handle: BucketHandle) -> Bucket:
        assert isinstance(handle.location, str)
        file = Path(handle.location)
        self._await(file)
        bucket = Bucket(self._memory[: handle.nbytes], handle.records)
        with file.open("rb", buffering=0) as source:
            rest = bucket.in_host.data
            while rest and (count := source.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise RunError(
                f"{self._spec.name} found {file} {len(rest)} bytes too short: check that its disk is not full."
            )
        return bucket

    def close(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

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


class BroadcastSender(Sender):
    """Broadcasts buckets to a process group in which it is rank 0; sends one bucket while the next is packed."""

    def __init__(self, spec: TransportSpec) -> None:
        """Blocks until every receiver has joined. Raises RunError naming the missing receivers."""
        self._spec = spec
        self._group = _Group(spec)
        super().__init__([_host_memory(spec) for _ in range(SLOTS)])
        self._in_flight: dist.Work | None = None

    def send(self, bucket: Bucket) -> BucketHandle:
        """See `Sender`. Returns when the previous broadcast is complete and this one has started."""
        self._finish()
        self._in_flight = self._group.broadcast(self._group.outgoing(bucket.in_host))
        return self._handle(bucket, None)

    def close(self) -> None:
        self._in_flight = None
        self._group.leave()

    def _finish(self) -> None:
        """Block until the broadcast in flight, if any, is complete."""
        work, self._in_flight = self._in_flight, None
        if work is None:
            return
        try:
            self._group.complete(work)
        except (RuntimeError, TimeoutError) as problem:
            missing = self._group.missing_receivers(self._sent)
            raise RunError(
                f"bucket {self._sent} of the weights was not received by {' and '.join(missing) or 'a receiver'}: it "
                f"exited or hung for {self._spec.timeout_s:g} s; look at its log."
            ) from problem


class BroadcastReceiver(Receiver):
    """Receives broadcasts as a rank above 0 of the process group."""

    def __init__(self, spec: TransportSpec) -> None:
        """Blocks until every member has joined. Raises RunError naming the missing members."""
        self._spec = spec
        self._group = _Group(spec)
        self._memory = _host_memory(spec)
        self._received = 0

    def receive(self, handle: BucketHandle) -> Bucket:
        if handle.number != self._received + 1:
            raise RuntimeError(f"Bucket {handle.number} cannot be received after bucket {self._received}.")
        bucket = Bucket(self._memory[: handle.nbytes], handle.records)
        incoming = self._group.incoming(bucket.in_host)
        try:
            self._group.complete(self._group.broadcast(incoming))
            self._group.store.set(f"taken/{self._spec.rank}", str(handle.number))
        except (RuntimeError, TimeoutError) as problem:
            raise RunError(
                f"bucket {handle.number} of the weights did not reach {self._spec.name}: {self._spec.members[0]} "
                f"exited or hung for {self._spec.timeout_s:g} s; look at its log."
            ) from problem
        if incoming.is_cuda:
            torch.from_numpy(bucket.in_host).copy_(incoming)
        self._received = handle.number
        return bucket

    def close(self) -> None:
        self._group.leave()


class _Group:
    """A process group separate from torch's default one: gloo on CPUs, NCCL on GPUs.

    The sender hosts the group's store, which records the members that have joined and the buckets that each member has
    taken, so errors can name the missing members. With GPUs, bytes are hashed in pinned host memory and pass through a
    device buffer on the sender and on every receiver.

    NCCL needs a separate device per member, and differs from gloo in three ways:
    - The first broadcast connects the members and blocks until all take part. However, a receiver takes part only once
      it has a bucket's handle, which the sender's `send` returns. So the constructor broadcasts one byte.
    - `wait` blocks a CUDA stream, not the caller. When the group's timeout expires, torch's watchdog kills the process
      before any error can name the missing members. So `complete` polls, and gives up before the group's timeout.
    - Each thread has its own current device, and any thread may call. So the constructor fixes the device.
    """

    def __init__(self, spec: TransportSpec) -> None:
        self._spec = spec
        self.store = _join(spec)
        self._group = _open_group(spec, dist.PrefixStore("group", self.store))
        self._staging: Tensor | None = None
        if spec.device is Device.gpu:
            device = torch.device("cuda", torch.cuda.current_device())
            self._staging = torch.empty(spec.bucket_bytes, dtype=torch.uint8, device=device)
        try:
            self.complete(self.broadcast(self.incoming(np.zeros(1, dtype=np.uint8))))
        except (RuntimeError, TimeoutError) as problem:
            raise RunError(
                f"{spec.name} joined the others, but cannot exchange data with them ({problem}): one of "
                f"{' and '.join(spec.members)} exited or hung; look at their logs."
            ) from problem

    def outgoing(self, data: NDArray[np.uint8]) -> Tensor:
        """Return the tensor to broadcast for `data`: the data itself, or its copy in the device buffer."""
        flat = torch.from_numpy(data)
        return flat if self._staging is None else self._staging[: data.nbytes].copy_(flat)

    def incoming(self, data: NDArray[np.uint8]) -> Tensor:
        """Return the tensor to receive into: `data` itself, or the device buffer, which the caller copies to `data`."""
        return torch.from_numpy(data) if self._staging is None else self._staging[: data.nbytes]

    def broadcast(self, flat: Tensor) -> dist.Work:
        """Start an asynchronous broadcast of `flat` from rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work: dist.Work = self._group.broadcast([flat], options)
        return work

    def complete(self, work: dist.Work) -> None:
        """Block until `work` is done, on the device too. Raises RuntimeError on failure, TimeoutError on a hang."""
        until = time.monotonic() + self._spec.timeout_s
        while not work.is_completed():
            if time.monotonic() > until:
                raise TimeoutError(f"a broadcast timed out after {self._spec.timeout_s:g} s")
            time.sleep(_WORK_POLL_S)
        work.wait()

    def missing_receivers(self, number: int) -> list[str]:
        """Return the names of receivers that have not taken bucket `number`."""

        def taken(key: str) -> int:
            return int(self.store.get(key)) if self.store.check([key]) else 0

        members = enumerate(self._spec.members)
        return [name for rank, name in members if rank and taken(f"taken/{rank}") < number]

    def leave(self) -> None:
        """Leave the group; pending waits of other members fail."""
        if self._group is not None:
            self._group.abort()
        self._group = self._staging = None


def _join(spec: TransportSpec) -> dist.TCPStore:
    """Join the sender's store and block until all members have joined. Raises RunError naming missing members."""
    host, port = spec.address
    try:
        store = dist.TCPStore(
            host,
            port,
            is_master=spec.rank == 0,
            timeout=timedelta(seconds=spec.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener(host, port)[0] if spec.rank == 0 else None,
        )
        store.set(f"here/{spec.rank}", "1")
        until = time.monotonic() + spec.timeout_s
        while missing := [name for rank, name in enumerate(spec.members) if not store.check([f"here/{rank}"])]:
            if time.monotonic() > until:
                raise RunError(
                    f"{' and '.join(missing)} did not join the weight transport within {spec.timeout_s:g} s: look at "
                    "its log."
                )
            time.sleep(_MEMBER_POLL_S)
    except (OSError, RuntimeError) as problem:
        raise RunError(
            f"{spec.name} could not join the weight transport of {spec.members[0]} at {host}:{port}: one of them "
            f"exited or hung for {spec.timeout_s:g} s; look at its log. ({problem})"
        ) from problem
    return store


def _open_group(spec: TransportSpec, store: dist.Store) -> Any:
    limit = timedelta(seconds=_PATIENCE * spec.timeout_s)
    if spec.device is Device.cpu:
        return dist.ProcessGroupGloo(store, spec.rank, len(spec.members), limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, spec.rank, len(spec.members), options)


def _host_memory(spec: TransportSpec) -> NDArray[np.uint8]:
    """Return host memory for one bucket, pinned if the spec uses a GPU: pinned copies are several times as fast."""
    if spec.device is Device.gpu:
        memory: NDArray[np.uint8] = torch.empty(spec.bucket_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory
    return np.empty(spec.bucket_bytes, dtype=np.uint8)


class IpcSender(Sender):
    """Packs and hashes buckets on its own GPU and shares their memory (CUDA IPC): the bytes never leave the GPUs.

    `send` blocks until the bucket is written, and makes a single-use torch IPC handle for each receiver. A receiver
    maps the memory, checks it, copies what it needs, synchronises and unmaps it.

    - The two slots are allocated when an export begins and freed when all its buckets are taken; between exports they
      use no memory.
    - With pipeline parallelism, the first rank of every stage is a sender of its own stage's buckets, which saves a
      copy to rank 0. `skip` keeps the bucket counts of these senders equal.
    - torch frees shared memory only when every handle was used: a receiver that died can leave two buckets allocated.
    - Sender and receiver may see different GPUs or number them differently: the memory is mapped on the receiver's own
      device. If one GPU cannot read the memory of the other, the first `receive` raises RunError.

    Tests pass a CPU as `device`, with memory shared by torch; `open_sender` and `open_receiver` always use the GPU.
    """

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        """`device` holds the buckets: this process's GPU by default."""
        super().__init__()
        self._spec, self.device, self._host = spec, device or _device_of(spec), host_identity()

    def next_slot(self) -> Memory:
        if not self._slots:
            size = self._spec.bucket_bytes
            self._slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
        return super().next_slot()

    def send(self, bucket: Bucket) -> BucketHandle:
        """See `Sender`. Waits until the device has written the bucket."""
        await_device(self.device)
        try:
            handles = tuple(_shared_once(bucket.flat) for _ in self._spec.members[1:])
        except RuntimeError as problem:
            raise RunError(
                f"{self._spec.name} cannot share the memory of its GPU ({problem}): unset PYTORCH_CUDA_ALLOC_CONF, or "
                "use cluster.sync_mode=tensor."
            ) from problem
        location = DeviceMemoryLocation(self._host, os.getpid(), handles)
        return self._handle(bucket, location)

    def skip(self) -> None:
        """Count a bucket that the sender of another stage sends."""
        self._sent += 1

    def release(self, taken: int) -> None:
        """See `Sender`. Frees the memory when no bucket is in flight."""
        super().release(taken)
        if taken == self._sent:
            self._slots = ()

    def close(self) -> None:
        self._slots, self._sent, self._taken = (), 0, 0


class IpcReceiver(Receiver):
    """Maps buckets from a sender's GPU onto its own device."""

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        """Buckets are mapped and read on `device`: this process's GPU by default."""
        self._spec, self._device, self._host = spec, device or _device_of(spec), host_identity()
        self._memory: Tensor | None = None

    def receive(self, handle: BucketHandle) -> Bucket:
        location = handle.location
        assert isinstance(location, DeviceMemoryLocation)
        self.release()
        if location.host != self._host:
            raise RunError(
                f"cluster.sync_mode=ipc needs the actor and {self._spec.name} on one host: use cluster.sync_mode=broadcast."
            )
        try:
            self._memory = _map_handle(location.handles[self._spec.rank - 1], self._device)
        except (RuntimeError, OSError, EOFError) as problem:
            raise RunError(
                f"{self._spec.name} cannot open the weights on the GPU of process {location.pid} of the actor group "
                f"({problem}): the process exited (look at its log), the two GPUs cannot read each other's memory "
                "(nvidia-smi topo -p2p r), or the containers do not share /dev/shm and the PID namespace. In the last "
                "two cases use cluster.sync_mode=tensor."
            ) from problem
        return Bucket(self._memory, handle.records)

    def release(self) -> None:
        """See `Receiver`. Blocks until the device has finished reading the bucket."""
        if self._memory is not None:
            await_device(self._device)
        self._memory = None


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


def _device_of(spec: TransportSpec) -> torch.device:
    """Return this process's GPU. Raises RunError if it has none."""
    if spec.device is not Device.gpu or not torch.cuda.is_available():
        raise RunError(
            f"cluster.sync_mode=ipc sends weights through GPU memory, but {spec.name} sees no GPU: use "
            "cluster.sync_mode=tensor."
        )
    return torch.device("cuda", torch.cuda.current_device())


_ENDS: dict[SyncMode, tuple[Callable[[TransportSpec], Sender], Callable[[TransportSpec], Receiver]]] = {
    SyncMode.tensor: (SharedSender, SharedReceiver),
    SyncMode.broadcast: (BroadcastSender, BroadcastReceiver),
    SyncMode.disk: (DiskSender, DiskReceiver),
    SyncMode.ipc: (IpcSender, IpcReceiver),
}


def open_sender(spec: TransportSpec) -> Sender:
    """Open the sending end; a broadcast blocks until all receivers join. Raises RunError if that fails."""
    return _ENDS[spec.mode][0](spec)


def open_receiver(spec: TransportSpec) -> Receiver:
    """Open a receiving end; a broadcast blocks until all members join. Raises RunError if that fails."""
    return _ENDS[spec.mode][1](spec)
