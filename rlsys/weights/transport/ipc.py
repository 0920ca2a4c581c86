"""Weights through device memory that processes of one host share (CUDA IPC): the bytes never leave the GPUs.

The sender packs and hashes a bucket on its own device, waits until that is done, and sends a handle to each receiver:
what torch itself makes of a tensor for another process, good for one use. A receiver maps the memory, checks it, copies
what it needs from device to device, waits for that and lets go.

- The two slots are made when an export begins and freed when all it sent is taken: between exports they take no memory.
- With a pipeline, the first rank of every stage has such an end and sends its own buckets, since rank 0 could get
  them only by a copy; `skip` keeps all of their counts the same.
- torch frees memory that it lent only when each handle was used, so a receiver that died with two buckets under
  way leaves those two taken until the sender ends.
- Both ends may see other GPUs, and number them otherwise: memory appears on the receiver's own device, wherever
  it lies. GPUs that cannot read each other's memory are refused when the first bucket comes.

Memory on a CPU that torch shares stands for a device's in tests; `open_sender` and `open_receiver` never choose it.
"""

from __future__ import annotations

import os
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rlsys.config.schema import Device
from rlsys.errors import RunError
from rlsys.weights.buckets import Bucket
from rlsys.weights.transport.parcel import SLOTS, DevicePlace, Parcel, Slots, TransportSpec
from rlsys.weights.transport.shared import host_identity

STORAGE_DEVICE, EVENT_SYNC_REQUIRED = 6, 14
"""Arguments of torch's `rebuild_cuda_tensor`."""


class IpcSender:
    """Packs on a device."""

    def __init__(self, spec: TransportSpec, device: torch.device) -> None:
        """`device` is where buckets lie."""
        self._spec, self.device = spec, device
        self._slots: Slots[Tensor] = Slots([])
        self._host = host_identity()

    def room(self) -> Tensor:
        """See `Sender`."""
        if not self._slots.pieces:
            size = self._spec.bucket_bytes
            self._slots.pieces = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
        return self._slots.room()

    def send(self, bucket: Bucket) -> Parcel:
        """See `Sender`. Waits until the device has written the bucket."""
        await_device(self.device)
        receivers = len(self._spec.members) - 1
        try:
            handles = tuple(_handle(bucket.flat) for _ in range(receivers))
        except RuntimeError as problem:
            raise RunError(
                f"{self._spec.name} cannot share the memory of its GPU ({problem}); unset PYTORCH_CUDA_ALLOC_CONF, or use "
                "cluster.sync_mode=tensor."
            ) from problem
        place = DevicePlace(self._host, os.getpid(), handles)
        return Parcel(self._slots.count(), bucket.records, bucket.flat.nbytes, place)

    def skip(self) -> None:
        """Count a bucket that the first rank of another stage sends."""
        self._slots.count()

    def release(self, taken: int) -> None:
        """See `Sender`. The memory is freed when nothing is under way."""
        self._slots.taken = taken
        if taken == self._slots.sent:
            self._slots.pieces = []

    def close(self) -> None:
        """See `Sender`."""
        self._slots = Slots([])


class IpcReceiver:
    """Reads on a device of its own."""

    def __init__(self, spec: TransportSpec, device: torch.device) -> None:
        """`device` reads what comes, and is the one that it appears on."""
        self._spec, self._device = spec, device
        self._host = host_identity()
        self._memory: Tensor | None = None

    def receive(self, parcel: Parcel) -> Bucket:
        """See `Receiver`."""
        place = parcel.where
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
        return Bucket(self._memory, parcel.records)

    def release(self) -> None:
        """See `Receiver`. Waits until the device has read what it was told to read."""
        if self._memory is not None:
            await_device(self._device)
        self._memory = None

    def close(self) -> None:
        """See `Receiver`."""
        self.release()


def own_device(spec: TransportSpec) -> torch.device:
    """The GPU that this process takes part with. Raises RunError where there is none."""
    if spec.device is not Device.gpu or not torch.cuda.is_available():
        raise RunError(
            f"cluster.sync_mode=ipc hands weights on in the memory of GPUs, and {spec.name} sees none; use "
            "cluster.sync_mode=tensor."
        )
    return torch.device("cuda", torch.cuda.current_device())


def await_device(device: torch.device) -> None:
    """Wait for all that this process has asked of `device`, on whatever stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _handle(tensor: Tensor) -> bytes:
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
