"""Weights through a process group of their own: the actor's first rank and every process that receives.

The group is built on a store that the sender hosts, apart from torch's default group, with gloo on CPUs and
NCCL on GPUs. A bucket leaves while the sender gathers the next one; one broadcast is under way at a time.
The store tells who is there and who has taken how many buckets, so that a wait that fails names the missing.

On GPUs the bytes go through a device buffer at each end, for they are hashed in host memory, which is pinned. NCCL
wants every member on a device of its own, and differs from gloo in ways that shape this module:
- It connects its members at the first broadcast, which blocks until all of them begin it. The receivers of a bucket
  begin only when they have its parcel, after the sender has begun; so one byte is broadcast at the start.
- Its `wait` makes a stream wait, not the caller. And once a time-out of its own has passed, torch's watchdog ends the
  whole process, before anybody could say who was missing. So completion is polled, with a time limit that is
  shorter than the group's.
- A process's current device is a thread's own, and calls come from any thread. So the device is chosen once.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlsys.config.schema import Device
from rlsys.errors import RunError
from rlsys.weights.buckets import Bucket
from rlsys.weights.sockets import listener
from rlsys.weights.transport.parcel import SLOTS, Parcel, Slots, TransportSpec

LOOK_S = 0.02
"""Between two looks for a member that is not there yet."""
POLL_S = 0.0005
"""Between two looks whether a broadcast is complete."""
PATIENCE = 2.0
"""The group's own time-out is that many times the one that is waited for."""


class BroadcastSender:
    """Rank 0 of the group."""

    def __init__(self, spec: TransportSpec) -> None:
        """Blocks until every receiver has joined. Raises RunError naming those that have not."""
        self._spec = spec
        self._group = _Group(spec)
        self._slots = Slots([_host_memory(spec) for _ in range(SLOTS)])
        self._under_way: dist.Work | None = None

    def room(self) -> NDArray[np.uint8]:
        """See `Sender`."""
        return self._slots.room()

    def send(self, bucket: Bucket) -> Parcel:
        """See `Sender`. Returns when the bucket before this one has left, and this one is on its way."""
        self._finish()
        number = self._slots.count()
        self._under_way = self._group.broadcast(self._group.outgoing(bucket.in_host))
        return Parcel(number, bucket.records, bucket.in_host.nbytes, None)

    def release(self, taken: int) -> None:
        """See `Sender`."""
        self._slots.taken = taken

    def close(self) -> None:
        """See `Sender`."""
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
            number = self._slots.sent
            missing = self._group.who_lacks(number)
            raise RunError(
                f"bucket {number} of the weights was not taken by {' and '.join(missing) or 'a receiver'}: it is "
                f"gone, or has hung for {self._spec.timeout_s:g} s; look at its log."
            ) from problem


class BroadcastReceiver:
    """Another rank of the group."""

    def __init__(self, spec: TransportSpec) -> None:
        """Blocks until every member has joined. Raises RunError naming those that have not."""
        self._spec = spec
        self._group = _Group(spec)
        self._memory = _host_memory(spec)
        self._received = 0

    def receive(self, parcel: Parcel) -> Bucket:
        """See `Receiver`."""
        if parcel.number != self._received + 1:
            raise RuntimeError(f"Bucket {parcel.number} cannot be received after bucket {self._received}.")
        bucket = Bucket(self._memory[: parcel.nbytes], parcel.records)
        incoming = self._group.incoming(bucket.in_host)
        try:
            self._group.complete(self._group.broadcast(incoming))
            self._group.say_taken(parcel.number)
        except (RuntimeError, TimeoutError) as problem:
            raise RunError(
                f"bucket {parcel.number} of the weights did not reach {self._spec.name}: {self._spec.members[0]} "
                f"is gone, or has hung for {self._spec.timeout_s:g} s; look at its log."
            ) from problem
        if incoming.is_cuda:
            torch.from_numpy(bucket.in_host).copy_(incoming)
        self._received = parcel.number
        return bucket

    def release(self) -> None:
        """See `Receiver`. The memory is used again."""

    def close(self) -> None:
        """See `Receiver`."""
        self._group.leave()


class _Group:
    """The process group, its store, and on a GPU the device buffer."""

    def __init__(self, spec: TransportSpec) -> None:
        self._spec = spec
        self._store = _join(spec)
        self._group = _open_group(spec, dist.PrefixStore("group", self._store))
        self._staging: Tensor | None = None
        if spec.device is Device.gpu:
            device = torch.device("cuda", torch.cuda.current_device())
            self._staging = torch.empty(spec.bucket_bytes, dtype=torch.uint8, device=device)
        self._connect()

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
            time.sleep(POLL_S)
        work.wait()

    def say_taken(self, number: int) -> None:
        """Let the others know how many buckets this member has."""
        self._store.set(f"taken/{self._spec.rank}", str(number))

    def who_lacks(self, number: int) -> list[str]:
        """Names of the receivers that have not taken bucket `number`."""
        return [name for rank, name in enumerate(self._spec.members) if rank and self._taken(rank) < number]

    def leave(self) -> None:
        """End this member's part; the others' waits fail."""
        if self._group is not None:
            self._group.abort()
        self._group = self._staging = None

    def _connect(self) -> None:
        try:
            self.complete(self.broadcast(self.incoming(np.zeros(1, dtype=np.uint8))))
        except (RuntimeError, TimeoutError) as problem:
            raise RunError(
                f"{self._spec.name} met the others, but exchanges nothing with them ({problem}): one of "
                f"{' and '.join(self._spec.members)} is gone, or has hung; look at their logs."
            ) from problem

    def _taken(self, rank: int) -> int:
        key = f"taken/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0


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
        _await_members(store, spec)
    except (OSError, RuntimeError) as problem:
        raise RunError(
            f"{spec.name} did not meet {spec.members[0]} at {host}:{port} to exchange weights: one of them is gone, "
            f"or has hung for {spec.timeout_s:g} s; look at its log. ({problem})"
        ) from problem
    return store


def _await_members(store: dist.TCPStore, spec: TransportSpec) -> None:
    until = time.monotonic() + spec.timeout_s
    while missing := [name for rank, name in enumerate(spec.members) if not store.check([f"here/{rank}"])]:
        if time.monotonic() > until:
            raise RunError(
                f"{' and '.join(missing)} did not come within {spec.timeout_s:g} s to exchange weights; look at its log."
            )
        time.sleep(LOOK_S)


def _open_group(spec: TransportSpec, store: dist.Store) -> Any:
    limit = timedelta(seconds=PATIENCE * spec.timeout_s)
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
