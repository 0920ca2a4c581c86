"""Ways for weights to travel from the actor's first rank to every process that takes them.

`open_sender` and `open_receiver` make the two ends from a spec; `parcel` says what they promise. Buckets pass through
host memory, where they are hashed, but for `ipc`: those are packed, hashed, checked and copied on GPUs.
"""

from __future__ import annotations

from rlsys.config.schema import SyncMode
from rlsys.weights.transport.broadcast import BroadcastReceiver, BroadcastSender
from rlsys.weights.transport.disk import DiskReceiver, DiskSender
from rlsys.weights.transport.ipc import IpcReceiver, IpcSender, own_device
from rlsys.weights.transport.parcel import Parcel, Receiver, Sender, TransportSpec
from rlsys.weights.transport.shared import SharedReceiver, SharedSender

__all__ = ["IpcSender", "Parcel", "Receiver", "Sender", "TransportSpec", "open_receiver", "open_sender"]


def open_sender(spec: TransportSpec) -> Sender:
    """The sending end. A broadcast blocks until all receivers are there. Raises RunError where it cannot be had."""
    if spec.mode is SyncMode.ipc:
        return IpcSender(spec, own_device(spec))
    ends: dict[SyncMode, type[SharedSender] | type[BroadcastSender] | type[DiskSender]] = {
        SyncMode.tensor: SharedSender,
        SyncMode.broadcast: BroadcastSender,
        SyncMode.disk: DiskSender,
    }
    return ends[spec.mode](spec)


def open_receiver(spec: TransportSpec) -> Receiver:
    """A receiving end. A broadcast blocks until all members are there. Raises RunError where it cannot be had."""
    if spec.mode is SyncMode.ipc:
        return IpcReceiver(spec, own_device(spec))
    ends: dict[SyncMode, type[SharedReceiver] | type[BroadcastReceiver] | type[DiskReceiver]] = {
        SyncMode.tensor: SharedReceiver,
        SyncMode.broadcast: BroadcastReceiver,
        SyncMode.disk: DiskReceiver,
    }
    return ends[spec.mode](spec)
