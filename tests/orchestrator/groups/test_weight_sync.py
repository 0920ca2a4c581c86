"""Tests of weight sync: push and switch, one bucket packed ahead of the receivers, and no scoring during an update."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.cluster.worker_group import RankDied, RankSilent
from rlsys.config.schema import ClusterConfig, Device, ParallelConfig, SyncMode
from rlsys.errors import PeerLost, RunError
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.weight_sync import WeightSync
from rlsys.orchestrator.worker_groups import InferenceGroup
from rlsys.trainer.batches import BatchSharder
from rlsys.weights.transport import BucketHandle, TransportSpec
from tests.support.waiting import let_tasks_run


def handle(number: int) -> BucketHandle:
    return BucketHandle(number, (), 100, None)


@dataclass
class Actor:
    """A sender that hands out handles of `buckets` buckets and logs its calls."""

    events: list[str]
    name: str = "actor"
    buckets: int = 3
    ranks: list[Any] = field(default_factory=lambda: [SimpleNamespace(name="actor rank 0")])
    left: int = 0
    specs: list[TransportSpec] = field(default_factory=list)
    death: RankDied | RankSilent | None = None

    driver_host = "127.0.0.1"

    async def require_alive(self, _timeout_s: float | None = None) -> None:
        if self.death:
            raise self.death

    async def call(self, method: str, *args: Any, **_limits: Any) -> list[Any]:
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
        await let_tasks_run(5)
        self.left -= 1
        return [handle(number) if self.left >= 0 else None, None]


@dataclass
class Receivers:
    """A receiving worker group that needs longer for a bucket than the sender, and logs its calls."""

    name: str
    events: list[str]
    living: dict[int, None] = field(default_factory=lambda: {0: None, 1: None})
    opened: list[Mapping[int, TransportSpec]] = field(default_factory=list)
    failure: Exception | None = None
    loses_peer_at: int = 0
    """Number of the bucket that does not arrive."""
    may_finish: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.workers: Any = SimpleNamespace(
            name=self.name, ranks=[SimpleNamespace(name=f"{self.name} rank {rank}") for rank in range(2)]
        )
        self.may_finish.set()

    async def open_transport(self, specs: Mapping[int, TransportSpec]) -> None:
        self.opened.append(specs)

    async def begin_update(self, version: int) -> None:
        self.events.append(f"{self.name} begins {version}")

    async def load_bucket(self, handle: BucketHandle) -> None:
        await let_tasks_run()
        if handle.number == self.loses_peer_at:
            raise PeerLost("the sender is gone")
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
    settings = ClusterConfig(device=Device.cpu, sync_mode=SyncMode.broadcast, call_timeout_s=timeout_s)

    async def onload(*names: str) -> None:
        events.append(f"need {' '.join(names)}")

    def activated(version: int) -> None:
        events.append(f"all have {version}")

    sync = WeightSync(actor, [rollout], settings, tmp_path, Tracer("driver"), [inference], onload, activated)  # type: ignore[arg-type]
    return sync, actor, rollout, inference


async def test_next_bucket_is_gathered_while_the_last_is_received_and_no_earlier(
    events: list[str], tmp_path: Path
) -> None:
    sync, *_ = make(events, tmp_path)
    assert (await sync.push(7)).sent_bytes == 300
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


async def test_sender_that_dies_while_its_last_bucket_is_received_is_named(events: list[str], tmp_path: Path) -> None:
    """It has answered all calls by then, so only the receivers notice."""
    sync, actor, rollout, _ = make(events, tmp_path)
    actor.death, rollout.loses_peer_at = RankDied("it died", 0, "actor rank 0"), actor.buckets
    with pytest.raises(RankDied) as caught:
        await sync.push(1)
    assert caught.value is actor.death, "the run goes back to its last checkpoint"


@pytest.mark.parametrize("alone", [False, True])
async def test_a_silent_sender_is_blamed_unless_it_may_be_busy_with_a_step(
    alone: bool, events: list[str], tmp_path: Path
) -> None:
    """As in a catch-up, which does not wait for the stages of a step."""
    sync, actor, rollout, _ = make(events, tmp_path)
    await sync.send(1)
    actor.death, rollout.loses_peer_at = RankSilent("it is late", 0, "actor rank 0"), actor.buckets
    with pytest.raises(PeerLost if alone else RankSilent):
        await (sync.catch_up(rollout) if alone else sync.push(2))


async def test_transfer_waits_for_the_previous_switch(events: list[str], tmp_path: Path) -> None:
    sync, _, rollout, _ = make(events, tmp_path)
    rollout.may_finish.clear()
    await sync.push(1)
    switching = asyncio.create_task(sync.activate(1))
    following = asyncio.create_task(sync.push(2))
    await let_tasks_run()
    assert "inference begins 2" not in events
    rollout.may_finish.set()
    await following
    assert switching.done()
    assert events.index("rollout uses 1 digest") < events.index("rollout begins 2")
    await sync.activate(2)
    assert sync.activated == 2
    (tmp_path / "weights").mkdir()
    sync.close()
    assert not (tmp_path / "weights").exists()


async def test_store_of_a_former_transport_is_closed_after_the_next_push(events: list[str], tmp_path: Path) -> None:
    sync, actor, rollout, _ = make(events, tmp_path)
    await sync.send(1)
    del rollout.living[1]
    await sync.send(2)
    former, current = (spec.address for spec in actor.specs)
    assert former is not None
    assert current is not None
    socket.create_connection(current, 600).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(former, 600)


async def test_next_transfer_fails_after_a_switch_that_failed_or_does_not_end(
    events: list[str], tmp_path: Path
) -> None:
    sync, _, rollout, _ = make(events, tmp_path, timeout_s=0.1)
    await sync.push(1)
    with pytest.raises(RunError, match="version 1"):
        await sync.push(2)
    rollout.failure = RunError("engine 0 refused version 1")
    with pytest.raises(RunError, match="engine 0"):
        await sync.activate(1)
    with pytest.raises(RunError, match="version 1"):
        await sync.push(2)


async def test_transport_has_a_rank_per_living_process_and_reopens_after_a_death(
    events: list[str], tmp_path: Path
) -> None:
    sync, actor, rollout, inference = make(events, tmp_path)
    await sync.send(1)
    names = ("actor rank 0", "inference rank 0", "inference rank 1", "rollout rank 0", "rollout rank 1")
    assert actor.specs[0].members == names
    assert [(one.rank, one.name) for one in inference.opened[0].values()] == [(1, names[1]), (2, names[2])]
    assert [(one.rank, one.name) for one in rollout.opened[0].values()] == [(3, names[3]), (4, names[4])]
    await sync.send(2)
    assert len(actor.specs) == 1
    rollout.living = {1: None}
    await sync.send(3)
    assert [(one.rank, one.name) for one in rollout.opened[1].values()] == [(3, "rollout rank 1")]
    assert actor.specs[1].members == (*names[:3], "rollout rank 1")
    assert events.count("gather 1, 0 taken") == 2, "a new transport counts its buckets from the start"


class Workers:
    """Workers of the inference group, which log the begin and the end of each call."""

    def __init__(self, events: list[str]) -> None:
        self.ranks = [SimpleNamespace(name="inference rank 0")]
        self.events = events
        self.failing: set[str] = set()

    async def call(self, method: str, *_args: Any) -> list[Any]:
        self.events.append(f"> {method}")
        await let_tasks_run(5)
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


async def test_scoring_waits_from_the_begin_to_the_end_of_an_update(
    inference: InferenceGroup, events: list[str]
) -> None:
    async def update() -> None:
        await inference.begin_update(1)
        await inference.load_bucket(handle(1))
        await let_tasks_run(20)
        await inference.finish_update(1, "digest")

    first = asyncio.create_task(inference.compute([]))
    await asyncio.sleep(0)
    await asyncio.gather(update(), inference.compute([]), first)
    steps = ["compute", "begin_update", "load_bucket", "finish_update", "compute"]
    assert events == [f"{edge} {step}" for step in steps for edge in "><"]


async def test_update_that_begins_again_ends_as_one_update(inference: InferenceGroup, events: list[str]) -> None:
    await inference.begin_update(1)
    await asyncio.wait_for(inference.begin_update(1), 600)
    scoring = asyncio.create_task(inference.compute([]))
    await inference.finish_update(1, "digest")
    await asyncio.wait_for(scoring, 600)
    assert events == [f"{edge} {step}" for step in [*["begin_update"] * 2, "finish_update", "compute"] for edge in "><"]


@pytest.mark.parametrize("where", ["begin_update", "finish_update"])
async def test_scoring_continues_after_an_update_that_failed(
    inference: InferenceGroup, where: str, events: list[str]
) -> None:
    workers: Any = inference.workers
    workers.failing = {where}

    async def update() -> None:
        await inference.begin_update(1)
        await inference.finish_update(1, "digest")

    with pytest.raises(RunError, match=where):
        await update()
    await asyncio.wait_for(inference.compute([]), 600)
    assert events[-1] == "< compute"


async def test_groups_are_brought_onto_their_devices_before_they_are_called(events: list[str], tmp_path: Path) -> None:
    sync, *_ = make(events, tmp_path)
    await sync.send(3)
    needs = [index for index, event in enumerate(events) if event.startswith("need")]
    assert [events[index] for index in needs] == ["need actor inference", "need rollout"]
    assert needs[0] == 0
    assert events.index("inference uses 3 digest") < needs[1] < events.index("rollout uses 3 digest")
    assert events[-1] == "all have 3"
    with pytest.raises(RunError, match="3"):
        await sync.activate(3)
