"""All machines of a run, waited for, and an agent on each."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.cluster.asking import answer
from rlsys.cluster.launch.agent import NodeAgent
from rlsys.cluster.launch.gathering import Gathering
from rlsys.cluster.launch.ray_node import RayNode
from rlsys.cluster.launch.task import Say
from rlsys.cluster.machines import Machine, lost, machines, resident
from rlsys.cluster.role import Role
from rlsys.cluster.worker_group import Rank, RankDied, RankSilent, SyncHost, WorkerGroup
from rlsys.errors import RunError, UserError

LOOK_S = 0.5
"""Between two looks for machines that are not there yet."""
START_S = 120.0
"""For an agent to start."""
_SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""A search server takes no device of the run's, so Ray would hide them all from it."""


@dataclass(slots=True)
class Crew:
    """All machines, and the launcher's hand on each."""

    machines: Sequence[Machine]
    agents: WorkerGroup
    gathering: Gathering

    def hosts(self) -> list[tuple[int, str]]:
        """Ranks and host names."""
        return [(rank_of(machine, number), machine.host) for number, machine in enumerate(self.machines)]

    def name(self, position: int) -> str:
        """A machine as messages call it."""
        return _name(self.machines[position], position)

    async def lost(self) -> list[int]:
        """Positions of the machines that the cluster has given up. Raises RunError if it does not answer."""
        gone = {machine.node_id for machine in await answer(lambda: lost(self.machines))}
        return [number for number, machine in enumerate(self.machines) if machine.node_id in gone]

    def require(self, *gone: int) -> None:
        """Raise RunError, naming them, if there are machines that are lost."""
        if names := [self.name(position) for position in gone]:
            one = len(names) == 1
            raise RunError(
                f"{' and '.join(names)} {'is' if one else 'are'} lost: {'it does' if one else 'they do'} not answer any "
                f"more, so the run has been ended. Look at {'its' if one else 'their'} power, network and memory; the logs "
                "of all machines are in the run's folder, under logs/nodes. resume=auto goes on from its last checkpoint."
            )

    async def call(self, position: int, method: str, *args: Any, timeout_s: float) -> Any:
        """Have an agent do something. Raises RunError naming the machine if it is lost."""
        try:
            return await self.agents.call_rank(position, method, *args, timeout_s=timeout_s)
        except (RankDied, RankSilent):
            self.require(position)

    async def dismiss(self, status: int, sentence: str, timeout_s: float) -> None:
        """Tell all machines how the run ended, as far as they can be told."""

        async def tell(position: int) -> None:
            with suppress(RunError):
                await self.agents.call_rank(position, "close", status, sentence, timeout_s=timeout_s)

        await asyncio.gather(*map(tell, range(len(self.machines))))


async def assemble(
    role: Role, address: str, wait_s: float, until: float, node: RayNode | None, say: Say
) -> list[Machine]:
    """All machines of the run, once they are there.

    Raises RunError at `until`, on the monotonic clock, naming the missing, and where `node`, Ray on this machine, has
    ended; UserError if two have one rank.
    """
    known: set[str] = set()
    while True:
        if node is not None:
            node.require_alive()
        found = await answer(machines)
        for number, machine in enumerate(found):
            if machine.node_id not in known:
                known.add(machine.node_id)
                say(f"{_name(machine, number)} has come")
        _require_distinct(found)
        # Those that came without a rank take the places that are left.
        there = {rank_of(machine, number) for number, machine in enumerate(found)}
        missing = [rank for rank in range(role.nodes) if rank not in there]
        if not missing:
            return found
        if time.monotonic() > until:
            raise RunError(
                f"{' and '.join(map(role.describe, missing))} did not come to {address} within {wait_s:.0f} s "
                f"({len(found)} of {role.nodes} machines are there): start `rlsys launch` on every machine, look at "
                "what it says there, and give more time with --wait."
            )
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def crew_of(found: Sequence[Machine]) -> AsyncIterator[Crew]:
    """Agents on all machines, ended on the way out."""
    with tempfile.TemporaryDirectory(prefix="rlsys-logs-", ignore_cleanup_errors=True) as folder:
        ranks = [rank_of(machine, number) for number, machine in enumerate(found)]
        handles = [resident(SyncHost, machine, Path(os.devnull), _SEES_ALL_GPUS) for machine in found]
        group = [
            Rank(number, _name(machine, number), handle, Path(folder) / str(rank) / "node" / "search.log")
            for number, (machine, handle, rank) in enumerate(zip(found, handles, ranks, strict=True))
        ]
        agents = WorkerGroup("node", group, START_S)
        try:
            await agents.build(NodeAgent, [()] * len(group), START_S)
            yield Crew(found, agents, Gathering(agents, ranks, Path(folder)))
        finally:
            agents.kill()


def rank_of(machine: Machine, position: int) -> int:
    """The machine's rank, which is its place where it came without one."""
    return position if machine.rank is None else machine.rank


def _name(machine: Machine, position: int) -> str:
    return f"node {rank_of(machine, position)} ({machine.host}, {machine.address})"


def _require_distinct(found: Sequence[Machine]) -> None:
    by_rank: dict[int, Machine] = {}
    for machine in found:
        if machine.rank is not None and machine.rank in by_rank:
            raise UserError(
                f"--rank {machine.rank} was given on {by_rank[machine.rank]} and on {machine}: give every machine its own."
            )
        if machine.rank is not None:
            by_rank[machine.rank] = machine
