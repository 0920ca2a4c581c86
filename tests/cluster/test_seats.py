"""Tests of the devices of processes that join later or lose their machine, mostly on a real Ray of several nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rlsys.cluster.local_ray import RANK, local_ray, rays_own
from rlsys.cluster.planning.placement import DeviceSlot
from rlsys.cluster.runtime import answer, ray_runtime
from rlsys.cluster.seats import Seats
from rlsys.cluster.worker_group import RankDied, WorkerGroup
from rlsys.config.schema import ClusterConfig, Device
from tests.cluster.toy import Toy
from tests.support.waiting import HANG_S

LIMIT_S = 300
SLOTS = [DeviceSlot(bundle, (0,), 1.0, pinned=False) for bundle in (0, 1)]
STORE_BYTES = 80 * 1024**2


class Nodes:
    """A Ray of several nodes on this machine, each with one CPU."""

    def __init__(self, ranked: bool) -> None:
        self._ranked, self._started = ranked, 0
        self.cluster = Cluster(initialize_head=True, head_node_args=self._settings() | {"include_dashboard": False})

    def _settings(self) -> dict[str, Any]:
        rank = {f"{RANK}{self._started}": 1} if self._ranked else {}
        self._started += 1
        return {"num_cpus": 1, "object_store_memory": STORE_BYTES, "resources": rank}

    def add(self) -> Any:
        return self.cluster.add_node(**self._settings())


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Ray whose machines have ranks, so that bundles are tied to them, or not."""
    with local_ray(ray.shutdown) as folder:
        rays_own(folder).mkdir()
        monkeypatch.setenv("RAY_TMPDIR", str(rays_own(folder)))
        found = Nodes(request.param)
        yield found
        ray.shutdown()
        found.cluster.shutdown()


async def ray_says(holds: Callable[[], bool]) -> None:
    """Wait until a question to Ray is answered with True."""
    async with asyncio.timeout(HANG_S):
        while not await answer(holds, LIMIT_S):
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_processes_of_a_lost_node_and_further_ones_start_where_devices_appear(
    nodes: Nodes, tmp_path: Path
) -> None:
    second = nodes.add()
    tied = nodes._ranked
    cluster = ClusterConfig(
        device=Device.cpu,
        threads=1,
        address=nodes.cluster.address,
        nodes=2 if tied else 1,
        start_timeout_s=LIMIT_S,
        call_timeout_s=LIMIT_S,
    )
    with ray_runtime(cluster, [1, 1], [0, 1] if tied else None) as bundles:
        group = WorkerGroup.launch("toy", bundles, SLOTS, cluster, tmp_path)
        seats = group.seats
        try:
            await group.build(Toy, [(rank,) for rank in range(2)], LIMIT_S)
            await ray_says(lambda: seats.find(0) and seats.find(1))
            assert [seats.of(number)[0] for number in (0, 1)] == [bundles] * 2

            assert not await answer(lambda: seats.find(2)), "all devices are taken"
            seats.release(2)
            on_second = 1 if tied else await _number_on(group, second)
            nodes.cluster.remove_node(second)
            await ray_says(lambda: not seats.find(on_second))
            assert await answer(seats.stranded) == ([on_second] if tied else [])
            with pytest.raises(RankDied):
                await group.call_rank(on_second, "add", 1)
            assert seats.find(1 - on_second)
            group.kill_rank(on_second)

            nodes.add()
            await ray_says(lambda: seats.find(on_second))
            assert (seats.of(on_second)[0] is bundles) is not tied, "a bundle that is tied to a lost node stays lost"
            group.restart(on_second)
            await group.build(Toy, [(7,)], LIMIT_S, on_second)
            assert await group.call_rank(on_second, "add", 3) == (7, [3])

            assert not await answer(lambda: seats.find(2))
            nodes.add()
            await ray_says(lambda: seats.find(2))
            group.restart(2)
            await group.build(Toy, [(8,)], LIMIT_S, 2)
            assert await group.call_rank(2, "add", 4) == (8, [4])
            assert ray.available_resources().get("CPU", 0) == 0
            group.kill_rank(2)
            seats.release(2)
            await ray_says(lambda: ray.available_resources().get("CPU", 0) == 1)
        finally:
            group.kill()
            seats.release_all()


def test_ray_is_read_once_and_a_process_keeps_its_devices_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundle 7 is on a node that is dead, bundle 8 on none; the bundle that process 7 gets instead has a node."""
    asked: Counter[str] = Counter()
    removed: list[Any] = []
    node = {"NodeID": "a", "NodeManagerHostname": "a", "NodeManagerAddress": "10.0.0.1", "Resources": {}, "Alive": True}
    b_lives = False
    nodes_of: dict[Any, dict[int, str]] = {"run": dict.fromkeys(range(448), "a") | {7: "b", 8: ""}}

    def nodes() -> list[dict[str, Any]]:
        asked["nodes"] += 1
        return [node, node | {"NodeID": "b", "Alive": b_lives}]

    def table(bundles: Any) -> dict[str, Any]:
        asked[bundles] += 1
        return {"bundles_to_node_id": nodes_of[bundles]}

    def reserve(shape: list[dict[str, float]], **_: Any) -> str:
        assert shape == [{"CPU": 1.0}]
        nodes_of[f"own {len(nodes_of)}"] = {0: "a"} if len(nodes_of) == 1 else {}
        return f"own {len(nodes_of) - 1}"

    monkeypatch.setattr("rlsys.cluster.runtime.ray", SimpleNamespace(nodes=nodes))
    monkeypatch.setattr("rlsys.cluster.runtime.placement_group_table", table)
    monkeypatch.setattr("rlsys.cluster.seats.placement_group", reserve)
    monkeypatch.setattr("rlsys.cluster.seats.remove_placement_group", removed.append)
    bundles: Any = "run"
    slots = [DeviceSlot(bundle, (0,), 1.0, pinned=False) for bundle in range(448)]
    seats = Seats(bundles, slots, ClusterConfig(device=Device.cpu, address="10.0.0.1:6379", nodes=2))
    assert [number for number, found in seats.find_all(range(448)).items() if not found] == [7, 8]
    assert [number for number, found in seats.find_all(range(448)).items() if not found] == [8]
    assert asked == {"nodes": 2, "run": 2, "own 1": 1, "own 2": 1}
    assert seats.stranded() == [7, 8]
    assert asked == {"nodes": 3, "run": 3, "own 1": 1, "own 2": 1}

    b_lives = True
    assert seats.find(7)
    assert (seats.of(7)[0], removed) == ("own 1", []), "Ray would kill the process that runs there"
    nodes_of["own 1"] = {}
    assert seats.find(7)
    assert (seats.of(7)[0], removed) == (bundles, ["own 1"])


async def _number_on(group: WorkerGroup, node: Any) -> int:
    homes = [await group.call_rank(number, "node") for number in range(2)]
    return homes.index(node.node_id)
