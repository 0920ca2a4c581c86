"""Opens senders and receivers of every transport mode on a CPU."""

from pathlib import Path

import torch

from rlsys.config.schema import Device, SyncMode
from rlsys.weights.transport import IpcReceiver, IpcSender, Receiver, Sender, TransportSpec, open_receiver, open_sender
from tests.support.ports import free_port


def spec(
    mode: SyncMode, receivers: int, folder: Path, bucket_bytes: int = 64_000, timeout_s: float = 100.0
) -> TransportSpec:
    """Spec of the sender's end of a transport; the specs of the receivers differ only in the rank."""
    names = ("actor rank 0", *(f"rollout rank {rank}" for rank in range(receivers)))
    address = ("127.0.0.1", free_port())
    return TransportSpec(mode, 0, names, bucket_bytes, timeout_s, Device.cpu, address, str(folder / "weights"))


def sender_of(spec: TransportSpec) -> Sender:
    """Open the sender of `spec`; for IPC, memory that torch shares between processes stands in for GPU memory."""
    return IpcSender(spec, torch.device("cpu")) if spec.mode is SyncMode.ipc else open_sender(spec)


def receiver_of(spec: TransportSpec) -> Receiver:
    """Open a receiver of `spec`, with the same stand-in as `sender_of`."""
    return IpcReceiver(spec, torch.device("cpu")) if spec.mode is SyncMode.ipc else open_receiver(spec)
