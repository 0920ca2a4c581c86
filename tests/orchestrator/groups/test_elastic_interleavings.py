"""Test of engines that join, leave and die in seeded runs, with the real pool, sync and supervisor in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.errors import RunError, UserError
from rlsys.orchestrator import elastic, weight_sync
from rlsys.orchestrator.elastic import Elastic
from rlsys.orchestrator.membership import NoEngineLeft, Standing
from tests.orchestrator.groups.elasticity import Devices, ask_at_once
from tests.orchestrator.groups.restarts import World, config_of
from tests.support.jsonl import read_rows


class Changing(World):
    """A simulation in which engines join and leave, also several at once; with an even seed none dies."""

    def __init__(self, seed: int, tmp_path: Path) -> None:
        super().__init__(seed, tmp_path)
        self.dies = seed % 2 == 1
        inbox: Any = None
        devices: Any = Devices(len(self.ranks), 2)
        parts = (devices, inbox, self.supervisor._faults, config_of(self.restarts))
        self.elastic = Elastic(self.pool, self.supervisor, *parts, clock=now)

    async def hurt(self) -> None:
        if self.dies:
            await super().hurt()

    async def change(self) -> list[str]:
        return await asyncio.gather(*(self._change() for _ in range(self.random.randint(1, 6))))

    async def _change(self) -> str:
        await asyncio.sleep(self.random.uniform(0, 80))
        try:
            if self.random.random() < 0.5:
                await self.elastic.join(None)
                return "joined"
            limit_s = self.random.choice([None, 0.0, self.random.uniform(0, 20)])
            await self.elastic.leave(None, limit_s)
        except UserError as refusal:
            return refusal.code
        except RunError:
            return "failed"
        return "left"


def test_every_group_ends_once_and_whole_while_engines_join_and_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine serves a mix of versions or an old one, and without deaths nothing is lost."""
    monkeypatch.setattr(elastic, "answer", ask_at_once)
    seen: Counter[str] = Counter()

    async def one(seed: int) -> None:
        (folder := tmp_path / str(seed)).mkdir()
        world = Changing(seed, folder)
        monkeypatch.setattr(weight_sync, "Meeting", world.meeting)
        watching = asyncio.ensure_future(world.supervisor.run(1.0))
        asked = [asyncio.ensure_future(world.ask(number)) for number in range(8)]
        others = [asyncio.ensure_future(one) for one in (world.evaluate(), world.hurt(), world.change())]
        try:
            await world.train(Counter())
            for version in (5, 6):  # The first ends the waiting of engines that joined within a step.
                world.weights = world.given[version] = f"weights {version}"
                await world.sync.send(version)
                await asyncio.sleep(100)
            members = world.pool.engines.members
            assert {(one.standing, one.version) for one in members.of_engine.values()} == {(Standing.serving, 6)}
            seen["whole run"] += 1
        except NoEngineLeft:
            assert world.dies
            seen["end"] += 1
            for task in (watching, *asked, *others):  # The run ends, also while an engine waits for a push.
                task.cancel()
            await asyncio.wait([watching, *asked, *others])
            await world.settle()
            assert world.breaches == []
            return
        ends, (evaluated, _, changes) = await asyncio.gather(*asked), await asyncio.gather(*others)
        if not world.dies:
            assert {*ends, evaluated} == {"whole", "evaluated"}
            assert "failed" not in changes
            assert {row["event"] for row in read_rows(world.log)} <= {"joined", "left"}
        assert Counter(row["event"] for row in read_rows(world.log))["joined"] == changes.count("joined")
        seen.update(changes)
        watching.cancel()
        await asyncio.wait({watching})
        await world.settle()
        assert world.breaches == []
        killed = [worker for worker in [*world.former, *world.ranks] if worker.killed]
        assert len(killed) >= changes.count("left")

    for seed in range(40):
        run_virtually(one(seed))
    assert min(seen[outcome] for outcome in ("whole run", "joined", "left", "conflict")) > 10, seen
