"""Weights between real processes, each way: every bit arrives, or an error says what is wrong, and in time.

Memory that torch shares stands for a GPU's.
"""

from __future__ import annotations

import inspect
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from rlsys.config.schema import Device, SyncMode
from rlsys.errors import RunError
from rlsys.weights import transport
from rlsys.weights.transport import (
    EVENT_SYNC_REQUIRED,
    STORAGE_DEVICE,
    BucketHandle,
    ChecksumError,
    DevicePlace,
    IpcReceiver,
    IpcSender,
    Receiver,
    Sender,
    SharedPlace,
    TransportSpec,
    open_receiver,
    open_sender,
    pack_into,
    unpack,
)
from tests.weights.ends import End, answers, connect, ends, raw, receiver_of, sender_of, some_tensors, spec

Ends = tuple[End, list[End]]
each_mode = pytest.mark.parametrize("mode", list(SyncMode), ids=str)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair() -> Iterator[Ends]:
    with ends(receivers=2) as opened:
        yield opened


def sent(version: int) -> dict[str, Any]:
    return {name: raw(tensor) for bucket in some_tensors(version) for name, tensor in bucket}


def send_version(source: End, sinks: list[End], version: int, taken: int, damage: str | None = None) -> int:
    """Every bucket to every sink, the next one packed while the last is read; how many are taken then."""
    source.call("choose", version, damage)
    source.call("begin_export")
    for sink in sinks:
        sink.call("begin_update", version)
    handle = source.call("next_handle", taken)
    while handle is not None:
        source.ask("next_handle", taken)
        for sink in sinks:
            sink.ask("load_bucket", handle)
        handle, *_ = answers(source, *sinks)
        taken += 1
    expected = source.call("end_export", taken)
    for sink in sinks:
        sink.call("finish_update", version, expected)
    return taken


def first_handle(source: End) -> BucketHandle:
    source.call("choose", 1)
    source.call("begin_export")
    handle: BucketHandle = source.call("next_handle", 0)
    return handle


@each_mode
def test_no_room_is_given_that_was_not_released(mode: SyncMode, tmp_path: Path) -> None:
    sender = sender_of(replace(spec(mode, 0, tmp_path), members=("actor rank 0",)))
    tensors = some_tensors(1)
    for number in (0, 1):
        sender.send(pack_into(sender.room(), tensors[number]))
    with pytest.raises(RuntimeError, match="Bucket 3"):
        sender.room()
    sender.release(1)
    sender.send(pack_into(sender.room(), tensors[2]))
    with pytest.raises(RuntimeError, match="Bucket 4"):
        sender.room()
    sender.close()
    assert not list(tmp_path.rglob("*bucket*"))


@each_mode
def test_every_bit_of_every_version_arrives_everywhere(mode: SyncMode, pair: Ends, tmp_path: Path) -> None:
    source, sinks = pair
    connect(spec(mode, len(sinks), tmp_path), source, sinks)
    taken = 0
    for version in (1, 2):
        taken = send_version(source, sinks, version, taken)
        assert len(sent(version)) == 25
        for sink in sinks:
            assert sink.call("held") == sent(version)
    assert not list(tmp_path.rglob("*bucket*")), "files that were taken are gone"


@each_mode
def test_a_bit_that_changes_on_the_way_is_found_and_its_tensor_named(
    mode: SyncMode, pair: Ends, tmp_path: Path
) -> None:
    source, sinks = pair
    connect(spec(mode, len(sinks), tmp_path), source, sinks)
    with pytest.raises(ChecksumError, match=r"0\.turned"):
        send_version(source, sinks, 1, 0, damage="0.turned")


@pytest.mark.parametrize("mode", [SyncMode.tensor, SyncMode.ipc], ids=str)
def test_a_sender_that_was_killed_leaves_no_shared_memory_and_readers_are_told(mode: SyncMode, tmp_path: Path) -> None:
    with ends(receivers=1) as (source, sinks):
        connect(spec(mode, 1, tmp_path), source, sinks)
        handle = first_handle(source)
        if mode is SyncMode.tensor:
            sinks[0].call("load_bucket", handle)
            handle = source.call("next_handle", 0)
            assert source.call("files_in_shared_memory") == [], "memory without a name ends with its users"
        source.kill()
        with pytest.raises(RunError, match=rf"rollout rank 0 .*process {source.process.pid}"):
            sinks[0].call("load_bucket", handle)


def test_receivers_of_a_broadcast_are_told_that_the_sender_was_killed(tmp_path: Path) -> None:
    """The closed connection tells them: the time-out is longer than their answer is waited for."""
    with ends(receivers=2) as (source, sinks):
        connect(spec(SyncMode.broadcast, 2, tmp_path, timeout_s=3600.0), source, sinks)
        handle = first_handle(source)
        for sink in sinks:
            sink.call("load_bucket", handle)
        for sink in sinks:
            sink.ask("load_bucket", replace(handle, number=2))
        source.kill()
        for rank, sink in enumerate(sinks):
            with pytest.raises(RunError, match=f"bucket 2 .* rollout rank {rank}: actor rank 0"):
                sink.answer()


def test_a_bucket_leaves_before_anybody_receives_it_where_members_connect_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL blocks at a member's first broadcast until every member has begun one."""
    open_group = transport._open_group

    def like_nccl(spec: TransportSpec, store: dist.Store) -> Any:
        group = open_group(spec, store)

        def broadcast(*args: Any) -> Any:
            store.set(f"begun/{spec.rank}", "1")
            store.wait([f"begun/{rank}" for rank in range(len(spec.members))])
            return group.broadcast(*args)

        return SimpleNamespace(broadcast=broadcast, abort=group.abort)

    monkeypatch.setattr(transport, "_open_group", like_nccl)
    both = spec(SyncMode.broadcast, 1, tmp_path)
    with ThreadPoolExecutor() as threads:
        opening = threads.submit(open_receiver, replace(both, rank=1))
        sender, receiver = open_sender(both), opening.result(timeout=100)
    handle = sender.send(pack_into(sender.room(), some_tensors(1)[0]))
    found = {record.name: raw(tensor) for record, tensor in unpack(receiver.receive(handle))}
    assert found == {name: raw(tensor) for name, tensor in some_tensors(1)[0]}
    receiver.close()
    sender.close()


def test_members_that_do_not_come_are_named_by_those_that_wait(tmp_path: Path) -> None:
    with ends(receivers=1) as (source, sinks):
        broadcast = spec(SyncMode.broadcast, 3, tmp_path, timeout_s=3.0)
        sinks[0].ask("open_transport", replace(broadcast, rank=2, timeout_s=60.0))
        source.ask("open_transport", broadcast)
        with pytest.raises(RunError, match=r"rollout rank 0 and .*rollout rank 2") as told:
            source.answer()
        assert "actor rank 0" not in str(told.value)
        source.kill()
        with pytest.raises(RunError, match=r"rollout rank [01]"):
            sinks[0].answer()


def test_a_receiver_that_hangs_is_named_by_the_sender(tmp_path: Path) -> None:
    with ends(receivers=2) as (source, sinks):
        connect(spec(SyncMode.broadcast, 2, tmp_path), source, sinks)
        source.call("lose_patience", 0.5)
        sinks[0].call("load_bucket", first_handle(source))
        with pytest.raises(RunError, match=r"bucket 1 .* by rollout rank 1:"):
            source.call("next_handle", 0)


def test_a_file_that_does_not_come_is_waited_for_and_then_named(tmp_path: Path) -> None:
    receiver = open_receiver(replace(spec(SyncMode.disk, 1, tmp_path, timeout_s=0.2), rank=1))
    missing = BucketHandle(1, (), 10, str(tmp_path / "bucket-000001"))
    with pytest.raises(RunError, match=r"rollout rank 0 .*bucket-000001: actor rank 0"):
        receiver.receive(missing)
    (tmp_path / "bucket-000001").write_bytes(b"1234567")
    with pytest.raises(RunError, match="bucket-000001 3 bytes short"):
        receiver.receive(missing)


@pytest.mark.parametrize(
    ("mode", "place"),
    [
        (SyncMode.tensor, SharedPlace("another kernel", 1, 1, 0)),
        (SyncMode.ipc, DevicePlace("another kernel", 1, (b"",))),
    ],
)
def test_memory_of_another_host_is_refused_with_the_way_out(
    mode: SyncMode, place: SharedPlace | DevicePlace, tmp_path: Path
) -> None:
    receiver = receiver_of(replace(spec(mode, 1, tmp_path), rank=1))
    with pytest.raises(RunError, match=f"cluster.sync_mode={mode} .*rollout rank 0 .*broadcast"):
        receiver.receive(BucketHandle(1, (), 10, place))


@pytest.mark.parametrize("mode", [SyncMode.tensor, SyncMode.ipc], ids=str)
def test_a_receiver_reads_where_the_sender_wrote(mode: SyncMode, tmp_path: Path) -> None:
    both = spec(mode, 1, tmp_path)
    sender, receiver = sender_of(both), receiver_of(replace(both, rank=1))
    room = sender.room()
    handle = sender.send(pack_into(room, some_tensors(1)[0]))
    arrived = receiver.receive(handle)
    assert arrived.data.nbytes == handle.nbytes < room.nbytes
    room[100] ^= 1
    assert bytes(arrived.data) == bytes(room[: handle.nbytes]), "the same memory, not a copy"
    if mode is SyncMode.tensor:
        assert not arrived.in_host.flags.writeable


def test_memory_of_a_device_is_held_only_while_something_is_under_way(tmp_path: Path) -> None:
    sender = IpcSender(spec(SyncMode.ipc, 1, tmp_path), CPU)
    slots = []
    for taken in (0, 0, 1, 2):
        sender.release(taken)
        slots.append(weakref.ref(sender.room().untyped_storage()))
        sender.send(pack_into(sender.room(), some_tensors(1)[0]))
    assert all(slot() is not None for slot in slots)
    sender.release(4)
    assert all(slot() is None for slot in slots)
    assert sender.room().numel() == 64_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("open_end", "rank", "name"), [(open_sender, 0, "actor"), (open_receiver, 1, "rollout")])
def test_without_a_gpu_each_end_is_refused_with_the_way_out(
    open_end: Callable[[TransportSpec], Sender | Receiver], rank: int, name: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=f"cluster.sync_mode=ipc .*{name} rank 0 .*cluster.sync_mode=tensor"):
        open_end(replace(spec(SyncMode.ipc, 1, tmp_path), rank=rank, device=Device.gpu))


def rebuilt(*arguments: Any) -> torch.Tensor:
    """Stands for torch's `rebuild_cuda_tensor`: what it was asked for, as a tensor."""
    return torch.tensor([int(one) for one in arguments])


def test_memory_of_a_gpu_appears_on_the_readers_own_and_no_event_is_opened(tmp_path: Path) -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names.index("storage_device") == STORAGE_DEVICE
    assert names.index("event_sync_required") == EVENT_SYNC_REQUIRED
    given = list(range(100, 100 + len(names)))
    receiver = IpcReceiver(replace(spec(SyncMode.ipc, 1, tmp_path), rank=1), torch.device("cuda", 3))
    place = DevicePlace(transport.host_identity(), os.getpid(), (pickle.dumps((rebuilt, given)),))
    found = receiver.receive(BucketHandle(1, (), 10, place)).flat.tolist()
    given[STORAGE_DEVICE], given[EVENT_SYNC_REQUIRED] = 3, 0
    assert found == given
