"""Checks weight transfer from the actor to another process of the machine, with every tensor hashed on both ends.

A GPU is measured with host memory (`cluster.sync_mode=tensor`) and with CUDA IPC; on a CPU, memory that torch shares
between processes stands in for IPC. In each mode several versions are sent, the memory of the transfer must be
returned, and after the death of a receiver another one must get a whole version.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
import torch.multiprocessing as mp

from bench.gpu.figures import Figure, Setting, at_most, compared, holds
from bench.gpu.trainer import make_actor
from rlsys.config.schema import Device, SyncMode
from rlsys.trainer.actor import Actor
from rlsys.weights.bucket import digest, unpack
from rlsys.weights.transport import (
    SLOTS,
    IpcReceiver,
    IpcSender,
    Receiver,
    Sender,
    TransportSpec,
    open_receiver,
    open_sender,
)

REPEATS = 3
_TIMEOUT_S = 60.0
_MIB = 1024**2
_RETURNED_MIB = 64.0
"""Device memory that may stay taken after a transfer: allocations of the driver, which grow with use."""
_HOLD = "hold"
"""Message to a receiver: map the next bucket, and keep it."""


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield the checks of both modes, and the GB/s (10^9 bytes) of whole transfers."""
    actor = make_actor(setting.model, setting.device, setting.dtype)
    actor.export(setting.scale.bucket_bytes, None)  # Its first collective takes device memory for good.
    speeds: dict[SyncMode, float] = {}
    for mode in (SyncMode.tensor, SyncMode.ipc):
        names, size = ("the actor", "the receiver"), setting.scale.bucket_bytes
        spec = TransportSpec(mode, 0, names, size, _TIMEOUT_S, setting.device, None, "")
        _versions(actor, spec, 1)  # A warm-up, which loads kernels onto the device.
        before = _memory(setting)
        speeds[mode] = _versions(actor, spec, REPEATS)
        yield holds(f"{mode}: {1 + REPEATS} versions arrive whole", True)  # `_versions` raises otherwise.
        if setting.on_gpu:
            after = _memory(setting)
            for place, index in (("this process", 0), ("the device", 1)):
                kept = (after[index] - before[index]) / _MIB
                yield at_most(f"{mode}: memory of {place} not returned", kept, _RETURNED_MIB, "MiB")
        yield from _after_a_death(actor, setting, spec)
    host = speeds[SyncMode.tensor]
    yield Figure("tensor", host, "GB/s")
    if setting.on_gpu:
        yield compared("ipc", speeds[SyncMode.ipc], "GB/s", "tensor", host, (10, float("inf")))


def _versions(actor: Actor, spec: TransportSpec, count: int) -> float:
    """Open both ends and send `count` versions; return the GB/s of the fastest. Raises RuntimeError if one is damaged."""
    with _sender(spec) as sender, _receiver(spec) as (_, pipe):
        return max(_send(actor, spec, sender, pipe) for _ in range(count))


def _after_a_death(actor: Actor, setting: Setting, spec: TransportSpec) -> Iterator[Figure]:
    """Kill a receiver that holds a bucket, and send a version to another one."""
    before, _ = _memory(setting)
    with _sender(spec) as sender, _receiver(spec) as (process, pipe):
        pipe.send(_HOLD)
        pipe.send(actor.export(spec.bucket_bytes, sender).next())
        pipe.recv()
        process.kill()
        process.join()
    _versions(actor, spec, 1)
    yield holds(f"{spec.mode}: after a receiver was killed, another gets a whole version", True)
    if setting.on_gpu:
        kept = (_memory(setting)[0] - before) / _MIB
        limit = SLOTS * spec.bucket_bytes / _MIB + _RETURNED_MIB
        yield at_most(f"{spec.mode}: memory left by the killed receiver", kept, limit, "MiB")


def _memory(setting: Setting) -> tuple[int, int]:
    """Return bytes allocated by this process and bytes taken on the device, without torch's unused cache."""
    if not setting.on_gpu:
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


def _send(actor: Actor, spec: TransportSpec, sender: Sender, pipe: Connection) -> float:
    """Send the policy once; return the GB/s. Raises RuntimeError if it does not arrive whole."""
    started, sent = time.perf_counter(), 0
    export = actor.export(spec.bucket_bytes, sender)
    while (handle := export.next()) is not None:
        pipe.send(handle)
        pipe.recv()
        sent += handle.nbytes
        sender.release(handle.number)
    pipe.send(export.digest)
    if not pipe.recv():
        raise RuntimeError("The received tensors differ from those sent.")
    return sent / (time.perf_counter() - started) / 1e9


@contextmanager
def _sender(spec: TransportSpec) -> Iterator[Sender]:
    stands_in = spec.mode is SyncMode.ipc and spec.device is Device.cpu
    sender = IpcSender(spec, torch.device("cpu")) if stands_in else open_sender(spec)
    try:
        yield sender
    finally:
        sender.close()


@contextmanager
def _receiver(spec: TransportSpec) -> Iterator[tuple[BaseProcess, Connection]]:
    """Yield a receiving process and the pipe to it; end the process at the end."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(spec, theirs), daemon=True)
    process.start()
    theirs.close()  # So that `recv` raises EOFError if the process dies.
    try:
        yield process, ours
        ours.close()
        process.join(_TIMEOUT_S)
    finally:
        process.kill()
        process.join()


def _receive(spec: TransportSpec, pipe: Connection) -> None:
    """Receive buckets, verify every tensor, and compare the digest at the end of each version, until the pipe ends."""
    stands_in = spec.mode is SyncMode.ipc and spec.device is Device.cpu
    spec = replace(spec, rank=1)
    end: Receiver = IpcReceiver(spec, torch.device("cpu")) if stands_in else open_receiver(spec)
    checksums: dict[str, str] = {}
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            end.close()
            return
        if message == _HOLD:
            held = end.receive(pipe.recv())
            pipe.send(held.flat.numel())
        elif isinstance(message, str):
            pipe.send(digest(checksums) == message)
            checksums = {}
        else:
            checksums |= {record.name: record.checksum for record, _ in unpack(end.receive(message))}
            end.release()
            pipe.send(None)
