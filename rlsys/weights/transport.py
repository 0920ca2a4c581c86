"""The way of a version's weights from the actor's first rank to every process that takes them: packed, hashed, carried.

A bucket holds named tensors in one flat run of bytes, each tensor with a checksum: in host memory, as a numpy array, or in a
device's memory, as a tensor. What is on a device is packed, hashed and checked there. Whoever unpacks gets the bytes that were
packed, or an error that names the tensor. The digest of a version depends on every name, dtype, shape and byte, and not on order
or on how tensors were spread over buckets.

A byte is copied once and hashed at both ends. The hash of a tensor is one of the hashes of its pieces. In host memory (XXH3)
that lets threads pack several pieces at a time: one core copies at about half the speed that memory has. A piece is copied and
hashed block by block, while the block is in the core's cache. On a device see `hash_pieces`; the hashes of the two differ.

`open_sender` and `open_receiver` make the two ends of a transport from a spec. Buckets pass through host memory, but for `ipc`:
those are packed, hashed, checked and copied on GPUs. The same holds for every way of travelling:
- A sender hands out buckets one by one, numbered from 1 over its whole life. Each is packed into memory that the sender lends
  (`room`), sent, and described by a handle, which is small and goes by other means.
- A receiver turns each handle, in order, into a bucket. Its bytes are valid until `release`, the next `receive` or `close`,
  whichever comes first: whoever needs them for longer copies them. They are to be checked with `unpack`; a transport does not
  look at them. A receiver releases what it has read before the sender hears of it.
- Bytes are overwritten or removed only once every receiver has taken the bucket, of which the sender is told (`release`). Two
  buckets may be under way, so that the next is packed while the last is read.
- Every wait has a time-out and names who is missing (RunError).
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
        if not isinstance(self.data, Tensor):
            return Bucket(self.data.copy(), self.records)
        return Bucket(self.data.to("cpu" if to_host else self.data.device, copy=True), self.records)


def checksum(name: str, tensor: Tensor) -> str:
    """Hash of a tensor's name, dtype, shape and bytes (as the hashes of their pieces), 32 hex digits (XXH3, 128 bits)."""
    return _joined_hash(name, tensor, (xxhash.xxh3_128_digest(piece.data) for piece in _pieces(bytes_of(tensor))))


def digest(checksums: Mapping[str, str]) -> str:
    """One hash of a whole version from its tensors' checksums by name; their order does not matter."""
    total = xxhash.xxh3_128()
    for name in sorted(checksums):
        total.update(f"{name}={checksums[name]};".encode())
    return total.hexdigest()


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Copy tensors, in order, into buckets of at most `bucket_bytes`, or of one larger tensor."""
    for run in packed(tensors, lambda named: aligned(named[1].nbytes), bucket_bytes):
        yield pack_into(np.empty(sum(aligned(tensor.nbytes) for _, tensor in run), dtype=np.uint8), run)


def pack_into(memory: Memory, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
    """Copy tensors of any device and strides to `memory`, [bytes], in order; the bucket is the part that is used.

    The copies are complete on return. Raises BucketFullError, naming the tensor, if they do not fit.
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
    """The tensors of a bucket, as views of its memory: do not write to them.

    Raises ChecksumError with the first tensor that is not what was sent; on a device before any is given out.
    """
    flat, names = bucket.flat, [record.name for record in bucket.records]
    pieces, tensors = [], []
    for record in bucket.records:
        piece = flat[record.offset : record.offset + record.nbytes]
        if piece.numel() != record.nbytes:
            raise ChecksumError(f"Tensor {record.name} is cut short in transit.")
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
        raise ChecksumError(f"Tensor {record.name} did not arrive as it was sent.")


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


def _typed(flat: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # Bytes without an extent may have a stride of 0, which torch refuses to view as anything else.
    return flat.view(dtype).view(shape) if flat.numel() else torch.empty(shape, dtype=dtype, device=flat.device)


def _copy(target: Tensor, source: Tensor, packers: Executor) -> list[Future[bytes]]:
    """Copy `source` to `target`, of the same shape and dtype and in host memory; the hashes of its pieces."""
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
    """The dtype as torch and a config.json name it, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's bytes in host memory, row-major; without a copy where they lie there so."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def write_all(file: BinaryIO | Any, data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file: one call of the system writes 2 GB at the most."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def hash_pieces(flats: Sequence[Tensor]) -> list[list[bytes]]:
    """The hashes of all pieces of each of `flats`, 8 bytes a piece, in order; nothing for what is empty.

    In plain tensor operations: the same on every device, and computed where the bytes lie. `flats` are [bytes] uint8,
    all on one device, each starting at a multiple of 8 bytes. The last piece is filled up with zeros to whole words, so
    a length that matters has to be told by other means. With the words w_0, w_1, ... of a piece (8 bytes each), its
    hash is the sum modulo 2^64 of mix(w_i + (i + 1) step), where mix and step are those of SplitMix64 (Steele, Lea,
    Flood, OOPSLA 2014), in whatever order a device adds. A single word that changes always changes the hash; anything
    else does, but for one time in 2^64. It finds damage, not forgery. The calling thread waits for the device.
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
    """10^9 bytes a second at which `nbytes` are copied: the fastest of a few, on a CPU by one thread."""
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


SLOTS = 2  # Buckets under way at a time: one is read while the next is packed.
STORAGE_DEVICE, EVENT_SYNC_REQUIRED = 6, 14  # Arguments of torch's `rebuild_cuda_tensor`.
_FILE_S, _FILE_LOOK_S = 60.0, 0.05
"""A file that is complete on one host is seen by the others within this, whatever their caches; between two looks for it."""
_MEMBER_LOOK_S, _WORK_LOOK_S = 0.02, 0.0005
"""Between two looks for a member of a broadcast that is not there yet, and whether a broadcast is complete."""
_PATIENCE = 2.0  # The time-out of a broadcast's group is that many times the one that is waited for.


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """How one process takes part in a transport; all processes have the same, but for `rank`."""

    mode: SyncMode
    rank: int  # 0 sends, the others receive.
    members: tuple[str, ...]  # What each rank is called in messages.
    bucket_bytes: int  # Size of the largest bucket.
    timeout_s: float  # Of every wait for another process.
    device: Device  # Where broadcasts are exchanged, through gloo on a CPU, NCCL on a GPU; `ipc` is for GPUs alone.
    address: tuple[str, int]  # Host and free port of the sender's machine, where the members of a broadcast meet.
    folder: str  # For files; all members see it.

    @property
    def name(self) -> str:
        """What this process is called."""
        return self.members[self.rank]


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where bytes lie in the memory of a process that shares them."""

    host: str  # Identity of the kernel and the process namespace in which `pid` means something.
    pid: int
    descriptor: int  # Of the memory, in that process.
    offset: int  # Of the bucket's first byte.


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Where bytes lie in the memory of a GPU."""

    host: str  # As of `SharedPlace`.
    pid: int  # Of the process whose memory it is.
    handles: tuple[bytes, ...]  # One for each receiver, in the order of their ranks: each may be used once.


@dataclass(frozen=True, slots=True)
class BucketHandle:
    """A bucket without its bytes."""

    number: int
    records: tuple[TensorRecord, ...]
    nbytes: int
    where: SharedPlace | DevicePlace | str | None
    """A place in shared memory or on a GPU, a file, or nowhere: then it is being broadcast."""


class Sender(ABC):
    """The end that the weights come from; it lends pieces of memory in turn, one for each bucket under way."""

    def __init__(self, pieces: Sequence[Memory] = ()) -> None:
        self._pieces = pieces
        self._sent = self._taken = 0
        """Buckets so far, and of them those that every receiver has taken."""

    def room(self) -> Memory:
        """Memory for the next bucket, [bucket_bytes]. Raises RuntimeError while one that was not released lies there."""
        if self._sent - self._taken >= len(self._pieces):
            raise RuntimeError(
                f"Bucket {self._sent + 1} has no room: {self._sent} were sent and {self._taken} have been taken."
            )
        return self._pieces[self._sent % len(self._pieces)]

    @abstractmethod
    def send(self, bucket: Bucket) -> BucketHandle:
        """Hand out a bucket that lies in the memory lent last. Raises RunError if the last one was not taken."""

    def release(self, taken: int) -> None:
        """Every receiver has taken the first `taken` buckets: what they lie in may be used again."""
        self._taken = taken

    @abstractmethod
    def close(self) -> None:
        """Free everything; may be called again."""

    def _handle(self, bucket: Bucket, where: SharedPlace | DevicePlace | str | None) -> BucketHandle:
        """Count `bucket` as sent; the next room is for the one after it."""
        self._sent += 1
        return BucketHandle(self._sent, bucket.records, bucket.data.nbytes, where)


class Receiver(ABC):
    """An end that the weights go to. May be used from any thread, by one at a time."""

    @abstractmethod
    def receive(self, handle: BucketHandle) -> Bucket:
        """The bucket of a handle. Raises RunError if its bytes do not come, for the sender is gone."""

    def release(self) -> None:  # noqa: B027
        """The bytes of the last bucket are not needed any more; most memory is used again."""

    def close(self) -> None:
        """Free everything; may be called again."""
        self.release()


class SharedSender(Sender):
    """Packs into memory that processes of one host share: packed once, read where it lies.

    The memory has no name (memfd_create): the kernel frees it when the last process that has it open or mapped ends,
    however it ends, and /dev/shm does not limit it. Pages come into being when they are first written.
    """

    def __init__(self, spec: TransportSpec) -> None:
        self._stride = aligned(spec.bucket_bytes)
        self._descriptor = os.memfd_create("weights")
        os.ftruncate(self._descriptor, SLOTS * self._stride)
        memory = np.frombuffer(mmap.mmap(self._descriptor, SLOTS * self._stride), dtype=np.uint8)
        super().__init__([memory[start : start + spec.bucket_bytes] for start in range(0, memory.nbytes, self._stride)])
        self._host = host_identity()

    def send(self, bucket: Bucket) -> BucketHandle:
        assert not isinstance(bucket.data, Tensor), "what lies on a device is not in the memory that was lent"
        place = SharedPlace(self._host, os.getpid(), self._descriptor, self._sent % SLOTS * self._stride)
        return self._handle(bucket, place)

    def close(self) -> None:
        """See `Sender`. The memory itself goes with the last bucket in it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._pieces = -1, ()


class SharedReceiver(Receiver):
    """Maps the sender's memory through its /proc/<pid>/fd, read-only, and so learns each time whether the sender is alive."""

    def __init__(self, spec: TransportSpec) -> None:
        self._spec, self._host = spec, host_identity()
        self.close()

    def receive(self, handle: BucketHandle) -> Bucket:
        place = handle.where
        assert isinstance(place, SharedPlace)
        if place.host != self._host:
            raise RunError(
                f"cluster.sync_mode=tensor needs the actor and {self._spec.name} on one host; use broadcast."
            )
        self._map(place)
        return Bucket(self._memory[place.offset : place.offset + handle.nbytes], handle.records)

    def close(self) -> None:
        self._inode, self._memory = -1, np.empty(0, dtype=np.uint8)

    def _map(self, place: SharedPlace) -> None:
        """Map the memory, unless it is the one that is mapped."""
        try:
            descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDONLY)
        except OSError as problem:
            raise RunError(
                f"{self._spec.name} cannot open the weights in the memory of {self._spec.members[0]}, process "
                f"{place.pid} ({problem.strerror}): it is gone, or another user's; look at its log."
            ) from problem
        try:
            inode = os.fstat(descriptor).st_ino
            if inode != self._inode:
                mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                self._memory, self._inode = np.frombuffer(mapped, dtype=np.uint8), inode
        finally:
            os.close(descriptor)


def host_identity() -> str:
    """The running kernel and the namespace of its process numbers: equal where /proc shows the same processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class DiskSender(Sender):
    """Writes files, for hosts that share a folder but no memory, and for looking at what was sent.

    A file has its name only when complete, and goes once all have taken it; who is killed leaves three at most.
    """

    def __init__(self, spec: TransportSpec) -> None:
        self._folder = Path(spec.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        # Every bucket has left the memory when it is sent.
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
    """Reads files into memory of its own."""

    def __init__(self, spec: TransportSpec) -> None:
        self._spec = spec
        self._memory = np.empty(spec.bucket_bytes, dtype=np.uint8)

    def receive(self, handle: BucketHandle) -> Bucket:
        assert isinstance(handle.where, str)
        file = Path(handle.where)
        self._await(file)
        bucket = Bucket(self._memory[: handle.nbytes], handle.records)
        with file.open("rb", buffering=0) as source:
            rest = bucket.in_host.data
            while rest and (count := source.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise RunError(f"{self._spec.name} found {file} {len(rest)} bytes short; is the disk full?")
        return bucket

    def close(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def _await(self, file: Path) -> None:
        limit = min(_FILE_S, self._spec.timeout_s)
        until = time.monotonic() + limit
        while not file.is_file():
            if time.monotonic() > until:
                raise RunError(
                    f"{self._spec.name} has waited {limit:g} s for {file}: {self._spec.members[0]} is gone, or "
                    "cluster.sync_mode=disk is used without an output_dir that all hosts share; use broadcast."
                )
            time.sleep(_FILE_LOOK_S)


class BroadcastSender(Sender):
    """Rank 0 of a group with every receiver; one bucket leaves while the next is gathered."""

    def __init__(self, spec: TransportSpec) -> None:
        """Blocks until every receiver has joined. Raises RunError naming those that have not."""
        self._spec = spec
        self._group = _Group(spec)
        super().__init__([_host_memory(spec) for _ in range(SLOTS)])
        self._under_way: dist.Work | None = None

    def send(self, bucket: Bucket) -> BucketHandle:
        """See `Sender`. Returns when the bucket before this one has left, and this one is on its way."""
        self._finish()
        self._under_way = self._group.broadcast(self._group.outgoing(bucket.in_host))
        return self._handle(bucket, None)

    def close(self) -> None:
        self._under_way = None
        self._group.leave()

    def _finish(self) -> None:
        """Wait until the broadcast that is under way has left."""
        work, self._under_way = self._under_way, None
        if work is None:
            return
        try:
            self._group.complete(work)
        except (RuntimeError, TimeoutError) as problem:
            missing = self._group.who_lacks(self._sent)
            raise RunError(
                f"bucket {self._sent} of the weights was not taken by {' and '.join(missing) or 'a receiver'}: it is "
                f"gone, or has hung for {self._spec.timeout_s:g} s; look at its log."
            ) from problem


class BroadcastReceiver(Receiver):
    """Another rank of the group."""

    def __init__(self, spec: TransportSpec) -> None:
        """Blocks until every member has joined. Raises RunError naming those that have not."""
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
                f"is gone, or has hung for {self._spec.timeout_s:g} s; look at its log."
            ) from problem
        if incoming.is_cuda:
            torch.from_numpy(bucket.in_host).copy_(incoming)
        self._received = handle.number
        return bucket

    def close(self) -> None:
        self._group.leave()


class _Group:
    """A process group apart from torch's default one, with gloo on CPUs and NCCL on GPUs, and a store that the sender hosts.

    The store tells who is there and who has taken how many buckets, so that a wait that fails names the missing.
    On GPUs the bytes go through a device buffer at each end, for they are hashed in host memory, which is pinned. NCCL wants
    every member on a device of its own, and differs from gloo in ways that shape this class:
    - It connects its members at the first broadcast, which blocks until all of them begin it. The receivers of a bucket begin
      only when they have its handle, after the sender has begun; so one byte is broadcast at the start.
    - Its `wait` makes a stream wait, not the caller. And once a time-out of its own has passed, torch's watchdog ends the
      whole process, before anybody could say who was missing. So completion is polled, with a time limit that is shorter than
      the group's.
    - A process's current device is a thread's own, and calls come from any thread. So the device is chosen once.
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
                f"{spec.name} met the others, but exchanges nothing with them ({problem}): one of "
                f"{' and '.join(spec.members)} is gone, or has hung; look at their logs."
            ) from problem

    def outgoing(self, data: NDArray[np.uint8]) -> Tensor:
        """What is sent for `data`."""
        flat = torch.from_numpy(data)
        return flat if self._staging is None else self._staging[: data.nbytes].copy_(flat)

    def incoming(self, data: NDArray[np.uint8]) -> Tensor:
        """What is received for `data`; on a GPU it has to be copied there."""
        return torch.from_numpy(data) if self._staging is None else self._staging[: data.nbytes]

    def broadcast(self, flat: Tensor) -> dist.Work:
        """Begin to send or receive."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work: dist.Work = self._group.broadcast([flat], options)
        return work

    def complete(self, work: dist.Work) -> None:
        """Wait until `work` is done, on the device too. Raises RuntimeError if it fails, TimeoutError if it hangs."""
        until = time.monotonic() + self._spec.timeout_s
        while not work.is_completed():
            if time.monotonic() > until:
                raise TimeoutError(f"a broadcast has taken {self._spec.timeout_s:g} s")
            time.sleep(_WORK_LOOK_S)
        work.wait()

    def who_lacks(self, number: int) -> list[str]:
        """Names of the receivers that have not taken bucket `number`."""

        def taken(key: str) -> int:
            return int(self.store.get(key)) if self.store.check([key]) else 0

        members = enumerate(self._spec.members)
        return [name for rank, name in members if rank and taken(f"taken/{rank}") < number]

    def leave(self) -> None:
        """End this member's part; the others' waits fail."""
        if self._group is not None:
            self._group.abort()
        self._group = self._staging = None


def _join(spec: TransportSpec) -> dist.TCPStore:
    """Meet all members at the sender's store."""
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
                    f"{' and '.join(missing)} did not come within {spec.timeout_s:g} s to exchange weights; look at its log."
                )
            time.sleep(_MEMBER_LOOK_S)
    except (OSError, RuntimeError) as problem:
        raise RunError(
            f"{spec.name} did not meet {spec.members[0]} at {host}:{port} to exchange weights: one of them is gone, "
            f"or has hung for {spec.timeout_s:g} s; look at its log. ({problem})"
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
    """A bucket's; pinned where it is copied to a GPU or from one, which is several times as fast."""
    if spec.device is Device.gpu:
        memory: NDArray[np.uint8] = torch.empty(spec.bucket_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory
    return np.empty(spec.bucket_bytes, dtype=np.uint8)


class IpcSender(Sender):
    """Packs and hashes on its own device and hands out the memory itself (CUDA IPC): the bytes never leave the GPUs.

    It waits until a bucket is written, and sends a handle to each receiver: what torch itself makes of a tensor for another
    process, good for one use. A receiver maps the memory, checks it, copies what it needs, waits for that and lets go.

    - The two slots are made when an export begins and freed when all it sent is taken: between exports they take no memory.
    - With a pipeline, the first rank of every stage has such an end and sends its own buckets, since rank 0 could get them only
      by a copy; `skip` keeps all of their counts the same.
    - torch frees memory that it lent only when each handle was used: a receiver that died may leave two buckets taken.
    - Both ends may see other GPUs, and number them otherwise: memory appears on the receiver's own device, wherever it lies.
      GPUs that cannot read each other's memory are refused when the first bucket comes.

    Memory on a CPU that torch shares stands for a device's in tests; `open_sender` and `open_receiver` never choose it.
    """

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        """`device` is where buckets lie: this process's GPU by default."""
        super().__init__()
        self._spec, self.device, self._host = spec, device or _device_of(spec), host_identity()

    def room(self) -> Memory:
        if not self._pieces:
            size = self._spec.bucket_bytes
            self._pieces = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
        return super().room()

    def send(self, bucket: Bucket) -> BucketHandle:
        """See `Sender`. Waits until the device has written the bucket."""
        await_device(self.device)
        try:
            handles = tuple(_shared_once(bucket.flat) for _ in self._spec.members[1:])
        except RuntimeError as problem:
            raise RunError(
                f"{self._spec.name} cannot share the memory of its GPU ({problem}); unset PYTORCH_CUDA_ALLOC_CONF, or use "
                "cluster.sync_mode=tensor."
            ) from problem
        place = DevicePlace(self._host, os.getpid(), handles)
        return self._handle(bucket, place)

    def skip(self) -> None:
        """Count a bucket that the first rank of another stage sends."""
        self._sent += 1

    def release(self, taken: int) -> None:
        """See `Sender`. The memory is freed when nothing is under way."""
        super().release(taken)
        if taken == self._sent:
            self._pieces = ()

    def close(self) -> None:
        self._pieces, self._sent, self._taken = (), 0, 0


class IpcReceiver(Receiver):
    """Reads on a device of its own."""

    def __init__(self, spec: TransportSpec, device: torch.device | None = None) -> None:
        """`device` reads what comes, and is the one that it appears on: this process's GPU by default."""
        self._spec, self._device, self._host = spec, device or _device_of(spec), host_identity()
        self._memory: Tensor | None = None

    def receive(self, handle: BucketHandle) -> Bucket:
        place = handle.where
        assert isinstance(place, DevicePlace)
        self.release()
        if place.host != self._host:
            raise RunError(f"cluster.sync_mode=ipc needs the actor and {self._spec.name} on one host; use broadcast.")
        try:
            self._memory = _opened(place.handles[self._spec.rank - 1], self._device)
        except (RuntimeError, OSError, EOFError) as problem:
            raise RunError(
                f"{self._spec.name} cannot open the weights that lie on the GPU of process {place.pid} of the actor's group "
                f"({problem}): the process is gone (look at its log), or the two GPUs cannot read each other's memory "
                "(nvidia-smi topo -p2p r), or the containers do not share /dev/shm and process numbers. For the latter "
                "two use cluster.sync_mode=tensor."
            ) from problem
        return Bucket(self._memory, handle.records)

    def release(self) -> None:
        """See `Receiver`. Waits until the device has read what it was told to read."""
        if self._memory is not None:
            await_device(self._device)
        self._memory = None


def await_device(device: torch.device) -> None:
    """Wait for all that this process has asked of `device`, on whatever stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _shared_once(tensor: Tensor) -> bytes:
    """What another process rebuilds the tensor from, once: a function of torch's and its arguments."""
    return bytes(ForkingPickler.dumps(reductions.reduce_tensor(tensor)))


def _opened(handle: bytes, device: torch.device) -> Tensor:
    rebuild, arguments = pickle.loads(handle)
    if device.type == "cuda":
        changed: list[Any] = list(arguments)
        changed[STORAGE_DEVICE] = device.index
        # The sender has waited. An event of a GPU that is not seen here need not open, and torch never closes one.
        changed[EVENT_SYNC_REQUIRED] = False
        arguments = tuple(changed)
    tensor: Tensor = rebuild(*arguments)
    return tensor


def _device_of(spec: TransportSpec) -> torch.device:
    """The GPU that this process takes part with. Raises RunError where there is none."""
    if spec.device is not Device.gpu or not torch.cuda.is_available():
        raise RunError(
            f"cluster.sync_mode=ipc hands weights on in the memory of GPUs, and {spec.name} sees none; use "
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
    """The sending end. A broadcast blocks until all receivers are there. Raises RunError where it cannot be had."""
    return _ENDS[spec.mode][0](spec)


def open_receiver(spec: TransportSpec) -> Receiver:
    """A receiving end. A broadcast blocks until all members are there. Raises RunError where it cannot be had."""
    return _ENDS[spec.mode][1](spec)
