"""Real processes: an engine is killed while it generates, and its groups come back from the other."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rlsys.cluster.planning.placement import plan_bundles
from rlsys.cluster.runtime import ray_runtime
from rlsys.cluster.worker_group import WorkerGroup
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.schema import ClusterConfig, Device, RolloutConfig, RunConfig
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.engine_pool import EnginePool, NoEngineLeft
from tests.orchestrator.groups.toy_engine import ToyEngine
from tests.orchestrator.pipeline.build import question, trajectory

CONFIG = RunConfig(
    cluster=ClusterConfig(device=Device.cpu, threads=1, start_timeout_s=60, call_timeout_s=60),
    rollout=RolloutConfig(max_episodes=4, episode_timeout_s=60),
    algorithm=AlgorithmConfig(n_samples=2),
)


async def until_running(group: EnginePool, counts: dict[int, int]) -> dict[str, float]:
    """Wait until each engine has so many groups under way."""
    while True:
        figures = await group.metrics()
        if all(figures[f"engine/{engine}/groups"] == count for engine, count in counts.items()):
            return figures
        await asyncio.sleep(0.05)


async def until_it_fails(group: EnginePool) -> None:
    """A process that is killed may answer a little longer."""
    while True:
        await group.run_group(question(5), 5)


async def scenario(workers: WorkerGroup) -> None:
    group = EnginePool(workers, CONFIG, Tracer("rollout"), [])  # type: ignore[arg-type]
    begun = [(trajectory(uid=f"q:{number}", sample=1),) for number in range(4)]
    cancelled, *asked = [
        asyncio.ensure_future(group.run_group(question(number), number, begun[number])) for number in range(4)
    ]
    figures = await until_running(group, {0: 2, 1: 2})
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (await until_running(group, {0: 1, 1: 2}))["engine/0/aborted"] == 1
    told = await group.in_flight()
    assert {prompt_group: [one.question_uid for one in found] for prompt_group, found in told.items()} == {
        number: [f"q:{number}"] for number in (1, 2, 3)
    }
    os.kill(int(figures["engine/1/pid"]), signal.SIGKILL)
    # One of engine 1's two finds room at once, the other waits in line.
    while (figures := await group.metrics())["rollout/requeued_groups"] < 1:
        await asyncio.sleep(0.05)
    await until_running(group, {0: 2})
    assert (figures["rollout/engines"], group.capacity) == (1, 2)
    await workers.call_rank(0, "hurry")
    found = await asyncio.gather(*asked)
    assert [[(t.question_uid, t.sample) for t in one] for one in found] == [
        [(f"q:{number}", 0), (f"q:{number}", 1)] for number in (1, 2, 3)
    ]
    assert {int(t.tokens[0]) for one in found for t in one} == {0}
    assert (await group.metrics())["rollout/requeued_groups"] == 2
    workers.kill_rank(0)
    with pytest.raises(NoEngineLeft, match=r"(?s)rank 0.*engine 0 begins a group"):
        await until_it_fails(group)


@pytest.mark.slow
def test_a_killed_engines_groups_come_back_from_the_other(tmp_path: Path) -> None:
    plan = plan_bundles({"rollout": [(0,), (1,)]})

    async def run() -> None:
        with ray_runtime(CONFIG.cluster, plan.sizes) as bundles:
            workers = WorkerGroup.launch(
                "rollout", bundles, plan.slots["rollout"], CONFIG.cluster, tmp_path, concurrency=20
            )
            await workers.build(ToyEngine, [(0,), (1,)], timeout_s=60)
            async with asyncio.timeout(60):
                await scenario(workers)

    asyncio.run(run())
