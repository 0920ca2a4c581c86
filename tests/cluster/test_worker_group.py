"""Real Ray: order, time-outs and deaths, each named; nothing left behind."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group

from rlsys.cluster.planning.placement import DeviceSlot, plan_bundles
from rlsys.cluster.runtime import ray_runtime
from rlsys.cluster.worker_group import RankDied, RankSilent, WorkerGroup
from rlsys.config.schema import ClusterConfig, Device
from rlsys.errors import RunError, UserError
from tests.cluster.toy import Toy

CLUSTER = ClusterConfig(device=Device.cpu, threads=1, start_timeout_s=60, call_timeout_s=60)


async def _check_calls(group: WorkerGroup) -> None:
    await group.call("add", 1)
    pending = [group.call("add", value) for value in range(2, 6)]
    last = (await asyncio.gather(*pending))[-1]
    assert last == [(0, [1, 2, 3, 4, 5]), (1, [1, 2, 3, 4, 5])]
    assert await group.call_each("add", [(10,), (20,)]) == [
        (0, [1, 2, 3, 4, 5, 10]),
        (1, [1, 2, 3, 4, 5, 20]),
    ]


async def _check_failures(group: WorkerGroup) -> list[int]:
    with pytest.raises(RankSilent, match=r"toy rank 1 to finish sleep") as late:
        await group.call("sleep", 2.0, timeout_s=0.3)
    assert late.value.rank == 1
    await asyncio.sleep(2.0)
    children = await group.call("spawn")
    started = time.monotonic()
    with pytest.raises(
        RunError, match="toy rank 1 failed to finish raise_on: ValueError: the tensor is upside"
    ) as raised:
        await group.call("raise_on", 1)
    assert not isinstance(raised.value, RankDied)
    with pytest.raises(
        RankDied, match=r"(?s)toy rank 1 died before it could finish die_on\..*about to fall over"
    ) as died:
        await group.call("die_on", 1)
    assert died.value.rank == 1
    assert time.monotonic() - started < 28, "a failure must not wait for the ranks that hang"
    return children


async def _check_sharing(bundles: PlacementGroup, log_dir: Path) -> None:
    """Three groups on the one slot of the last bundle start, and work at the same time."""
    plan = plan_bundles({name: [(2,)] for name in ("first", "second", "third")})
    groups = [
        WorkerGroup.launch(name, bundles, [replace(seat, bundle=2)], CLUSTER, log_dir)
        for name, (seat,) in plan.slots.items()
    ]
    await asyncio.gather(*(group.build(Toy, [(0,)], timeout_s=60) for group in groups))
    assert await asyncio.gather(*(group.call("add", 7) for group in groups)) == [[(0, [7])]] * 3
    waiting = asyncio.ensure_future(groups[0].call("raise_on", 1))
    await asyncio.sleep(0)
    groups[0].kill_rank(0)
    with pytest.raises(RankDied, match="first rank 0 died"):
        await waiting
    assert await groups[1].call("add", 8) == [(0, [7, 8])]
    whole = WorkerGroup.launch("whole", bundles, [DeviceSlot(2, (0,), 1.0, pinned=False)], CLUSTER, log_dir)
    with pytest.raises(RankSilent, match="waited 1 s for whole rank 0 to start"):
        await whole.build(Toy, [(0,)], timeout_s=1)


async def _check_bereaved(bundles: PlacementGroup, seats: list[DeviceSlot], log_dir: Path) -> None:
    """Of a death that makes others fail first, it is the death that is told."""
    pair = WorkerGroup.launch("pair", bundles, seats, CLUSTER, log_dir)
    await pair.build(Toy, [(0,), (1,)], timeout_s=60)
    with pytest.raises(RankDied, match="pair rank 1 died before it could finish lose"):
        await pair.call("lose", 1)


def test_group_calls_failures_and_clean_end(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    children: list[int] = []

    async def scenario() -> None:
        with ray_runtime(CLUSTER, [1, 1, 1]) as bundles:
            seats = [DeviceSlot(bundle, (0,), 1.0, pinned=False) for bundle in (0, 1)]
            group = WorkerGroup.launch("toy", bundles, seats, CLUSTER, tmp_path)
            await group.build(Toy, [(0,), (1,)], timeout_s=60)
            host, port = await group.free_address(10)
            assert host
            assert 0 < port < 65536
            await _check_calls(group)
            children.extend(await _check_failures(group))
            group.kill()
            await _check_bereaved(bundles, seats, tmp_path)
            await _check_sharing(bundles, tmp_path)

    asyncio.run(scenario())
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert not [pid for pid in children if psutil.pid_exists(pid)], "orphans of a dead worker are ended too"
    assert not [c.name() for c in left if c.status() != psutil.STATUS_ZOMBIE]


def test_processes_that_share_several_gpus_have_the_ones_they_hold(tmp_path: Path) -> None:
    """Ray counts four GPUs that are not there; what it would tell CUDA is what counts."""
    cluster = ClusterConfig(device=Device.gpu, threads=1, start_timeout_s=60, call_timeout_s=60)
    holdings = {"engine": [(1, 2)], "actor": [(0,), (1,), (2,)], "inference": [(0,), (2,), (1,)]}
    plan = plan_bundles(holdings)
    assert plan.sizes == (1, 2)

    async def scenario() -> dict[str, list[str]]:
        bundles = placement_group([{"GPU": size} for size in plan.sizes])
        assert bundles.wait(60)
        groups = {
            name: WorkerGroup.launch(name, bundles, seats, cluster, tmp_path) for name, seats in plan.slots.items()
        }
        for name, group in groups.items():
            await group.build(Toy, [(rank,) for rank in range(len(holdings[name]))], timeout_s=60)
        return {name: await group.call("visible_gpus") for name, group in groups.items()}

    ray.init(address="local", num_cpus=1, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        seen = asyncio.run(scenario())
    finally:
        ray.shutdown()
    zero, one, two = seen["actor"]
    assert len({zero, one, two}) == 3, "three processes of a group, three GPUs"
    assert seen["engine"] == [f"{one},{two}"]
    assert seen["inference"] == [zero, two, one]


def test_too_few_devices_is_a_sentence() -> None:
    cluster = ClusterConfig(device=Device.gpu, start_timeout_s=2)
    with pytest.raises(RunError, match="did not give 2 gpu slots within 2 s"), ray_runtime(cluster, [2]):
        pass


def test_no_cluster_at_the_address_is_a_sentence() -> None:
    cluster = ClusterConfig(device=Device.cpu, address="127.0.0.1:1")
    with pytest.raises(UserError, match=r"cluster.address=127.0.0.1:1"), ray_runtime(cluster, [1]):
        pass
