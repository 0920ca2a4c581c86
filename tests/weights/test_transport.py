"""Tests of the weight transports: exact delivery to several receivers, killed, missing and hanging members, memory.

Memory that torch shares between processes stands in for GPU memory.
"""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import subprocess
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode

from rlsys.config.schema import Device, SyncMode
from rlsys.errors import PeerLost, RunError
from rlsys.weights import transport
from rlsys.weights.bucket import pack_into, unpack
from rlsys.weights.transport import (
    EVENT_SYNC_REQUIRED,
    STORAGE_DEVICE,
    BucketHandle,
    DeviceMemoryLocation,
    IpcReceiver,
    Meeting,
    Receiver,
    Sender,
    SharedMemoryLocation,
    TransportSpec,
    open_receiver,
    open_sender,
)
from tests.support.megatron_processes import Shell, fresh
from tests.support.tensors import raw, some_tensors
from tests.support.transport_ends import receiver_of, sender_of, spec

within_a_host = pytest.mark.parametrize("mode", [SyncMode.tensor, SyncMode.ipc], ids=str)
BUCKETS = some_tensors(1)


@contextmanager
def receivers_of(
    sending: TransportSpec, threads: ThreadPoolExecutor, on_device: bool = False
) -> Iterator[list[Receiver]]:
    """Open all receivers at once, because a broadcast receiver waits for the other receivers and for the sender."""
    ranks = range(1, len(sending.members))
    receivers = list(threads.map(lambda rank: receiver_of(replace(sending, rank=rank), on_device), ranks))
    yield receivers
    for receiver in receivers:
        receiver.close()


@contextmanager
def opened(
    sending: TransportSpec, threads: ThreadPoolExecutor, on_device: bool = False
) -> Iterator[tuple[Sender, list[Receiver]]]:
    """Open the sender and all receivers in this process."""
    opening = threads.submit(sender_of, sending, on_device)
    with receivers_of(sending, threads, on_device) as receivers:
        yield opening.result(), receivers
    # Close the sender last, because it waits for open receivers.
    opening.result().close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def bits(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    return {name: raw(tensor) for name, tensor in tensors}


def received(receiver: Receiver, handle: BucketHandle) -> dict[str, Any]:
    """Receive a bucket; return the bits of its tensors."""
    found = bits([(record.name, tensor) for record, tensor in unpack(receiver.receive(handle))])
    receiver.release()
    return found


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("mode", list(SyncMode), ids=str)
def test_buckets_reach_every_receiver_and_memory_is_reused_only_after_release(
    mode: SyncMode, on_device: bool, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """The next bucket is packed while the previous one is being read."""
    with opened(spec(mode, 2, tmp_path), threads, on_device) as (sender, receivers):
        assert isinstance(sender.next_slot(), Tensor) == (on_device or mode is SyncMode.ipc)
        handle = sender.send(pack_into(sender.next_slot(), BUCKETS[0]))
        for taken, following in enumerate([*BUCKETS[1:], BUCKETS[0]], start=1):
            reading = [threads.submit(received, receiver, handle) for receiver in receivers]
            handle = sender.send(pack_into(sender.next_slot(), following))
            assert [read.result() for read in reading] == [bits(BUCKETS[taken - 1])] * 2
            with pytest.raises(RuntimeError, match=f"Bucket {taken + 2}"):
                sender.next_slot()
            sender.release(taken)
    assert not list(tmp_path.rglob("*bucket*"))


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that torch writes in this thread, by any operation that makes or fills a tensor from another."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func.overloadpacket.__name__ in (
            "copy_",
            "clone",
            "_to_copy",
            "cat",
            "stack",
        ):
            self.nbytes += result.nbytes
        return result


@pytest.mark.parametrize(("mode", "copies"), [(SyncMode.tensor, 1), (SyncMode.broadcast, 0)])
def test_bucket_on_a_device_is_copied_only_where_host_memory_carries_it(
    mode: SyncMode, copies: int, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:

    def counted(action: Callable[[], Any]) -> tuple[Any, int]:
        with CopiedBytes() as copied:
            return action(), copied.nbytes

    with opened(spec(mode, 1, tmp_path), threads, on_device=True) as (sender, (receiver,)):
        bucket = pack_into(sender.next_slot(), BUCKETS[0])
        handle, sent = counted(lambda: sender.send(bucket))
        arrived, got = counted(lambda: receiver.receive(handle))
        assert (sent, got) == (handle.nbytes * copies, handle.nbytes * copies)
        assert isinstance(arrived.data, Tensor)
        staged, moved = counted(lambda: arrived.copy(to_host=True))
        assert moved == handle.nbytes, "an engine moves a bucket to host memory once"
        assert bits([(record.name, tensor) for record, tensor in unpack(staged)]) == bits(BUCKETS[0])


def _send(shell: Shell, sending: TransportSpec, buckets: int) -> list[BucketHandle]:
    """Send buckets from a process that stays alive afterwards."""
    sender = shell.worker = sender_of(sending)
    return [sender.send(pack_into(sender.next_slot(), tensors)) for tensors in BUCKETS[:buckets]]


@within_a_host
def test_killed_sender_leaves_no_shared_memory_and_its_receivers_fail(
    mode: SyncMode, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    sending = spec(mode, 1, tmp_path)
    with fresh(1) as (host,), receivers_of(sending, threads) as (receiver,):
        host.begin(_send, sending, 2)
        first, second = host.answer()
        assert received(receiver, first) == bits(BUCKETS[0])
        sender = Path(f"/proc/{host.process.pid}")
        if mode is SyncMode.tensor:
            held = [(sender / "maps").read_text(), *map(os.readlink, (sender / "fd").iterdir())]
            assert "/dev/shm" not in " ".join(held), "shared memory must have no name, so that it ends with its users"
        host.kill()
        with pytest.raises(RunError, match=rf"rollout rank 0 .*process {host.process.pid}"):
            receiver.receive(second)


def test_broadcast_receivers_fail_at_once_when_the_sender_was_killed(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    sending = spec(SyncMode.broadcast, 2, tmp_path, timeout_s=3600.0)
    with fresh(1) as (host,):
        host.begin(_send, sending, 1)
        with receivers_of(sending, threads) as receivers:
            (first,) = host.answer()
            assert list(threads.map(received, receivers, [first] * 2)) == [bits(BUCKETS[0])] * 2
            waiting = [threads.submit(receiver.receive, replace(first, number=2)) for receiver in receivers]
            host.kill()
            for rank, read in enumerate(waiting):
                with pytest.raises(RunError, match=f"bucket 2 .* rollout rank {rank}: actor rank 0"):
                    read.result()


def test_send_returns_before_a_receiver_that_connects_late_receives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    """NCCL blocks in a member's first broadcast until every member has begun its own."""
    open_group = transport._open_group

    def like_nccl(spec: TransportSpec, store: dist.Store) -> Any:
        group = open_group(spec, store)

        def broadcast(*args: Any) -> Any:
            store.set(f"begun/{spec.rank}", "1")
            store.wait([f"begun/{rank}" for rank in range(len(spec.members))])
            return group.broadcast(*args)

        return SimpleNamespace(broadcast=broadcast, abort=group.abort)

    monkeypatch.setattr(transport, "_open_group", like_nccl)
    with opened(spec(SyncMode.broadcast, 1, tmp_path), threads) as (sender, (receiver,)):
        handle = sender.send(pack_into(sender.next_slot(), BUCKETS[0]))
        assert received(receiver, handle) == bits(BUCKETS[0])


def test_nccl_group_has_no_watchdog_that_would_kill_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch starts the watchdog of a group, and its monitor, unless this variable is set when the group is made."""
    seen: list[tuple[str | None, float]] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, _store: object, _rank: int, _size: int, options: Any) -> None:
            seen.append((os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), options._timeout.total_seconds()))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    on_gpus = replace(spec(SyncMode.broadcast, 1, tmp_path, timeout_s=7.0), device=Device.gpu)
    assert isinstance(transport._open_group(on_gpus, dist.HashStore()), Nccl)
    # The transport's own timeout comes first.
    assert [variable for variable, limit_s in seen if limit_s > 7.0] == ["1"]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ, "the groups of training keep their watchdog"


def test_missing_members_are_named_after_the_timeout(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, the member that does come may be too late as well."""
    wait = transport._wait
    monkeypatch.setattr(
        transport, "_wait", lambda done, store, limit_s, poll_s: wait(done, store, limit_s / 2000, poll_s)
    )
    broadcast = spec(SyncMode.broadcast, 3, tmp_path, timeout_s=600.0)
    coming = threads.submit(open_receiver, replace(broadcast, rank=2))
    with pytest.raises(RunError, match=r"rollout rank 0 and .*rollout rank 2") as caught:
        open_sender(broadcast)
    assert "actor rank 0" not in str(caught.value)
    with pytest.raises(RunError, match=r"rollout rank [01]"):
        coming.result()


def test_hanging_receiver_is_named_by_the_sender(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    with opened(spec(SyncMode.broadcast, 2, tmp_path), threads) as (sender, (quick, _)):
        quick.receive(sender.send(pack_into(sender.next_slot(), BUCKETS[0])))
        group: Any = sender._group  # type: ignore[attr-defined]
        group._spec = replace(group._spec, timeout_s=0.1)
        with pytest.raises(RunError, match=r"bucket 1 .* by rollout rank 1:"):
            sender.send(pack_into(sender.next_slot(), BUCKETS[1]))


@pytest.mark.parametrize("joined", [False, True])
def test_members_that_wait_for_another_leave_when_the_meeting_ends(
    joined: bool, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """The other member does not join, or takes no bucket. No backend notices."""
    meeting = Meeting("127.0.0.1")
    sending = replace(spec(SyncMode.broadcast, 2, tmp_path, timeout_s=3600.0), address=meeting.address)
    if not joined:
        waits = [threads.submit(open_sender, sending), threads.submit(open_receiver, replace(sending, rank=1))]
        meeting.end()
        for wait in waits:
            with pytest.raises(PeerLost, match="rollout rank 1"):
                wait.result()
        return
    with opened(sending, threads) as (sender, (quick, _)):
        first = sender.send(pack_into(sender.next_slot(), BUCKETS[0]))
        quick.receive(first)
        waits = [
            threads.submit(sender.send, pack_into(sender.next_slot(), BUCKETS[1])),
            threads.submit(quick.receive, replace(first, number=2)),
        ]
        meeting.end()
        for wait, who in zip(waits, ("bucket 1 .* rollout rank 1", "bucket 2 .* rollout rank 0"), strict=True):
            with pytest.raises(PeerLost, match=who):
                wait.result()


def test_bucket_that_does_not_fit_on_the_disk_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    sender = open_sender(spec(SyncMode.disk, 1, tmp_path))
    (tmp_path / "weights" / ".bucket-000001.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="bucket-000001") as raised:
        sender.send(pack_into(sender.next_slot(), BUCKETS[0]))
    assert raised.value.errno == errno.ENOSPC
    assert list((tmp_path / "weights").iterdir()) == []


def test_missing_or_short_bucket_file_is_named_after_the_timeout(tmp_path: Path) -> None:
    receiver = open_receiver(replace(spec(SyncMode.disk, 1, tmp_path, timeout_s=0.2), rank=1))
    missing = BucketHandle(1, (), 10, str(tmp_path / "bucket-000001"))
    with pytest.raises(RunError, match=r"rollout rank 0 .*bucket-000001: actor rank 0"):
        receiver.receive(missing)
    (tmp_path / "bucket-000001").write_bytes(b"1234567")
    with pytest.raises(RunError, match="bucket-000001 3 bytes too short"):
        receiver.receive(missing)


def test_memory_of_a_sender_that_has_exited_is_that_of_a_lost_peer(tmp_path: Path) -> None:
    """The death of the sender is the cause to report, and no fault of the receiver."""
    exited = subprocess.Popen(["true"])
    exited.wait()
    receiver = receiver_of(replace(spec(SyncMode.tensor, 1, tmp_path), rank=1))
    place = SharedMemoryLocation(transport.host_identity(), exited.pid, 1, 0)
    with pytest.raises(PeerLost, match="actor rank 0"):
        receiver.receive(BucketHandle(1, (), 10, place))


@within_a_host
def test_memory_of_another_host_is_refused_with_an_alternative(mode: SyncMode, tmp_path: Path) -> None:
    other = "another kernel"
    place = SharedMemoryLocation(other, 1, 1, 0) if mode is SyncMode.tensor else DeviceMemoryLocation(other, 1, (b"",))
    receiver = receiver_of(replace(spec(mode, 1, tmp_path), rank=1))
    with pytest.raises(RunError, match=f"cluster.sync_mode={mode} .*rollout rank 0 .*broadcast"):
        receiver.receive(BucketHandle(1, (), 10, place))


@within_a_host
def test_receiver_reads_the_senders_memory_without_a_copy(
    mode: SyncMode, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    with opened(spec(mode, 1, tmp_path), threads) as (sender, (receiver,)):
        room = sender.next_slot()
        handle = sender.send(pack_into(room, BUCKETS[0]))
        arrived = receiver.receive(handle)
        assert arrived.data.nbytes == handle.nbytes < room.nbytes
        room[100] ^= 1
        assert bytes(arrived.data) == bytes(room[: handle.nbytes]), "the same memory, not a copy"
        if mode is SyncMode.tensor:
            with pytest.raises(ValueError, match="read-only"):
                arrived.data[0] = 1


@pytest.mark.parametrize("mode", [SyncMode.ipc, SyncMode.tensor, SyncMode.disk], ids=str)
def test_device_memory_is_freed_when_all_buckets_are_released(mode: SyncMode, tmp_path: Path) -> None:
    sender = sender_of(spec(mode, 1, tmp_path), on_device=True)
    slots = []
    for taken in (0, 0, 1, 2):
        sender.release(taken)
        slots.append(weakref.ref(sender.next_slot().untyped_storage()))
        sender.send(pack_into(sender.next_slot(), BUCKETS[0]))
    assert all(slot() is not None for slot in slots)
    sender.release(4)
    assert all(slot() is None for slot in slots)
    assert sender.next_slot().nbytes == 64_000
    sender.close()


def rebuilt(*arguments: Any) -> Tensor:
    """Stand in for torch's `rebuild_cuda_tensor`; returns its arguments as a tensor."""
    return torch.tensor([int(one) for one in arguments])


def test_ipc_memory_is_opened_on_the_receivers_device_without_an_event(tmp_path: Path) -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names.index("storage_device") == STORAGE_DEVICE
    assert names.index("event_sync_required") == EVENT_SYNC_REQUIRED
    given = list(range(100, 100 + len(names)))
    receiver = IpcReceiver(replace(spec(SyncMode.ipc, 1, tmp_path), rank=1), torch.device("cuda", 3))
    place = DeviceMemoryLocation(transport.host_identity(), os.getpid(), (pickle.dumps((rebuilt, given)),))
    found = receiver.receive(BucketHandle(1, (), 10, place)).flat.tolist()
    given[STORAGE_DEVICE], given[EVENT_SYNC_REQUIRED] = 3, 0
    assert found == given
