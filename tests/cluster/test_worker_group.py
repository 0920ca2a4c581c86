"""Real Ray: order, time-outs and deaths, each named; nothing left behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from rlsys.cluster.runtime import ray_runtime
from rlsys.cluster.worker_group import WorkerGroup
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
    with pytest.raises(RunError, match=r"toy rank 1 to finish sleep"):
        await group.call("sleep", 2.0, timeout_s=0.3)
    await asyncio.sleep(2.0)
    children = await group.call("spawn")
    started = time.monotonic()
    with pytest.raises(
        RunError, match="toy rank 1 failed to finish raise_on: ValueError: the tensor is upside"
    ):
        await group.call("raise_on", 1)
    with pytest.raises(RunError, match=r"(?s)toy rank 1 died.*about to fall over"):
        await group.call("die_on", 1)
    assert time.monotonic() - started < 20, "a failure must not wait for the ranks that hang"
    return children


def test_group_calls_failures_and_clean_end(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    children: list[int] = []

    async def scenario() -> None:
        with ray_runtime(CLUSTER, [1, 1]) as bundles:
            group = WorkerGroup.launch("toy", bundles, [0, 1], CLUSTER, tmp_path)
            await group.build(Toy, [(0,), (1,)], timeout_s=60)
            host, port = await group.free_address(10)
            assert host
            assert 0 < port < 65536
            await _check_calls(group)
            children.extend(await _check_failures(group))

    asyncio.run(scenario())
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert not [pid for pid in children if psutil.pid_exists(pid)], "orphans of a dead worker are ended too"
    assert not [c.name() for c in left if c.status() != psutil.STATUS_ZOMBIE]


def test_too_few_devices_is_a_sentence() -> None:
    cluster = ClusterConfig(device=Device.gpu, start_timeout_s=2)
    with pytest.raises(RunError, match="did not give 2 gpu slots within 2 s"), ray_runtime(cluster, [2]):
        pass


def test_no_cluster_at_the_address_is_a_sentence() -> None:
    cluster = ClusterConfig(device=Device.cpu, address="127.0.0.1:1")
    with pytest.raises(UserError, match=r"cluster.address=127.0.0.1:1"), ray_runtime(cluster, [1]):
        pass
