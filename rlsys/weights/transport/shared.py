"""Weights through memory that processes of one host share: packed once, read where they lie.

The memory has no name (memfd_create): it belongs to whoever has it open or mapped, so the kernel frees it
when the last of them ends, however they end, and there is nothing in /dev/shm to clean up or to be limited
by. A receiver opens it through the sender's /proc/<pid>/fd, read-only, and thereby learns each time whether
the sender is alive. Pages come into being when they are first written, so buckets that are never filled
cost no memory.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlsys.errors import RunError
from rlsys.weights.buckets import Bucket
from rlsys.weights.sizes import aligned
from rlsys.weights.transport.parcel import SLOTS, Parcel, SharedPlace, Slots, TransportSpec


class SharedSender:
    """Packs into shared memory."""

    def __init__(self, spec: TransportSpec) -> None:
        self._stride = aligned(spec.bucket_bytes)
        self._descriptor = os.memfd_create("weights")
        os.ftruncate(self._descriptor, SLOTS * self._stride)
        memory = np.frombuffer(mmap.mmap(self._descriptor, SLOTS * self._stride), dtype=np.uint8)
        starts = range(0, memory.nbytes, self._stride)
        self._slots = Slots([memory[start : start + spec.bucket_bytes] for start in starts])
        self._host = host_identity()

    def room(self) -> NDArray[np.uint8]:
        """See `Sender`."""
        return self._slots.room()

    def send(self, bucket: Bucket) -> Parcel:
        """See `Sender`."""
        number = self._slots.count()
        offset = (number - 1) % SLOTS * self._stride
        place = SharedPlace(self._host, os.getpid(), self._descriptor, offset)
        return Parcel(number, bucket.records, bucket.in_host.nbytes, place)

    def release(self, taken: int) -> None:
        """See `Sender`."""
        self._slots.taken = taken

    def close(self) -> None:
        """See `Sender`. The memory itself goes with the last bucket in it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._slots.pieces = -1, []


class SharedReceiver:
    """Maps the sender's memory."""

    def __init__(self, spec: TransportSpec) -> None:
        self._spec = spec
        self._host = host_identity()
        self._inode = -1
        self._memory: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def receive(self, parcel: Parcel) -> Bucket:
        """See `Receiver`."""
        place = parcel.where
        assert isinstance(place, SharedPlace)
        if place.host != self._host:
            raise RunError(
                f"cluster.sync_mode=tensor needs the actor and {self._spec.name} on one host; use broadcast."
            )
        self._map(place)
        return Bucket(self._memory[place.offset : place.offset + parcel.nbytes], parcel.records)

    def release(self) -> None:
        """See `Receiver`. The memory stays mapped: it is the same again and again."""

    def close(self) -> None:
        """See `Receiver`."""
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
