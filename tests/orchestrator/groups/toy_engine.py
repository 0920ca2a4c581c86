"""An engine's worker without an engine, for a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.orchestrator.pipeline.build import trajectory


class ToyEngine:
    """Holds every group until it is told to `hurry`; `number` tells the engines apart."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.groups: dict[str, asyncio.Task[None]] = {}
        self.begun: dict[str, tuple[EpisodeProgress, ...]] = {}
        self.aborted: list[str] = []

    async def start(self) -> None:
        """Nothing takes long here."""
        self.gate = asyncio.Event()

    async def run_group(
        self, question: Question, n_samples: int, key: str, begun: Sequence[EpisodeProgress]
    ) -> list[Trajectory]:
        """Trajectories whose only token is the engine's number."""
        self.begun[key] = tuple(begun)
        self.groups[key] = asyncio.ensure_future(self._wait())
        try:
            await self.groups[key]
        finally:
            del self.groups[key]
        return [trajectory([self.number], uid=question.uid, sample=sample) for sample in range(n_samples)]

    async def abort_group(self, key: str) -> None:
        """End one group."""
        self.groups[key].cancel()
        self.aborted.append(key)

    def in_flight(self, keys: Sequence[str]) -> dict[str, tuple[EpisodeProgress, ...]]:
        """What each group was given."""
        return {key: self.begun[key] for key in keys if key in self.groups}

    def hurry(self) -> int:
        """Let every group end; the process."""
        self.gate.set()
        return os.getpid()

    def metrics(self) -> dict[str, float]:
        """What goes on."""
        return {"groups": len(self.groups), "aborted": len(self.aborted), "pid": os.getpid()}

    async def _wait(self) -> None:
        print(f"engine {self.number} begins a group", file=sys.stderr, flush=True)
        await self.gate.wait()
