"""Sends the weights of a version in buckets, from the actor to every receiving process.

In the cpu profile all buckets are in host memory. In the gpu profile every sender packs on its GPU and every receiver
gets the bucket in the memory of its own GPU, whatever carries the bytes in between.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing import reductions

from rlsys.config.schema import Device, SyncMode
from rlsys.errors import PeerLost, RunError
from rlsys.files import named
from rlsys.weights.bucket import Bucket, Memory, TensorRecord, bytes_of, write_all
from rlsys.weights.sockets import environment_variables, listener
from rlsys.weights.weight_map import aligned

T = TypeVar("T")
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
    with environment_variables({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
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
