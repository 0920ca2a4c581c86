"""What travels between the ends of a transport, and what each end must be able to do.

Contract, the same for every way of travelling:
- A sender hands out buckets one by one, numbered from 1 over its whole life. Each is packed into memory that
  the sender lends (`room`), sent, and described by a parcel, which is small and goes by other means.
- A receiver turns each parcel, in order, into a bucket. Its bytes are valid until `release`, the next `receive`
  or `close`, whichever comes first: whoever needs them for longer copies them. They are to be checked with
  `rlsys.weights.buckets.unpack`; a transport does not look at them. What was read is told to be so (`release`) before
  the sender hears of it.
- Bytes are overwritten or removed only once every receiver has taken the bucket, of which the sender is told
  (`release`). Two buckets may be under way, so that the next is packed while the last is read.
- Every wait has a time-out and names who is missing (RunError).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlsys.config.schema import Device, SyncMode
from rlsys.weights.buckets import Bucket, Memory, TensorRecord

Piece = TypeVar("Piece", NDArray[np.uint8], Tensor)

SLOTS = 2
"""Buckets under way at a time: one is read while the next is packed."""


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """How one process takes part in a transport; all processes have the same, but for `rank`."""

    mode: SyncMode
    rank: int
    """0 sends, the others receive."""
    members: tuple[str, ...]
    """What each rank is called in messages."""
    bucket_bytes: int
    """Size of the largest bucket."""
    timeout_s: float
    """Of every wait for another process."""
    device: Device
    """Where broadcasts are exchanged, through gloo on a CPU, NCCL on a GPU; `ipc` is for GPUs alone."""
    address: tuple[str, int]
    """Host and free port of the sender's machine, where the members of a broadcast meet."""
    folder: str
    """For files; all members see it."""

    @property
    def name(self) -> str:
        """What this process is called."""
        return self.members[self.rank]


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where bytes lie in the memory of a process that shares them."""

    host: str
    """Identity of the kernel and the process namespace in which `pid` means something."""
    pid: int
    descriptor: int
    """Of the memory, in that process."""
    offset: int
    """Of the bucket's first byte."""


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Where bytes lie in the memory of a GPU."""

    host: str
    """As of `SharedPlace`."""
    pid: int
    """Of the process whose memory it is."""
    handles: tuple[bytes, ...]
    """One for each receiver, in the order of their ranks: each may be used once."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A bucket without its bytes."""

    number: int
    records: tuple[TensorRecord, ...]
    nbytes: int
    where: SharedPlace | DevicePlace | str | None
    """A place in shared memory or on a GPU, a file, or nowhere: then it is being broadcast."""


class Sender(Protocol):
    """The end that the weights come from."""

    def room(self) -> Memory:
        """Memory for the next bucket, [bucket_bytes]; what it holds is undefined.

        Raises RuntimeError while a bucket that was not released lies there.
        """

    def send(self, bucket: Bucket) -> Parcel:
        """Hand out a bucket that lies in the memory lent last. Raises RunError if the last one was not taken."""

    def release(self, taken: int) -> None:
        """Every receiver has taken the first `taken` buckets: what they lie in may be used again."""

    def close(self) -> None:
        """Free everything; may be called again."""


class Receiver(Protocol):
    """An end that the weights go to. May be used from any thread, by one at a time."""

    def receive(self, parcel: Parcel) -> Bucket:
        """The bucket of a parcel. Raises RunError if its bytes do not come, for the sender is gone."""

    def release(self) -> None:
        """The bytes of the last bucket are not needed any more."""

    def close(self) -> None:
        """Free everything; may be called again."""


class Slots(Generic[Piece]):
    """Pieces of memory that are lent in turn, one for each bucket under way."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces: Sequence[Piece] = pieces
        self.sent = 0
        """Buckets so far."""
        self.taken = 0
        """Of them, by every receiver."""

    def room(self) -> Piece:
        """See `Sender.room`."""
        if self.sent - self.taken >= len(self.pieces):
            raise RuntimeError(
                f"Bucket {self.sent + 1} has no room: {self.sent} were sent and {self.taken} have been taken."
            )
        return self.pieces[self.sent % len(self.pieces)]

    def count(self) -> int:
        """Number of the bucket that is sent now; the next room is for the one after it."""
        self.sent += 1
        return self.sent
