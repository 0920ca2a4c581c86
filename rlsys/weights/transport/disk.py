"""Weights through files, for hosts that share a folder but no memory, and for looking at what was sent.

A file has its name only when it is complete, and is removed once every receiver has taken it. What a sender
that was killed leaves behind is at most three files in one folder, which its owner removes.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlsys.errors import RunError
from rlsys.weights.buckets import Bucket
from rlsys.weights.transport.parcel import SLOTS, Parcel, Slots, TransportSpec

APPEAR_S = 60.0
"""A file that is complete on one host is seen by the others within this, whatever their caches."""
LOOK_S = 0.05
"""Between two looks for a file."""


class DiskSender:
    """Writes files."""

    def __init__(self, spec: TransportSpec) -> None:
        self._folder = Path(spec.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        # Every bucket has left the memory when it is sent.
        self._slots = Slots([np.empty(spec.bucket_bytes, dtype=np.uint8)] * SLOTS)
        self._files: dict[int, Path] = {}

    def room(self) -> NDArray[np.uint8]:
        """See `Sender`."""
        return self._slots.room()

    def send(self, bucket: Bucket) -> Parcel:
        """See `Sender`."""
        number = self._slots.count()
        file = self._folder / f"bucket-{number:06d}"
        partial = file.with_name(f".{file.name}.partial")
        with partial.open("wb", buffering=0) as out:
            rest = bucket.in_host.data
            while rest:
                rest = rest[out.write(rest) :]
        partial.rename(file)
        self._files[number] = file
        return Parcel(number, bucket.records, bucket.in_host.nbytes, str(file.resolve()))

    def release(self, taken: int) -> None:
        """See `Sender`."""
        self._slots.taken = taken
        for number in [number for number in self._files if number <= taken]:
            self._files.pop(number).unlink(missing_ok=True)

    def close(self) -> None:
        """See `Sender`."""
        self.release(self._slots.sent)


class DiskReceiver:
    """Reads files into memory of its own."""

    def __init__(self, spec: TransportSpec) -> None:
        self._spec = spec
        self._memory = np.empty(spec.bucket_bytes, dtype=np.uint8)

    def receive(self, parcel: Parcel) -> Bucket:
        """See `Receiver`."""
        assert isinstance(parcel.where, str)
        file = Path(parcel.where)
        self._await(file)
        bucket = Bucket(self._memory[: parcel.nbytes], parcel.records)
        with file.open("rb", buffering=0) as source:
            rest = bucket.in_host.data
            while rest and (count := source.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise RunError(f"{self._spec.name} found {file} {len(rest)} bytes short; is the disk full?")
        return bucket

    def release(self) -> None:
        """See `Receiver`. The memory is used again."""

    def close(self) -> None:
        """See `Receiver`."""
        self._memory = np.empty(0, dtype=np.uint8)

    def _await(self, file: Path) -> None:
        limit = min(APPEAR_S, self._spec.timeout_s)
        until = time.monotonic() + limit
        while not file.is_file():
            if time.monotonic() > until:
                raise RunError(
                    f"{self._spec.name} has waited {limit:g} s for {file}: {self._spec.members[0]} is gone, or "
                    "cluster.sync_mode=disk is used without an output_dir that all hosts share; use broadcast."
                )
            time.sleep(LOOK_S)
