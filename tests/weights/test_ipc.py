"""Buckets on a device, and their way to another process, with memory that torch shares in the place of a GPU's."""

from __future__ import annotations

import inspect
import os
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from rlsys.config.schema import Device, SyncMode
from rlsys.errors import RunError
from rlsys.weights import transport
from rlsys.weights.transport import (
    EVENT_SYNC_REQUIRED,
    STORAGE_DEVICE,
    Bucket,
    BucketFullError,
    BucketHandle,
    ChecksumError,
    DevicePlace,
    IpcReceiver,
    IpcSender,
    TransportSpec,
    open_receiver,
    open_sender,
    pack,
    pack_into,
    unpack,
)
from tests.weights.ends import connect, ends, raw, some_tensors, spec

CPU = torch.device("cpu")


def ipc(tmp_path: Path, receivers: int = 1) -> TransportSpec:
    return spec(SyncMode.ipc, receivers, tmp_path)


def test_what_is_packed_on_a_device_is_there_bit_by_bit_and_checked_there() -> None:
    tensors = [one for bucket in some_tensors(1) for one in bucket]
    memory = torch.full((1_000_000,), 7, dtype=torch.uint8)
    bucket = pack_into(memory, tensors)
    assert isinstance(bucket.data, torch.Tensor)
    assert bucket.data.data_ptr() == memory.data_ptr()
    assert (memory[bucket.data.numel() :] == 7).all()
    arrived = {record.name: raw(tensor) for record, tensor in unpack(bucket)}
    assert arrived == {name: raw(tensor) for name, tensor in tensors}
    (in_host,) = pack(tensors, 10**6)
    assert [replace(record, checksum="") for record in bucket.records] == [
        replace(record, checksum="") for record in in_host.records
    ]
    with pytest.raises(TypeError, match="bucket on cpu was taken for one in host memory"):
        _ = bucket.in_host
    with pytest.raises(BucketFullError, match=r"0\.steps takes 8 bytes, and 4 of"):
        pack_into(memory[: bucket.records[4].offset + 4], tensors[:5])


def test_a_wrong_bit_on_a_device_is_found_before_any_tensor_is_given_out() -> None:
    bucket = pack_into(torch.empty(50_000, dtype=torch.uint8), some_tensors(1)[0])
    for record in bucket.records:
        if record.nbytes:
            bucket.flat[record.offset + record.nbytes - 1] ^= 128
            with pytest.raises(ChecksumError, match=f"Tensor {record.name} did not arrive"):
                list(unpack(bucket))
            bucket.flat[record.offset + record.nbytes - 1] ^= 128
    with pytest.raises(ChecksumError, match=r"0\.steps is cut short"):
        next(unpack(Bucket(bucket.flat[:-1], bucket.records)))


def test_a_receiver_reads_where_the_sender_wrote(tmp_path: Path) -> None:
    both = ipc(tmp_path)
    sender, receiver = IpcSender(both, CPU), IpcReceiver(replace(both, rank=1), CPU)
    room = sender.room()
    handle = sender.send(pack_into(room, some_tensors(1)[0]))
    assert isinstance(handle.where, DevicePlace)
    assert (handle.where.pid, len(handle.where.handles)) == (os.getpid(), 1)
    arrived = receiver.receive(handle)
    assert arrived.flat.numel() == handle.nbytes < room.numel()
    room[100] ^= 1
    assert torch.equal(arrived.flat, room[: handle.nbytes]), "the same memory, not a copy"


def test_devices_are_waited_for_before_others_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    share = transport._shared_once
    monkeypatch.setattr(transport, "await_device", lambda device: events.append(f"wait {device}"))
    monkeypatch.setattr(transport, "_shared_once", lambda tensor: events.append("share") or share(tensor))
    both = ipc(tmp_path)
    sender, receiver = IpcSender(both, CPU), IpcReceiver(replace(both, rank=1), CPU)
    handle = sender.send(pack_into(sender.room(), some_tensors(1)[0]))
    assert events == ["wait cpu", "share"]
    receiver.receive(handle)
    receiver.release()
    assert events == ["wait cpu", "share", "wait cpu"]
    assert receiver._memory is None, "torch frees the memory only when it is let go"


def test_memory_is_held_only_while_something_is_under_way(tmp_path: Path) -> None:
    sender = IpcSender(ipc(tmp_path), CPU)
    slots = []
    for taken in (0, 0, 1, 2):
        sender.release(taken)
        slots.append(weakref.ref(sender.room().untyped_storage()))
        sender.send(pack_into(sender.room(), some_tensors(1)[0]))
    assert all(slot() is not None for slot in slots)
    sender.release(4)
    assert all(slot() is None for slot in slots)
    assert sender.room().numel() == 64_000


def test_buckets_of_other_stages_count(tmp_path: Path) -> None:
    sender = IpcSender(ipc(tmp_path), CPU)
    sender.skip()
    assert sender.send(pack_into(sender.room(), some_tensors(1)[0])).number == 2
    with pytest.raises(RuntimeError, match="Bucket 3 has no room"):
        sender.room()
    sender.release(1)
    sender.skip()
    sender.release(3)
    assert sender.send(pack_into(sender.room(), some_tensors(1)[0])).number == 4


def test_a_sender_that_was_killed_is_named(tmp_path: Path) -> None:
    with ends(receivers=1) as (source, sinks):
        connect(ipc(tmp_path), source, sinks)
        source.call("choose", 1)
        source.call("begin_export")
        handle = source.call("next_handle", 0)
        source.kill()
        with pytest.raises(RunError, match=r"rollout rank 0 cannot open the weights .* process \d+ .* is gone"):
            sinks[0].call("load_bucket", handle)


def test_another_host_is_refused_with_the_way_out(tmp_path: Path) -> None:
    receiver = IpcReceiver(replace(ipc(tmp_path), rank=1), CPU)
    with pytest.raises(RunError) as refusal:
        receiver.receive(BucketHandle(1, (), 10, DevicePlace("another kernel", 1, (b"",))))
    assert str(refusal.value) == (
        "cluster.sync_mode=ipc needs the actor and rollout rank 0 on one host; use broadcast."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", list(Device), ids=str)
def test_without_a_gpu_both_ends_are_refused_with_the_way_out(tmp_path: Path, device: Device) -> None:
    both = replace(ipc(tmp_path), device=device)
    for open_end, rank, name in ((open_sender, 0, "actor rank 0"), (open_receiver, 1, "rollout rank 0")):
        with pytest.raises(RunError) as refusal:
            open_end(replace(both, rank=rank))
        assert str(refusal.value) == (
            f"cluster.sync_mode=ipc hands weights on in the memory of GPUs, and {name} sees none; use "
            "cluster.sync_mode=tensor."
        )


def rebuilt(*arguments: Any) -> torch.Tensor:
    """Stands for torch's `rebuild_cuda_tensor`: what it was asked for, as a tensor."""
    return torch.tensor([int(one) for one in arguments])


def test_memory_of_a_gpu_appears_on_the_readers_own_and_no_event_is_opened(tmp_path: Path) -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names.index("storage_device") == STORAGE_DEVICE
    assert names.index("event_sync_required") == EVENT_SYNC_REQUIRED
    sent = list(range(100, 100 + len(names)))
    receiver = IpcReceiver(replace(ipc(tmp_path), rank=1), torch.device("cuda", 3))
    place = DevicePlace(IpcSender(ipc(tmp_path), CPU)._host, 1, (pickle.dumps((rebuilt, sent)),))
    found = receiver.receive(BucketHandle(1, (), 10, place)).flat.tolist()
    sent[STORAGE_DEVICE], sent[EVENT_SYNC_REQUIRED] = 3, 0
    assert found == sent
