"""Tests of worker groups on a real Ray: order of calls, named failures and deaths, shared devices, no orphans."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlsys.cluster import runtime, worker_group
from rlsys.cluster.planning.placement import DeviceSlot, plan_bundles
from rlsys.cluster.preflight.machine import cluster_at
from rlsys.cluster.runtime import ray_runtime
from rlsys.cluster.stacks import STACKS, StackWriter, call_of, stacks_here
from rlsys.cluster.worker_group import RankDied, RankSilent, WorkerGroup
from rlsys.config.schema import ClusterConfig, Device, Dtype, RolloutConfig, SearchConfig, SglangConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.errors import RunError
from rlsys.rollout.agent.episode import EngineDied
from rlsys.rollout.worker import RolloutWorker
from tests.cluster.toy import Toy
from tests.support.ports import free_port
from tests.support.processes import is_gone, words_of
from tests.support.refusals import refused
from tests.support.runs import LIMIT_S
from tests.support.tiny_models import POLICY

CLUSTER = ClusterConfig(device=Device.cpu, threads=1, start_timeout_s=300, call_timeout_s=300)
SEATS = [DeviceSlot(bundle, (0,), 1.0, pinned=False) for bundle in (0, 1)]
orphans: list[int] = []
"""Ids of processes that workers have started and that a test must end."""


@pytest.fixture(scope="module")
def bundles() -> Iterator[PlacementGroup]:
    """Return three bundles of one CPU each, in a Ray configured with four GPUs that do not exist."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.ray, "init", partial(ray.init, num_gpus=4))
        quick = {"kill_worker_timeout_milliseconds": 200}  # Ray waits so long for a process to end before it kills it.
        patch.setattr(runtime, "NEAR_CHECKS", runtime.NEAR_CHECKS | quick)
        with ray_runtime(CLUSTER, [1, 1, 1]) as made:
            yield made
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not list(filter(None, map(words_of, left)))
    assert not [pid for pid in orphans if not is_gone(pid)], "orphans of a dead worker are left"


@asynccontextmanager
async def group_of(bundles: PlacementGroup, seats: list[DeviceSlot], log_dir: Path) -> AsyncIterator[WorkerGroup]:
    group = WorkerGroup.launch("toy", bundles, seats, CLUSTER, log_dir)
    try:
        await group.build(Toy, [(rank,) for rank in range(len(seats))], timeout_s=300)
        yield group
    finally:
        group.kill()


async def test_calls_run_in_order_on_every_rank(bundles: PlacementGroup, tmp_path: Path) -> None:
    async with group_of(bundles, SEATS, tmp_path) as group:
        host, port = await group.free_address(300)
        assert host
        assert 0 < port < 65536
        last = (await asyncio.gather(*(group.call("add", value) for value in range(5))))[-1]
        assert last == [(rank, [0, 1, 2, 3, 4]) for rank in (0, 1)]
        assert await group.call_each("add", [(10,), (20,)]) == [(0, [0, 1, 2, 3, 4, 10]), (1, [0, 1, 2, 3, 4, 20])]
        assert await group.call("niceness") == [os.nice(0)] * 2, "workers have the priority of the driver"


async def test_failure_silence_and_death_are_distinguished_and_name_the_rank(
    bundles: PlacementGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is raised although the other ranks never answer."""
    async with group_of(bundles, SEATS, tmp_path) as group:
        with refused("out_of_range", "some.key"):
            await group.call("refuse")
        with pytest.raises(RankSilent, match="toy rank 1") as late:
            await group.call_rank(1, "wait_for", tmp_path / "go", timeout_s=0.1)
        assert late.value.rank == 1
        (tmp_path / "go").touch()
        orphans.extend(await group.call("spawn"))
        with monkeypatch.context() as patch:
            patch.setattr(worker_group, "DEATH_S", 0.1)
            with pytest.raises(RunError, match=r"toy rank 1 .*the tensor is upside down") as raised:
                await group.call("raise_on", 1)
        assert not isinstance(raised.value, RankDied)
        with pytest.raises(RankDied, match=r"(?s)toy rank 1 .*about to fall over") as died:
            await group.call("die_on", 1)
        assert died.value.rank == 1


async def test_disk_error_of_a_worker_is_one_sentence_with_rank_file_and_code(
    bundles: PlacementGroup, tmp_path: Path
) -> None:
    async with group_of(bundles, SEATS[:1], tmp_path) as group:

        async def failure(method: str, *error: Exception) -> RunError:
            with pytest.raises(RunError, match="toy rank 0") as raised:
                await group.call(method, *error)
            return raised.value

        full = await failure("write_to_full_disk")
        assert full.code == "no_room"
        assert str(tmp_path / "toy-0.log") in str(full), "the failed write itself names no file"
        quota = await failure("fail", OSError(errno.EDQUOT, "Disk quota exceeded", "/a/file"))
        assert quota.code == "no_room"
        assert "/a/file" in str(quota)
        assert "Errno" not in f"{full}{quota}"
        assert (await failure("fail", PermissionError(errno.EACCES, "Permission denied", "/a/file"))).code == "denied"
        own = await failure("fail", RunError("toy rank 0 has no room.", code="no_room"))
        assert (str(own), own.code) == ("toy rank 0 has no room.", "no_room")
        assert (await failure("fail", ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))).code is None


def unable(why: str) -> None:
    os.write(2, why.encode())
    raise RunError("its scheduler has died.")


async def test_worker_that_cannot_start_shows_its_log(bundles: PlacementGroup, tmp_path: Path) -> None:
    group = WorkerGroup.launch("toy", bundles, SEATS[:1], CLUSTER, tmp_path)
    try:
        with pytest.raises(RunError, match=r"(?s)its scheduler has died\..* no such model"):
            await group.build(unable, [("there is no such model\n",)], 300)
    finally:
        group.kill()


def test_full_disk_of_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise ray.exceptions.OutOfDiskError("Local disk is full")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(RunError, match="TMPDIR") as raised:
        worker_group.share(1)
    assert raised.value.code == "no_room"


async def test_rank_that_waits_for_a_stopped_peer_is_located_in_its_collective(
    bundles: PlacementGroup, tmp_path: Path
) -> None:
    group = WorkerGroup.launch("toy", bundles, SEATS, CLUSTER, tmp_path / "logs", stacks=StackWriter(tmp_path))
    try:
        await group.build(Toy, [(0,), (1,)], timeout_s=300)
        await group.call("meet", ("127.0.0.1", free_port()), 2)
        waiting = asyncio.ensure_future(group.call("reduce"))
        while not await _in_place(tmp_path / "logs"):
            await asyncio.sleep(0)
        group._timeout_s = 0.1  # Calls to a rank run in order, so that this call waits for the collective.
        with pytest.raises(RankSilent) as silent:
            await group.call("add", 1)
        sentence = str(silent.value).partition("\n")[0]
        assert "toy rank 0 is in all_reduce, called by reduce (" in sentence
        (folder,) = (tmp_path / STACKS).iterdir()
        assert str(folder) in sentence
        assert {"driver", "toy-0", "toy-1"} <= {file.stem for file in folder.iterdir()}
        assert "it is stopped" in (folder / "toy-1.txt").read_text()
        assert group.finished == 2 - 1, "only `meet` has finished"
    finally:
        group.kill()
    with pytest.raises(RankDied):
        await waiting


async def _in_place(logs: Path) -> bool:
    """Return True once rank 0 is in its collective and rank 1 is stopped."""
    found = await asyncio.to_thread(stacks_here, str(logs))
    return "all_reduce" in (call_of(found["toy-0"]) or "") and "it is stopped" in found["toy-1"]


async def _call_until_it_fails(group: WorkerGroup) -> None:
    while True:  # Calls may still arrive before Ray has ended the process.
        await group.call_rank(1, "add", 2)


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_rank_that_was_killed_starts_again_on_its_devices(
    stopped: bool, bundles: PlacementGroup, tmp_path: Path
) -> None:
    """A bundle has one CPU, so the process starts only once the former, which may be stopped, has freed it."""
    async with group_of(bundles, SEATS, tmp_path) as group:
        await group.call("add", 1)
        other, former = group.ranks
        if stopped:
            os.kill(await group.call_rank(1, "pid"), signal.SIGSTOP)
        group.kill_rank(1)
        with pytest.raises(RankDied):
            await _call_until_it_fails(group)
        group.restart(1)
        await group.build(Toy, [(7,)], 300, 1)
        assert group.ranks[0] is other
        assert group.ranks[1] is not former
        assert (group.ranks[1].name, group.ranks[1].log) == (former.name, former.log)
        assert await group.call("add", 3) == [(0, [1, 3]), (7, [3])]


async def test_further_rank_joins_a_group_on_a_ray_of_its_own_without_a_bundle(
    bundles: PlacementGroup, tmp_path: Path
) -> None:
    async with group_of(bundles, SEATS, tmp_path) as group:
        assert group.seats.find(2)
        group.restart(2)
        await group.build(Toy, [(7,)], 300, 2)
        assert await group.call("add", 3) == [(0, [3]), (1, [3]), (7, [3])]
        before = group.memory_bytes()
        held = await group.call_rank(2, "hold", 100 * 2**20)
        assert held + before / 2 < group.memory_bytes() < held + 2 * before


async def test_restarted_group_has_new_processes_with_new_workers(bundles: PlacementGroup, tmp_path: Path) -> None:
    async with group_of(bundles, SEATS, tmp_path) as group:
        await group.call("add", 1)
        with pytest.raises(RankDied) as died:
            await group.call("die_on", 1)
        assert died.value.name == "toy rank 1"
        group.restart()
        await group.build(Toy, [(rank,) for rank in range(2)], timeout_s=300)
        assert await group.call("add", 2) == [(0, [2]), (1, [2])]


@pytest.mark.parametrize("known", [False, True])
async def test_death_is_reported_although_it_made_other_ranks_fail_first(
    known: bool, bundles: PlacementGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed, until_death = tmp_path / "noticed", worker_group._until_death

    async def notice(waits: set[asyncio.Future]) -> tuple[set[asyncio.Future], set[asyncio.Future]]:
        noticed.touch()
        return await until_death(waits)

    monkeypatch.setattr(worker_group, "DEATH_S", 300.0)
    monkeypatch.setattr(worker_group, "_until_death", notice)
    async with group_of(bundles, SEATS, tmp_path) as group:
        with pytest.raises(RankDied) as died:
            await group.call("lose", 1, noticed, known)
        assert died.value.rank == 1


async def test_groups_on_one_slot_die_independently(bundles: PlacementGroup, tmp_path: Path) -> None:
    plan = plan_bundles({name: [(2,)] for name in ("first", "second", "third")})
    groups = [
        WorkerGroup.launch(name, bundles, [replace(seat, bundle=2)], CLUSTER, tmp_path)
        for name, (seat,) in plan.slots.items()
    ]
    await asyncio.gather(*(group.build(Toy, [(0,)], timeout_s=300) for group in groups))
    assert await asyncio.gather(*(group.call("add", 7) for group in groups)) == [[(0, [7])]] * 3
    waiting = asyncio.ensure_future(groups[0].call("raise_on", 1))
    await asyncio.sleep(0)
    groups[0].kill_rank(0)
    with pytest.raises(RankDied, match="first rank 0"):
        await waiting
    assert await groups[1].call("add", 8) == [(0, [7, 8])]
    for group in groups:
        group.kill()


@pytest.mark.usefixtures("bundles")
async def test_workers_on_gpus_see_their_own_and_the_same_nccl_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")  # The user's own choice applies to all workers.
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    cluster = replace(CLUSTER, device=Device.gpu)
    holdings = {"engine": [(0, 1)], "inference": [(1,), (0,)]}
    plan = plan_bundles(holdings)
    assert plan.sizes == (2,)
    of_gpus = placement_group([{"GPU": size} for size in plan.sizes])
    assert of_gpus.wait(300)
    groups = {name: WorkerGroup.launch(name, of_gpus, seats, cluster, tmp_path) for name, seats in plan.slots.items()}
    seen, nccl = {}, []
    for name, group in groups.items():
        await group.build(Toy, [(rank,) for rank in range(len(holdings[name]))], timeout_s=300)
        seen[name] = await group.call("visible_gpus")
        nccl += await group.call("nccl_settings")
    for group in groups.values():
        group.kill()
    remove_placement_group(of_gpus)
    one, zero = seen["inference"]
    assert zero != one
    assert seen["engine"] == [f"{zero},{one}"]
    # A broadcast between an engine and a trainer on one machine fails if their NCCL settings differ.
    assert nccl == [worker_group.NCCL_SETTINGS | {"NCCL_NVLS_ENABLE": "1"}] * 3


@pytest.mark.parametrize(
    ("device", "threads", "expected"),
    [(Device.gpu, None, "8"), (Device.gpu, 3, "3"), (Device.cpu, None, None), (Device.cpu, 1, "1")],
)
def test_only_workers_on_gpus_have_several_threads_by_default_and_compile(
    device: Device, threads: int | None, expected: str | None
) -> None:
    """Ray would give a worker on a GPU one thread, because it reserves no CPU; torch.compile needs a C++ compiler on a
    CPU."""
    environment = worker_group._environment(ClusterConfig(device=device, threads=threads), None)
    assert environment.get("OMP_NUM_THREADS") == expected
    assert (environment.get("TORCHDYNAMO_DISABLE") == "1") == (device is Device.cpu)


@pytest.mark.usefixtures("bundles")
def test_cluster_with_too_few_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_local", lambda *_: nullcontext())
    monkeypatch.setattr(runtime, "DEVICES_POLL_S", 0.1)
    cluster = ClusterConfig(device=Device.gpu, start_timeout_s=0.1)
    with pytest.raises(RunError, match=r"5 gpu .*it has 4"), ray_runtime(cluster, [5]):
        pass


@pytest.mark.usefixtures("bundles")
def test_cluster_is_seen_from_outside() -> None:
    address = ray.get_runtime_context().gcs_address
    seen = cluster_at(address, 300)
    (node,) = seen.nodes
    assert node.address == address.rpartition(":")[0]
    assert node.resources["CPU"] == 3
    assert seen.free.get("CPU", 0) == 0, "the bundles hold all"


@pytest.mark.slow
@pytest.mark.engine
async def test_killed_engine_of_a_living_worker_is_named(bundles: PlacementGroup, tmp_path: Path) -> None:
    """SGLang only sends a signal when its process dies, and Python does not receive the signal in a Ray worker."""
    engine = SglangConfig(dtype=Dtype.float32, kv_cache_tokens=4096, start_timeout_s=LIMIT_S)
    task = TaskConfig(train_path="", eval_path="", max_total_tokens=1024)
    arguments = (str(POLICY), RolloutConfig(engine=engine), task, SearchConfig(enabled=False), Device.cpu, 7)
    group = WorkerGroup.launch("rollout", bundles, SEATS[:1], CLUSTER, tmp_path, concurrency=8)
    await group.build(RolloutWorker, [arguments], timeout_s=LIMIT_S)
    everyone = psutil.Process().children(recursive=True)
    (scheduler,) = [process for process in everyone if " ".join(words_of(process)).startswith("sglang::sched")]
    scheduler.kill()
    with pytest.raises(EngineDied, match=str(scheduler.pid)):
        await group.call("run_group", Question(uid="q", prompt="Who?", answers=("a",)), 1)
    group.kill()
