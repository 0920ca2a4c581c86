"""Opens senders and receivers of every transport mode on a CPU."""

from pathlib import Path

import torch

from rlsys.config.schema import Device, SyncMode
from rlsys.weights.transport import Meeting, Receiver, Sender, TransportSpec, open_receiver, open_sender

_CPU = torch.device("cpu")
_MEETINGS: list[Meeting] = []
"""Meetings of all broadcasts, which a driver would keep."""


def spec(
    mode: SyncMode, receivers: int, folder: Path, bucket_bytes: int = 64_000, timeout_s: float = 100.0
) -> TransportSpec:
    """Spec of the sender's end of a transport; the specs of the receivers differ only in the rank."""
    names = ("actor rank 0", *(f"rollout rank {rank}" for rank in range(receivers)))
    address = None
    if mode is SyncMode.broadcast:
        _MEETINGS.append(Meeting("127.0.0.1"))
        address = _MEETINGS[-1].address
    return TransportSpec(mode, 0, names, bucket_bytes, timeout_s, Device.cpu, address, str(folder / "weights"))


def sender_of(spec: TransportSpec, on_device: bool = False) -> Sender:
    """Open the sender of `spec`; memory of the CPU stands in for a GPU's with IPC, and if `on_device` is set."""
    return open_sender(spec, _CPU if on_device or spec.mode is SyncMode.ipc else None)


def receiver_of(spec: TransportSpec, on_device: bool = False) -> Receiver:
    """Open a receiver of `spec`, with the same stand-in as `sender_of`."""
    return open_receiver(spec, _CPU if on_device or spec.mode is SyncMode.ipc else None)
