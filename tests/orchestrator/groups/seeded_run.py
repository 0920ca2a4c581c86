"""A seeded run of the engine pool that mixes deaths, silence, cancellations, updates and evaluations."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from math import ceil
from typing import Any

from rlsys.apps.planner.virtual_time import now
from rlsys.orchestrator.engine_pool import (
    ABORT_TIMEOUT_S,
    MARGIN_S,
    PING_TIMEOUT_S,
    ReservedEngines,
)
from rlsys.orchestrator.membership import NoEngineLeft, NoneSetAside
from rlsys.orchestrator.pipeline.rollout_pipeline import GroupLost, LostReason
from tests.orchestrator.groups.engines import NEVER, SAMPLES, TIMEOUT_S, Engines, make
from tests.support.trajectories import question


class SeededRun:
    """A seeded run of questions and evaluations, during which engines die, hang, are cancelled or are updated."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = self.random.randint(1, 4)
        self.slots = self.random.choice([2, 4, 8, 12])
        self.stuck = {f"q:{number}" for number in range(30) if self.random.random() < 0.05}
        self.continues = seed % 2 == 1
        self.engines = Engines(self.count, self._seconds, continues=self.continues)
        self.group, self.tracer = make(self.engines, self.slots)
        self.outcomes: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.evaluations: Counter[str] = Counter()

    def _seconds(self, method: str, args: tuple[Any, ...]) -> float:
        if method == "answer" and self.random.random() < 0.03:
            return NEVER
        if method in ("run_group", "answer"):
            return NEVER if args[0].uid in self.stuck else self.random.choice([0, 5, self.random.uniform(0, 500)])
        return self.random.choice([0, 1, self.random.uniform(0, 20)])

    async def _ask(self, number: int) -> None:
        await asyncio.sleep(self.random.choice([0, self.random.uniform(0, 3000)]))
        asking = asyncio.ensure_future(self.group.run_group(question(number), number))
        if self.random.random() < 0.15:
            await asyncio.wait({asking}, timeout=self.random.choice([0, self.random.uniform(0, 600)]))
            asking.cancel()
        cancelled_at = now()
        try:
            found = await asking
            assert [t.question_uid for t in found] == [f"q:{number}"] * SAMPLES
            outcome = "whole"
        except asyncio.CancelledError:
            outcome = "cancelled"
            assert now() <= cancelled_at + ABORT_TIMEOUT_S
        except GroupLost as loss:
            outcome = loss.reason.value
            self._check_loss(f"q:{number}", outcome)
        except NoEngineLeft:
            outcome = "end"
        self.outcomes[outcome] += 1
        starts = self.engines.starts[f"q:{number}"]
        assert len(starts) == len({engine for engine, _ in starts}) <= 2, "never the same engine twice"

    def _check_loss(self, uid: str, outcome: str) -> None:
        ran_on = [self.engines.ranks[engine] for engine, _ in self.engines.starts[uid]]
        if outcome == "engine_died":
            assert not any(worker.alive for worker in ran_on)
        else:
            assert uid in self.stuck
            assert uid not in [key.partition("~")[0] for key in ran_on[-1].running], "its episodes have ended"

    async def _evaluate(self, number: int) -> None:
        """Run an evaluation; one in five is cancelled."""
        await asyncio.sleep(self.random.uniform(0, 3000))
        evaluating = asyncio.ensure_future(self._ask_aside(number))
        if self.random.random() < 0.2:
            await asyncio.wait({evaluating}, timeout=self.random.uniform(0, 1000))
            evaluating.cancel()
        try:
            await evaluating
            self.evaluations["done"] += 1
        except asyncio.CancelledError:
            self.evaluations["cancelled"] += 1
        except (GroupLost, NoneSetAside, NoEngineLeft) as end:
            self.evaluations[type(end).__name__] += 1

    async def _ask_aside(self, number: int) -> None:
        async with self.group.reserve(self.random.randint(1, 4)) as reserved:
            aside = self.group.engines.members.aside
            assert self.count == 1 or len(self.group.living) == 1 or set(self.group.living) - aside
            asking = [
                asyncio.ensure_future(self._answer(reserved, 1000 * number + question_number))
                for question_number in range(self.random.randint(0, 12))
            ]
            try:
                await asyncio.gather(*asking)
            finally:
                for one in asking:
                    one.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
            asked = [one for n in range(12) for one in self.engines.answered_by[f"q:{1000 * number + n}"]]
            assert {engine for engine, _ in asked} <= aside, "only engines that are set aside answer"

    async def _answer(self, reserved: ReservedEngines, number: int) -> None:
        try:
            answer = await reserved.answer(question(number))
        except GroupLost as loss:
            self.answers[loss.reason.value] += 1
            raise
        assert answer.question_uid == f"q:{number}"
        assert int(answer.versions[1]) == (-1 if reserved.version is None else reserved.version)
        assert f"q:{number}" not in self._split(), "no evaluation has answers of two versions"

    def _split(self) -> set[str]:
        return {key.partition("~")[0] for key in self.engines.split}

    async def _hurt(self) -> None:
        for worker in self.random.sample(self.engines.ranks, self.count):
            await asyncio.sleep(self.random.uniform(0, self.random.choice([100, 2000])))
            event = self.random.random()
            if event < 0.4:
                worker.end()
            elif event < 0.6:
                worker.silent, worker.unreachable = True, self.random.random() < 0.5

    async def _update(self) -> None:
        try:
            for version in range(1, 4):
                await asyncio.sleep(self.random.uniform(0, 1000))
                await self.group.begin_update(version)
                await self.group.load_bucket(version)
                await self.group.finish_update(version, "")
                self.engines.published = version
        except NoEngineLeft:
            assert not any(worker.alive for worker in self.engines.ranks)

    async def run(self) -> None:
        """Run everything, then check that all slots of the remaining engines are free again."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(30):
                tasks.create_task(self._ask(number))
            for number in range(1, 4):
                tasks.create_task(self._evaluate(number))
            tasks.create_task(self._hurt())
            tasks.create_task(self._update())
        assert sum(self.outcomes.values()) == 30
        tries = self.tracer.drain()
        longest_s = TIMEOUT_S * ceil(SAMPLES / self.slots) + MARGIN_S + PING_TIMEOUT_S + ABORT_TIMEOUT_S
        assert max((span.end_ns - span.start_ns) / 1e9 for span in tries) <= longest_s
        assert self.engines.breaches == []
        fits = max(self.slots, SAMPLES)
        assert max(worker.most_episodes for worker in self.engines.ranks) <= fits
        assert not self.outcomes["end"] or not any(worker.alive for worker in self.engines.ranks)
        answering = [worker for worker in self.engines.ranks if worker.alive and not worker.silent]
        assert not any(worker.running for worker in answering), "episodes whose caller is gone still run"
        if answering:
            figures = await self.group.metrics()
            assert figures["rollout/requeued_groups"] == sum("attempt" in span.args for span in tries)
            lost = sum(counts[kind] for counts in (self.outcomes, self.answers) for kind in LostReason)
            assert figures["rollout/lost_groups"] == lost
            await self._refill()

    async def _refill(self) -> None:
        """Check that as many groups as the engines have room for begin at once."""
        begun, capacity = now(), self.group.capacity
        self.stuck.clear()
        asked = [asyncio.ensure_future(self.group.run_group(question(100 + n), 100 + n)) for n in range(capacity)]
        await asyncio.sleep(0)
        await asyncio.gather(*asked)
        firsts = [self.engines.starts[f"q:{100 + number}"][0][1] for number in range(capacity)]
        assert firsts == [begun] * capacity
