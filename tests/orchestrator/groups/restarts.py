"""Engines that are started again, in virtual time: their config and supervisor, and a simulation of deaths."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from rlsys.apps.planner.virtual_time import now
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.schema import ClusterConfig, Device, RolloutConfig, RunConfig, SglangConfig, SyncMode
from rlsys.observe.faults import FaultLog, Restarts
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.engine_pool import EnginePool
from rlsys.orchestrator.membership import NoEngineLeft, NoneSetAside
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost
from rlsys.orchestrator.supervisor import Supervisor
from rlsys.orchestrator.weight_sync import WeightSync
from tests.orchestrator.groups.engines import CALL_TIMEOUT_S, SAMPLES, TIMEOUT_S, make
from tests.orchestrator.groups.simulated_sync import BUCKETS, Simulation
from tests.support.trajectories import question

STALL_S = 60.0


def config_of(restarts: int) -> RunConfig:
    return RunConfig(
        rollout=RolloutConfig(
            max_episodes=8, episode_timeout_s=TIMEOUT_S, engine=SglangConfig(stall_timeout_s=STALL_S)
        ),
        algorithm=AlgorithmConfig(n_samples=SAMPLES),
        cluster=ClusterConfig(
            device=Device.cpu,
            sync_mode=SyncMode.broadcast,
            call_timeout_s=CALL_TIMEOUT_S,
            restarts=restarts,
            restart_window_s=1e9,
        ),
    )


def supervisor_of(pool: EnginePool, sync: Any, start: Any, faults: FaultLog, config: RunConfig) -> Supervisor:
    return Supervisor(pool, sync, start, faults, config, Restarts(config.cluster, now), {}, clock=now)


class Copy:
    """A weight sync that has pushed `version`, which every newcomer takes at once."""

    version = 5

    async def catch_up(self, newcomer: Any) -> int:
        await newcomer.begin_update(self.version)
        await newcomer.finish_update(self.version, "digest")
        return self.version


class World(Simulation):
    """A simulation in which engines die at any moment, and the actor's weights change between two pushes."""

    def __init__(self, seed: int, tmp_path: Path) -> None:
        super().__init__(seed)
        self.restarts = self.random.choice([0, 1, 3, 20])
        self.log = tmp_path / f"faults-{seed}"
        self.pool, _ = make(self)
        config = config_of(self.restarts)
        self.sync = WeightSync(
            self.actor,  # type: ignore[arg-type]
            [self.pool],
            config.cluster,
            tmp_path,
            Tracer("driver"),
            activated=self.publish,
        )
        self.supervisor = supervisor_of(self.pool, self.sync, self.restart, FaultLog(self.log), config)
        self.given: dict[int, str] = {}
        """Version -> digest with which it was pushed."""

    def publish(self, version: int) -> None:
        self.published = version

    def _finish_update(self, worker: Any, call: Any, method: str, args: tuple[Any, ...]) -> None:
        version, digest = args
        if digest != self.given.get(version, self.weights) or self.staged[worker.number] != sorted(
            set(self.staged[worker.number])
        ):
            self.breaches.append(f"engine {worker.number} got {digest} as version {version}")
        if len(self.staged[worker.number]) != BUCKETS:
            self.breaches.append(f"engine {worker.number} got a part of version {version}")
        super()._finish_update(worker, call, method, args)

    async def hurt(self) -> None:
        for _ in range(self.random.randint(0, 2 * len(self.ranks))):
            await asyncio.sleep(self.random.choice([0, self.random.uniform(0, 20)]))
            if alive := [worker for worker in self.ranks if worker.alive]:
                self.end(self.random.choice(alive))

    async def ask(self, number: int) -> str:
        await asyncio.sleep(self.random.uniform(0, 60))
        try:
            await self.pool.run_group(question(number), number)
        except (GroupLost, NoEngineLeft) as end:
            return type(end).__name__
        return "whole"

    async def evaluate(self) -> str:
        await asyncio.sleep(self.random.uniform(0, 60))
        try:
            async with self.pool.reserve(self.random.randint(1, 3)) as reserved:
                for number in range(3):
                    answer = await reserved.answer(question(1000 + number))
                    assert int(answer.versions[1]) == (-1 if reserved.version is None else reserved.version)
        except (GroupLost, NoneSetAside, NoEngineLeft) as end:
            return type(end).__name__
        return "evaluated"

    async def train(self, seen: Counter[str]) -> None:
        for version in range(1, 5):
            self.weights = self.given[version] = f"weights {version}"
            await self.sync.send(version)
            members = self.pool.engines.members
            assert {one.version for one in members.living if members.takes(one, aside=False)} <= {version}
            if self.random.random() < 0.5:  # A step's first update; the push of the next version ends the step.
                self.weights = f"within step {version}"
            seen["joined"] += len(self.former)
            await asyncio.sleep(self.random.uniform(0, 20))
