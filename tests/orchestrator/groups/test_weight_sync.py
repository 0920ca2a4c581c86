"""Two phases, one bucket ahead of the readers, and nobody computes while its weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.config.schema import ClusterConfig, Device, ParallelConfig, SyncMode
from rlsys.errors import RunError
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.orchestrator.worker_groups import InferenceGroup
from rlsys.trainer.batches import BatchSharder
from rlsys.weights.transport import BucketHandle, TransportSpec, pack_into, unpack
from tests.support.ports import free_port
from tests.support.tensors import raw, some_tensors
from tests.support.transport_ends import receiver_of, sender_of


def cluster(mode: SyncMode = SyncMode.tensor, timeout_s: float = 120.0) -> ClusterConfig:
    return ClusterConfig(device=Device.cpu, sync_mode=mode, sync_bucket_bytes=64_000, call_timeout_s=timeout_s)


class Source:
    """The actor's group, of one process that hands out tensors that are made up."""

    name = "actor"
    version = 0

    def __init__(self) -> None:
        self.ranks = [SimpleNamespace(name="actor rank 0")]

    async def free_address(self, _timeout_s: float) -> tuple[str, int]:
        return "127.0.0.1", free_port()

    async def call(self, method: str, *args: Any) -> list[Any]:
        return [await asyncio.to_thread(getattr(self, method), *args)]

    def open_export(self, spec: TransportSpec) -> float:
        self._sender = sender_of(spec)
        return 2.0

    def begin_export(self) -> None:
        self._left = iter(some_tensors(self.version))

    def next_handle(self, taken: int) -> BucketHandle | None:
        self._sender.release(taken)
        tensors = next(self._left, None)
        return tensors and self._sender.send(pack_into(self._sender.next_slot(), tensors))

    def end_export(self, taken: int) -> str:
        self._sender.release(taken)
        return "digest"


class Reader:
    """A group of one process that takes weights, and keeps each bucket for a while."""

    living = (0,)

    def __init__(self, name: str, slowness_s: float) -> None:
        self.workers: Any = SimpleNamespace(name=name, ranks=[SimpleNamespace(name=f"{name} rank 0")])
        self._slowness_s = slowness_s
        self.held: dict[str, Any] = {}

    async def open_transport(self, specs: Sequence[TransportSpec]) -> None:
        self._receiver = await asyncio.to_thread(receiver_of, *specs)

    async def begin_update(self, _version: int) -> None:
        self.held.clear()

    async def load_bucket(self, handle: BucketHandle) -> None:
        bucket = await asyncio.to_thread(self._receiver.receive, handle)
        await asyncio.sleep(self._slowness_s)
        self.held |= {record.name: raw(tensor) for record, tensor in unpack(bucket)}
        self._receiver.release()

    async def finish_update(self, _version: int, digest: str) -> None:
        assert digest == "digest"


@pytest.mark.parametrize("mode", list(SyncMode), ids=str)
async def test_a_slow_reader_gets_every_bit(mode: SyncMode, tmp_path: Path) -> None:
    source, quick, slow = Source(), Reader("inference", 0.0), Reader("rollout", 0.01)
    sync = WeightSync(source, [slow], cluster(mode), tmp_path, Tracer("driver"), [quick])  # type: ignore[arg-type]
    await sync.open()
    for source.version in (1, 2):
        report = await sync.send(source.version)
        sent = {name: raw(tensor) for bucket in some_tensors(source.version) for name, tensor in bucket}
        assert quick.held == slow.held == sent
        assert report.sent_bytes >= sum(len(data) for _, _, data in sent.values())
    assert [report.version for report in sync.reports] == [1, 2]
    assert not list(tmp_path.rglob("bucket*"))
    sync.close()
    assert not (tmp_path / "weights").exists()


def handle(number: int, nbytes: int = 100) -> BucketHandle:
    return BucketHandle(number, (), nbytes, None)


@dataclass
class Actor:
    """A worker group that hands out `buckets` handles and writes down what happens."""

    events: list[str]
    name: str = "actor"
    buckets: int = 3
    ranks: list[Any] = field(default_factory=lambda: [SimpleNamespace(name="actor rank 0")])
    left: int = 0
    specs: list[TransportSpec] = field(default_factory=list)

    async def free_address(self, _timeout_s: float) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def call(self, method: str, *args: Any) -> list[Any]:
        if method == "open_export":
            self.specs.append(args[0])
            return [2.0, None]
        if method == "begin_export":
            self.left = self.buckets
        if method == "end_export":
            self.events.append(f"end, {args[0]} taken")
            return ["digest", "of others"]
        if method != "next_handle":
            return [None, None]
        number = self.buckets - self.left + 1
        self.events.append(f"gather {number}, {args[0]} taken")
        await asyncio.sleep(0.01)
        self.left -= 1
        return [handle(number) if self.left >= 0 else None, None]


@dataclass
class Receivers:
    """A group that takes a little longer than the actor."""

    name: str
    events: list[str]
    living: tuple[int, ...] = (0, 1)
    opened: list[Sequence[TransportSpec]] = field(default_factory=list)
    failure: Exception | None = None
    may_finish: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.workers: Any = SimpleNamespace(
            name=self.name, ranks=[SimpleNamespace(name=f"{self.name} rank {rank}") for rank in range(2)]
        )
        self.may_finish.set()

    async def open_transport(self, specs: Sequence[TransportSpec]) -> None:
        self.opened.append(specs)

    async def begin_update(self, version: int) -> None:
        self.events.append(f"{self.name} begins {version}")

    async def load_bucket(self, handle: BucketHandle) -> None:
        await asyncio.sleep(0.02)
        self.events.append(f"{self.name} has {handle.number}")

    async def finish_update(self, version: int, digest: str) -> None:
        await self.may_finish.wait()
        if self.failure:
            raise self.failure
        self.events.append(f"{self.name} uses {version} {digest}")


@pytest.fixture
def events() -> list[str]:
    return []


def make(events: list[str], tmp_path: Path, timeout_s: float = 120.0) -> tuple[WeightSync, Actor, Receivers, Receivers]:
    actor, rollout, inference = Actor(events), Receivers("rollout", events), Receivers("inference", events)
    settings = cluster(SyncMode.broadcast, timeout_s)

    async def onload(*names: str) -> None:
        events.append(f"need {' '.join(names)}")

    def activated(version: int) -> None:
        events.append(f"all have {version}")

    sync = WeightSync(actor, [rollout], settings, tmp_path, Tracer("driver"), [inference], onload, activated)  # type: ignore[arg-type]
    return sync, actor, rollout, inference


async def test_the_next_bucket_is_gathered_while_the_last_is_read_and_no_earlier(
    events: list[str], tmp_path: Path
) -> None:
    sync, *_ = make(events, tmp_path)
    await sync.open()
    await sync.push(7)
    assert [event for event in events if "inference" not in event] == [
        "rollout begins 7",
        "gather 1, 0 taken",
        "gather 2, 0 taken",
        "rollout has 1",
        "gather 3, 1 taken",
        "rollout has 2",
        "gather 4, 2 taken",
        "rollout has 3",
        "end, 3 taken",
    ]


async def test_a_transfer_waits_for_the_switch_before_it(events: list[str], tmp_path: Path) -> None:
    sync, _, rollout, _ = make(events, tmp_path)
    rollout.may_finish.clear()
    await sync.push(1)
    switching = asyncio.create_task(sync.activate(1))
    following = asyncio.create_task(sync.push(2))
    for _ in range(20):
        await asyncio.sleep(0)
    assert "inference begins 2" not in events
    rollout.may_finish.set()
    await following
    assert switching.done()
    assert events.index("rollout uses 1 digest") < events.index("rollout begins 2")
    await sync.activate(2)
    assert [report.version for report in sync.reports] == [1, 2]


async def test_a_switch_that_fails_or_does_not_end_stops_the_next_transfer(events: list[str], tmp_path: Path) -> None:
    sync, _, rollout, _ = make(events, tmp_path, timeout_s=0.1)
    await sync.push(1)
    with pytest.raises(RunError, match="version 1"):
        await sync.push(2)
    rollout.failure = RunError("engine 0 refused version 1")
    with pytest.raises(RunError, match="engine 0"):
        await sync.activate(1)
    with pytest.raises(RunError, match="version 1"):
        await sync.push(2)


async def test_every_living_process_has_its_place_and_a_death_opens_anew(events: list[str], tmp_path: Path) -> None:
    sync, actor, rollout, inference = make(events, tmp_path)
    await sync.open()
    names = ("actor rank 0", "inference rank 0", "inference rank 1", "rollout rank 0", "rollout rank 1")
    assert actor.specs[0].members == names
    assert [(one.rank, one.name) for one in inference.opened[0]] == [(1, names[1]), (2, names[2])]
    assert [(one.rank, one.name) for one in rollout.opened[0]] == [(3, names[3]), (4, names[4])]
    await sync.send(1)
    assert len(actor.specs) == 1
    rollout.living = (1,)
    await sync.send(2)
    assert [(one.rank, one.name) for one in rollout.opened[1]] == [(3, "rollout rank 1")]
    assert actor.specs[1].members == (*names[:3], "rollout rank 1")
    assert events.count("gather 1, 0 taken") == 2, "a new transport counts from the start"


class Workers:
    """The inference group's processes: each call takes its time."""

    def __init__(self, events: list[str]) -> None:
        self.ranks = [SimpleNamespace(name="inference rank 0")]
        self.events = events
        self.failing: set[str] = set()

    async def call(self, method: str, *_args: Any) -> list[Any]:
        self.events.append(f"> {method}")
        await asyncio.sleep(0.01)
        self.events.append(f"< {method}")
        if method in self.failing:
            raise RunError(method)
        return [None]

    async def call_each(self, method: str, arguments: list[tuple]) -> list[Any]:
        await self.call(method)
        return [[None] * len(batches) for (batches,) in arguments]


@pytest.fixture
def inference(events: list[str], monkeypatch: pytest.MonkeyPatch) -> InferenceGroup:
    monkeypatch.setattr("rlsys.orchestrator.worker_groups.share", lambda value: value)
    sharder = BatchSharder(ParallelConfig(), 1, 16, pad_id=0, packed=True)
    workers: Any = Workers(events)
    return InferenceGroup(workers, sharder, Tracer("inference"))


async def test_nothing_is_computed_from_the_beginning_of_an_update_to_its_end(
    inference: InferenceGroup, events: list[str]
) -> None:
    async def update() -> None:
        await inference.begin_update(1)
        await inference.load_bucket(handle(1))
        await asyncio.sleep(0.03)
        await inference.finish_update(1, "digest")

    first = asyncio.create_task(inference.compute([]))
    await asyncio.sleep(0)
    await asyncio.gather(update(), inference.compute([]), first)
    steps = ["compute", "begin_update", "load_bucket", "finish_update", "compute"]
    assert events == [f"{edge} {step}" for step in steps for edge in "><"]


@pytest.mark.parametrize("where", ["begin_update", "finish_update"])
async def test_an_update_that_fails_leaves_nobody_waiting(
    inference: InferenceGroup, where: str, events: list[str]
) -> None:
    workers: Any = inference.workers
    workers.failing = {where}

    async def update() -> None:
        await inference.begin_update(1)
        await inference.finish_update(1, "digest")

    with pytest.raises(RunError, match=where):
        await update()
    await asyncio.wait_for(inference.compute([]), 60)
    assert events[-1] == "< compute"


async def test_groups_come_onto_their_devices_before_they_are_asked(events: list[str], tmp_path: Path) -> None:
    sync, *_ = make(events, tmp_path)
    await sync.open()
    await sync.send(3)
    needs = [index for index, event in enumerate(events) if event.startswith("need")]
    assert [events[index] for index in needs] == ["need actor inference", "need rollout"]
    assert needs[0] == 0
    assert events.index("inference uses 3 digest") < needs[1] < events.index("rollout uses 3 digest")
    assert events[-1] == "all have 3"
    with pytest.raises(RunError, match="3"):
        await sync.activate(3)
