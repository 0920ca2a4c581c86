"""Weights between real processes, each way: every bit arrives, or an error says what is wrong, and in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rlsys.config.schema import SyncMode
from rlsys.errors import RunError
from rlsys.weights import transport
from rlsys.weights.transport import (
    BucketHandle,
    ChecksumError,
    SharedPlace,
    TransportSpec,
    open_receiver,
    open_sender,
    pack_into,
    unpack,
)
from tests.weights.ends import End, answers, connect, ends, raw, sender_of, some_tensors, spec

Ends = tuple[End, list[End]]
each_mode = pytest.mark.parametrize("mode", list(SyncMode), ids=str)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ends]:
    with ends(receivers=2) as opened:
        yield opened


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


@each_mode
def test_every_bit_of_every_version_arrives_everywhere(mode: SyncMode, pair: Ends, tmp_path: Path) -> None:
    source, sinks = pair
    connect(spec(mode, len(sinks), tmp_path), source, sinks)
    taken = 0
    for version in (1, 2):
        taken = send_version(source, sinks, version, taken)
        sent = {name: raw(tensor) for bucket in some_tensors(version) for name, tensor in bucket}
        assert len(sent) == 25
        for sink in sinks:
            assert sink.call("held") == sent
    assert not list(tmp_path.rglob("*bucket*")), "files that were taken are gone"


@each_mode
def test_a_bit_that_changes_on_the_way_is_found_and_its_tensor_named(
    mode: SyncMode, pair: Ends, tmp_path: Path
) -> None:
    source, sinks = pair
    connect(spec(mode, len(sinks), tmp_path), source, sinks)
    with pytest.raises(ChecksumError, match=r"Tensor 0\.turned did not arrive as it was sent"):
        send_version(source, sinks, 1, 0, damage="0.turned")


@each_mode
def test_no_room_is_given_that_was_not_released(mode: SyncMode, tmp_path: Path) -> None:
    alone = replace(spec(mode, 0, tmp_path), members=("actor rank 0",))
    sender = sender_of(alone)
    tensors = some_tensors(1)
    for number in (0, 1):
        sender.send(pack_into(sender.room(), tensors[number]))
    with pytest.raises(RuntimeError, match="Bucket 3 has no room: 2 were sent and 0 have been taken"):
        sender.room()
    sender.release(1)
    sender.send(pack_into(sender.room(), tensors[2]))
    with pytest.raises(RuntimeError, match="Bucket 4 has no room"):
        sender.room()
    sender.close()
    assert not list(tmp_path.rglob("*bucket*"))


def test_a_sender_that_was_killed_leaves_no_shared_memory_and_readers_are_told(tmp_path: Path) -> None:
    with ends(receivers=1) as (source, sinks):
        connect(spec(SyncMode.tensor, 1, tmp_path), source, sinks)
        source.call("choose", 1)
        source.call("begin_export")
        handles = [source.call("next_handle", 0) for _ in range(2)]
        sinks[0].call("load_bucket", handles[0])
        assert source.call("files_in_shared_memory") == [], "memory without a name ends with its users"
        source.kill()
        with pytest.raises(RunError, match=r"rollout rank 0 cannot open .* of actor rank 0, process \d+ .*gone"):
            sinks[0].call("load_bucket", handles[1])


def test_receivers_of_a_broadcast_are_told_that_the_sender_was_killed(tmp_path: Path) -> None:
    with ends(receivers=2) as (source, sinks):
        connect(spec(SyncMode.broadcast, 2, tmp_path, timeout_s=50.0), source, sinks)
        source.call("choose", 1)
        source.call("begin_export")
        handle = source.call("next_handle", 0)
        for sink in sinks:
            sink.call("load_bucket", handle)
        for sink in sinks:
            sink.ask("load_bucket", replace(handle, number=2))
        time.sleep(0.3)
        source.kill()
        started = time.monotonic()
        for rank, sink in enumerate(sinks):
            with pytest.raises(RunError, match=f"bucket 2 .* did not reach rollout rank {rank}: actor rank 0 is gone"):
                sink.answer()
        assert time.monotonic() - started < 40, "a closed connection is noticed before the time-out"


class ConnectsAtFirst:
    """A group that, as NCCL does, blocks at its first broadcast until every member has begun one."""

    def __init__(self, group: Any, store: dist.Store, size: int) -> None:
        self._group, self._store, self._size = group, store, size
        self._connected = False

    def broadcast(self, tensors: list[Any], options: Any) -> dist.Work:
        if not self._connected:
            until = time.monotonic() + 5
            self._store.add("begun", 1)
            while self._store.add("begun", 0) < self._size:
                if time.monotonic() > until:
                    raise RuntimeError("a member has not begun")
                time.sleep(0.01)
            self._connected = True
        work: dist.Work = self._group.broadcast(tensors, options)
        return work

    def abort(self) -> None:
        self._group.abort()


def test_a_bucket_leaves_before_anybody_receives_it_where_members_connect_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_group = transport._open_group

    def like_nccl(spec: TransportSpec, store: dist.Store) -> Any:
        return ConnectsAtFirst(open_group(spec, store), store, len(spec.members))

    monkeypatch.setattr(transport, "_open_group", like_nccl)
    both = spec(SyncMode.broadcast, 1, tmp_path)
    with ThreadPoolExecutor() as threads:
        opening = threads.submit(open_receiver, replace(both, rank=1))
        sender, receiver = open_sender(both), opening.result(timeout=20)
    handle = sender.send(pack_into(sender.room(), some_tensors(1)[0]))
    found = {record.name: raw(tensor) for record, tensor in unpack(receiver.receive(handle))}
    assert found == {name: raw(tensor) for name, tensor in some_tensors(1)[0]}
    receiver.close()
    sender.close()


def test_a_member_that_does_not_come_is_named_by_those_that_wait(tmp_path: Path) -> None:
    with ends(receivers=1) as (source, sinks):
        broadcast = spec(SyncMode.broadcast, 3, tmp_path, timeout_s=2.0)
        source.ask("open_transport", broadcast)
        sinks[0].ask("open_transport", replace(broadcast, rank=2))
        with pytest.raises(RunError, match=r"^rollout rank 0 and rollout rank 2 did not come within 2 s"):
            source.answer()
        with pytest.raises(RunError, match=r"rollout rank (0 and rollout rank 2 did not come|1 did not meet actor)"):
            sinks[0].answer()


def test_a_receiver_that_hangs_is_named_by_the_sender(tmp_path: Path) -> None:
    with ends(receivers=2) as (source, sinks):
        connect(spec(SyncMode.broadcast, 2, tmp_path, timeout_s=2.0), source, sinks)
        source.call("choose", 1)
        source.call("begin_export")
        handle = source.call("next_handle", 0)
        sinks[0].ask("load_bucket", handle)
        with pytest.raises(
            RunError, match=r"bucket 1 .* was not taken by rollout rank 1: it is gone, or has hung for 2 s"
        ):
            source.call("next_handle", 0)


def test_a_file_that_does_not_come_is_waited_for_and_then_named(tmp_path: Path) -> None:
    receiver = open_receiver(replace(spec(SyncMode.disk, 1, tmp_path, timeout_s=0.2), rank=1))
    missing = BucketHandle(1, (), 10, str(tmp_path / "bucket-000001"))
    with pytest.raises(RunError, match=r"rollout rank 0 has waited 0\.2 s for .*bucket-000001: actor rank 0 is gone"):
        receiver.receive(missing)
    (tmp_path / "bucket-000001").write_bytes(b"1234567")
    with pytest.raises(RunError, match="bucket-000001 3 bytes short"):
        receiver.receive(missing)


def test_shared_memory_of_another_host_is_refused_with_the_way_out(tmp_path: Path) -> None:
    receiver = open_receiver(replace(spec(SyncMode.tensor, 1, tmp_path), rank=1))
    elsewhere = SharedPlace("another kernel", 1, 1, 0)
    with pytest.raises(RunError) as refusal:
        receiver.receive(BucketHandle(1, (), 10, elsewhere))
    assert str(refusal.value) == (
        "cluster.sync_mode=tensor needs the actor and rollout rank 0 on one host; use broadcast."
    )


def test_receivers_may_read_but_not_write_shared_memory(tmp_path: Path) -> None:
    both = spec(SyncMode.tensor, 1, tmp_path)
    sender, receiver = open_sender(both), open_receiver(replace(both, rank=1))
    room = sender.room()
    bucket = pack_into(room, some_tensors(1)[0])
    arrived = receiver.receive(sender.send(bucket))
    assert np.array_equal(arrived.data, bucket.data)
    room[100] ^= 1
    assert np.array_equal(arrived.data, bucket.data), "it is the same memory, not a copy"
    assert not arrived.data.flags.writeable
