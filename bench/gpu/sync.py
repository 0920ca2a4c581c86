"""Measures weight sync from the actor to another process of the machine, with every tensor hashed on both ends.

A GPU is measured with CUDA IPC and host memory (`cluster.sync_mode=tensor`); a CPU with host memory only.
"""

from __future__ import annotations

import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch.multiprocessing as mp

from bench.gpu.figures import Figure, Scale
from bench.gpu.trainer import make_actor
from rlsys.config.schema import Device, Dtype, SyncMode
from rlsys.trainer.actor import Actor
from rlsys.weights.transport import TransportSpec, digest, open_receiver, open_sender, unpack

BUCKET_BYTES = 1024**3
REPEATS = 3
_TIMEOUT_S = 50.0


def measure(_scale: Scale, device: Device, folder: Path) -> list[Figure]:
    """Return the GB/s (10^9 bytes) of a whole transfer, the fastest of `REPEATS`."""
    on_gpu = device is Device.gpu
    actor = make_actor(str(folder), device, Dtype.bfloat16 if on_gpu else Dtype.float32, recompute=False)
    host = _speed(actor, device, SyncMode.tensor)
    if not on_gpu:
        return [Figure("sync", "host memory", host, "GB/s")]
    ipc = _speed(actor, device, SyncMode.ipc)
    return [
        Figure("sync", "host memory", host, "GB/s"),
        Figure("sync", "CUDA IPC", ipc, "GB/s", "host memory", ipc / host, "ratio of 10"),
    ]


def _speed(actor: Actor, device: Device, mode: SyncMode) -> float:
    spec = TransportSpec(mode, 0, ("the actor", "the receiver"), BUCKET_BYTES, _TIMEOUT_S, device, ("127.0.0.1", 0), "")
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(spec, theirs), daemon=True)
    receiver.start()
    sender = open_sender(spec)
    try:
        speeds = []
        taken = 0
        for _ in range(1 + REPEATS):  # The first is a warm-up.
            started, sent = time.perf_counter(), 0
            export = actor.export(BUCKET_BYTES, sender)
            while (handle := export.next()) is not None:
                ours.send(handle)
                ours.recv()
                taken += 1
                sent += handle.nbytes
                sender.release(taken)
            ours.send(export.digest)
            if not ours.recv():
                raise RuntimeError(f"The tensors received by {mode} differ from those sent.")
            speeds.append(sent / (time.perf_counter() - started) / 1e9)
        return max(speeds[1:])
    finally:
        sender.close()
        receiver.kill()


def _receive(spec: TransportSpec, pipe: Connection) -> None:
    """Receive buckets, verify every tensor, and compare the digest at the end of each transfer."""
    end = open_receiver(replace(spec, rank=1))
    checksums: dict[str, str] = {}
    while True:
        message = pipe.recv()
        if isinstance(message, str):
            pipe.send(digest(checksums) == message)
            checksums = {}
            continue
        checksums |= {record.name: record.checksum for record, _ in unpack(end.receive(message))}
        end.release()
        pipe.send(None)
