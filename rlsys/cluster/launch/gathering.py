"""Logs of all machines, brought together in one folder of the launch while they are written: `<folder>/<rank>/...`.

A log is copied as it grows, so that of a machine that is lost all is there but its last seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rlsys.cluster.launch.agent import MOST_BYTES, Piece
from rlsys.cluster.worker_group import RankDied, RankSilent, WorkerGroup
from rlsys.errors import RunError


class Gathering:
    """Copies what agents have of logs."""

    def __init__(self, agents: WorkerGroup, ranks: Sequence[int], folder: Path) -> None:
        """`ranks` are the machines' of `agents`."""
        self._agents = agents
        self._ranks = tuple(ranks)
        self._folder = folder
        self._read: list[dict[str, int]] = [{} for _ in ranks]

    def move_to(self, parent: Path) -> None:
        """Keep everything in a new folder of `parent` from now on: a run that is resumed has many launches there."""
        folder = _new_folder(parent)
        for part in self._folder.glob("*"):
            shutil.move(part, folder / part.name)
        self._folder = folder

    async def gather(self, timeout_s: float) -> list[int]:
        """Copy what is new, until nothing is. Positions of the agents that did not answer in time."""
        silent = await asyncio.gather(*(self._all_of(agent, timeout_s) for agent in range(len(self._ranks))))
        return [agent for agent, one in enumerate(silent) if one]

    async def _all_of(self, agent: int, timeout_s: float) -> bool:
        """Whether the agent was silent."""
        more = True
        while more:
            try:
                pieces = await self._agents.call_rank(agent, "read", self._read[agent], timeout_s=timeout_s)
            except (RankSilent, RankDied):
                return True
            except RunError:
                return False  # It answers: its machine is there.
            for piece in pieces:
                self._keep(agent, piece)
            # A log that is written all the time would otherwise keep us here.
            more = sum(len(piece.data) for piece in pieces) >= MOST_BYTES
        return False

    def _keep(self, agent: int, piece: Piece) -> None:
        file = self._folder / str(self._ranks[agent]) / piece.name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as log:
            log.write(piece.data)
        self._read[agent][piece.name] = piece.start + len(piece.data)


def _new_folder(parent: Path) -> Path:
    """Named by the time."""
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    for name in itertools.chain([now], (f"{now}_{number}" for number in itertools.count(2))):
        try:
            (parent / name).mkdir(parents=True)
        except FileExistsError:
            continue
        return parent / name
    raise AssertionError("the numbers have no end")
