"""Test that the driver's memory does not grow with the number of steps."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rlsys.apps.planner.virtual_time import run_virtually
from rlsys.config.schema import ClusterConfig, Device, RunConfig, TrackingConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Group, Sample, Scores, Trajectory
from rlsys.observe.status import Progress
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost, LostReason
from rlsys.orchestrator.pipeline.scheduler import DropReason, StalenessScheduler
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn
from rlsys.orchestrator.run_logger import RunLogger
from rlsys.orchestrator.weight_sync import WeightSync
from tests.support.instant_workers import InstantWorkers
from tests.support.trajectories import rewarded

WARM, STEPS = 1_000, 5_000
LOGGED = 10
"""Steps between two rows of metrics, which cost more than all the rest."""
GROWTH = 200
"""Most blocks of memory that may be added after `WARM` steps: fewer than one for every second row."""


class Workers(InstantWorkers):
    """Workers that lose every tenth group, and reward every seventh without spread."""

    capacity = 8
    asked = 0

    async def run_group(self, asked: Question, *_: Any) -> list[Trajectory]:
        self.asked += 1
        await asyncio.sleep(0)
        if self.asked % 10 == 0:
            raise GroupLost(asked.uid, LostReason.timeout, "")
        return await super().run_group(asked)

    async def reward(self, asked: Question, trajectories: Sequence[Trajectory]) -> Group:
        samples = [replace(one, sample=number) for one in trajectories for number in (0, 1)]
        return Group(asked, tuple(rewarded(one, float(one.sample and self.asked % 7 > 0)) for one in samples))

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        await asyncio.sleep(0)
        return await super().compute(samples)


async def actor(method: str, *_: Any, **_limits: Any) -> list[Any]:
    """Answer a call of the weight sync: there is nothing to send."""
    return [{"open_export": 1.0, "end_export": "digest"}.get(method)]


@pytest.mark.slow
def test_memory_is_flat_over_thousands_of_steps(tmp_path: Path) -> None:
    """The driver's loop with the real scheduler, pipeline, learner's loop, weight sync and records."""
    workers = Workers()
    scheduler = StalenessScheduler(groups_per_step=2, max_staleness=1, oversample=1.5, max_replaced=1)
    pipeline = workers.pipeline(scheduler)
    blocks: dict[int, int] = {}

    async def train(record: RunLogger) -> None:
        sender: Any = SimpleNamespace(name="actor", driver_host="", ranks=[SimpleNamespace(name="actor")], call=actor)
        sync = WeightSync(sender, [], ClusterConfig(device=Device.cpu), tmp_path, record.tracers["driver"])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            for step in range(1, STEPS + 1):
                record.begin_step()
                with record.tracers["actor"].span("train.apply", step=step):
                    groups, updates = await learn(pipeline, {"actor": workers}, workers, MiniBatches([1, 1]))
                workers.version = step
                await sync.send(step)
                pipeline.publish(step)
                if step % LOGGED == 0:
                    record.step(step, groups, updates, sync.figures())
                record.prompts(step, scheduler.ended())
                if step in (WARM, STEPS):
                    gc.collect()
                    blocks[step] = sys.getallocatedblocks()
            pipeline.stop()

    with Path(os.devnull).open("w") as nowhere, Progress(Console(file=nowhere)) as progress:
        config = RunConfig(tracking=TrackingConfig(tensorboard=False, wandb=False))
        record = RunLogger(config, tmp_path, progress)
        run_virtually(train(record), most_turns=10**7)
        record.close()
    assert {DropReason.lost, DropReason.no_spread, DropReason.end} <= scheduler.dropped.keys()
    assert blocks[STEPS] - blocks[WARM] < GROWTH, blocks
