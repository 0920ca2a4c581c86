"""The first machine: it brings the others together, runs what is launched, and ends everything everywhere.

In order: Ray, all machines, the preflight on each, search servers where the config says, then `rlsys train` as a child.
While that goes on, logs are gathered and the machines are watched: the loss of one ends the run with a sentence that
names it. On the way out, whatever the reason, every machine is told how the run ended.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.cluster.launch.agent import GatheredLogs, NodeAgent
from rlsys.cluster.launch.ray_node import RayNode, ray_node, rlsys_command
from rlsys.cluster.launch.role import LaunchTask, Notify, Role, search_settings, serving_positions
from rlsys.cluster.network import address_here, answers, promised_port
from rlsys.cluster.runtime import LOOK_S as MACHINES_LOOK_S
from rlsys.cluster.runtime import RANK, Machine, answer, joined, lost, machines, resident
from rlsys.cluster.worker_group import GATHERED, Rank, RankDied, RankSilent, SyncHost, WorkerGroup
from rlsys.errors import RunError, UserError
from rlsys.search.address import TOKEN_VARIABLE

_LOOPBACK = "127.0.0.1"
LOOK_S = 1.0  # Between two looks at the machines and the run.
START_S = 120.0  # For an agent to start.
GATHER_TIMEOUT_S = 10.0  # For a machine to hand its logs out.
PREFLIGHT_S = 180.0  # For one machine's look at itself.
CALL_TIMEOUT_S = 60.0  # For a machine to do what takes a moment.
_SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""A search server takes no device of the run's, so Ray would hide them all from it."""


async def lead(task: LaunchTask, role: Role, notify: Notify) -> int:
    """Start Ray on this machine, bring the others together, and run `task`; its exit status.

    Raises RunError naming the machines that do not come in time, or are lost.
    """
    only_here = role.nodes == 1 and role.host in ("", "localhost", _LOOPBACK)
    # Raises UserError where rank 0 is another machine.
    outer = "" if only_here else address_here(role.host)
    host = outer if role.nodes > 1 else _LOOPBACK
    if answers(host, role.port, LOOK_S):
        raise UserError(f"--head: port {role.port} of {host} is taken already: end what uses it, or give another.")
    notify(f"node 0 starts Ray at {host}:{role.port}")
    until = time.monotonic() + task.wait_s
    arguments = ["--head", "--port", str(role.port), "--node-ip-address", host]
    arguments += ["--include-dashboard", "false", "--no-monitor"]
    with promised_port() as unused:
        # The port of a server that nobody asks, but which ends Ray where its usual port is taken.
        arguments += ["--ray-client-server-port", str(unused.getsockname()[1])]
        with ray_node(arguments, task.config, f"{RANK}0", alone=role.nodes == 1) as node:
            while not await asyncio.to_thread(answers, host, role.port, LOOK_S):
                node.require_alive()
                if time.monotonic() > until:
                    raise RunError(f"Ray was not ready at {host}:{role.port} in time: give more with --wait.")
                await asyncio.sleep(LOOK_S / 4)
            return await lead_cluster(task, role, f"{host}:{role.port}", notify, until, node)


async def lead_cluster(
    task: LaunchTask, role: Role, address: str, notify: Notify, until: float | None = None, node: RayNode | None = None
) -> int:
    """Run `task` on the Ray cluster at `address` once all machines are there; its exit status.

    Machines must have come when the monotonic clock says `until`, by default `task.wait_s` from now. `node` is the
    Ray that has been started for it here, if any, whose end ends the run.
    """
    until = time.monotonic() + task.wait_s if until is None else until
    with joined(address):
        there = await _assemble(role, address, task.wait_s, until, node, notify)
        async with _crew_of(there, node) as crew:
            return await _run(task, crew, address, notify)


@dataclass(slots=True)
class Crew:
    """All machines, and the launcher's hand on each."""

    machines: Sequence[Machine]
    agents: WorkerGroup
    logs: GatheredLogs
    node: RayNode | None  # Ray on this machine, where the launcher has started it.

    def name(self, position: int) -> str:
        """A machine as messages call it."""
        return _name(self.machines[position], position)

    async def require_all(self) -> None:
        """Raise RunError if Ray on this machine has ended, or a machine is lost."""
        if self.node is not None:
            self.node.require_alive()
        try:
            gone = {machine.node_id for machine in await answer(lambda: lost(self.machines))}
        except RunError:
            if self.node is not None:
                self.node.require_alive()  # Its end explains the silence.
            raise
        self.require(*(number for number, machine in enumerate(self.machines) if machine.node_id in gone))

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


async def _assemble(
    role: Role, address: str, wait_s: float, until: float, node: RayNode | None, notify: Notify
) -> list[Machine]:
    """All machines of the run, once they are there.

    Raises RunError at `until`, on the monotonic clock, naming the missing, and where `node`, Ray on this machine, has
    ended; UserError if two have one rank.
    """
    known: set[str] = set()
    while True:
        if node is not None:
            node.require_alive()
        there = await answer(machines)
        for number, machine in enumerate(there):
            if machine.node_id not in known:
                known.add(machine.node_id)
                notify(f"{_name(machine, number)} has come")
        _require_distinct(there)
        # Those that came without a rank take the places that are left.
        ranks = {_rank_of(machine, number) for number, machine in enumerate(there)}
        missing = [rank for rank in range(role.nodes) if rank not in ranks]
        if not missing:
            return there
        if time.monotonic() > until:
            raise RunError(
                f"{' and '.join(map(role.describe, missing))} did not come to {address} within {wait_s:.0f} s "
                f"({len(there)} of {role.nodes} machines are there): start `rlsys launch` on every machine, look at "
                "what it says there, and give more time with --wait."
            )
        await asyncio.sleep(MACHINES_LOOK_S)


@asynccontextmanager
async def _crew_of(there: Sequence[Machine], node: RayNode | None) -> AsyncIterator[Crew]:
    """Agents on all machines, ended on the way out."""
    with tempfile.TemporaryDirectory(prefix="rlsys-logs-", ignore_cleanup_errors=True) as folder:
        ranks = [_rank_of(machine, number) for number, machine in enumerate(there)]
        group = []
        for number, (machine, rank) in enumerate(zip(there, ranks, strict=True)):
            handle = resident(SyncHost, machine, Path(os.devnull), _SEES_ALL_GPUS)
            log = Path(folder) / str(rank) / "node" / "search.log"
            group.append(Rank(number, _name(machine, number), handle, log))
        agents = WorkerGroup("node", group, START_S)
        try:
            await agents.build(NodeAgent, [()] * len(group), START_S)
            yield Crew(there, agents, GatheredLogs(agents, ranks, Path(folder)), node)
        finally:
            agents.kill()


def _rank_of(machine: Machine, position: int) -> int:
    """The machine's rank, which is its place where it came without one."""
    return position if machine.rank is None else machine.rank


def _name(machine: Machine, position: int) -> str:
    return f"node {_rank_of(machine, position)} ({machine.host}, {machine.address})"


def _require_distinct(there: Sequence[Machine]) -> None:
    by_rank: dict[int, Machine] = {}
    for machine in there:
        if machine.rank is None:
            continue
        other = by_rank.setdefault(machine.rank, machine)
        if other is not machine:
            raise UserError(f"--rank {machine.rank} was given on {other} and on {machine}: give every machine its own.")


async def _run(task: LaunchTask, crew: Crew, address: str, notify: Notify) -> int:
    status, sentence = 1, "the head has broken off"
    try:
        settings = [f"cluster.address={address}"]
        hosts = [(_rank_of(machine, number), machine.host) for number, machine in enumerate(crew.machines)]
        serving = serving_positions(task.config, hosts)
        status = await _preflight(task, crew, settings, notify) if task.preflight else 0
        if status == 0:
            settings += await _searching(task, crew, serving, notify)
            status = await _train(task, crew, settings, notify)
        sentence = "the run has ended" if status == 0 else f"the run has ended with status {status}"
    except asyncio.CancelledError:
        status, sentence = 130, "the run was interrupted"
        raise
    except (UserError, RunError) as error:
        sentence = str(error).partition("\n")[0]
        raise
    finally:
        await crew.logs.gather(GATHER_TIMEOUT_S)
        await crew.dismiss(status, sentence, GATHER_TIMEOUT_S)
    return status


async def _searching(task: LaunchTask, crew: Crew, serving: Sequence[int], notify: Notify) -> list[str]:
    """Overrides that name the search servers, once those of the machines at `serving` answer.

    They ask for the token of the environment, or for a new one.
    """
    config = task.config
    if not serving:
        return []
    place, search = config.cluster.search, config.search
    # The run is a child of this process, and hands the token on to its workers.
    token = os.environ.setdefault(search.token_env or TOKEN_VARIABLE, secrets.token_urlsafe(32))

    async def serve(position: int) -> str:
        host = crew.machines[position].address
        notify(f"{crew.name(position)} serves {search.index} at {host}:{place.port}")
        arguments = (search.index, host, place.port, search.topk, place.device, config.cluster.threads, token)
        url: str = await crew.call(position, "serve", *arguments, timeout_s=CALL_TIMEOUT_S)
        limit = search.start_timeout_s
        await crew.call(position, "await_server", limit, timeout_s=limit + CALL_TIMEOUT_S)
        return url

    async with asyncio.TaskGroup() as starts:
        urls = [starts.create_task(serve(position)) for position in serving]
    return search_settings(search, [url.result() for url in urls])


async def _preflight(task: LaunchTask, crew: Crew, settings: Sequence[str], notify: Notify) -> int:
    """0 if the run can start as far as all machines see; what is wrong has been said then."""
    notify("the preflight looks at everything first, on every machine")
    doctor = task.doctor(settings)

    async def look_there(position: int) -> bool:
        try:
            limit = PREFLIGHT_S + CALL_TIMEOUT_S
            wrong = await crew.call(position, "examine", doctor, PREFLIGHT_S, timeout_s=limit)
        except RunError as problem:
            await crew.require_all()
            wrong = [str(problem)]
        for finding in wrong:
            notify(f"{crew.name(position)} is not right: {finding}")
        return not wrong

    # This one's findings are a table of all, as those of `rlsys doctor`.
    async with rlsys_command(doctor) as here:
        status = await here.wait()
    there = await asyncio.gather(*(look_there(number) for number in range(1, len(crew.machines))))
    return status or (0 if all(there) else 2)


async def _train(task: LaunchTask, crew: Crew, settings: Sequence[str], notify: Notify) -> int:
    with tempfile.TemporaryDirectory(prefix="rlsys-launch-") as scratch:
        folder = Path(scratch) / "folder"
        notify("the run starts")
        async with rlsys_command([*task.train(settings), "--folder-to", str(folder)]) as train:
            await _watch(crew, train, folder)
            status = await train.wait()
    if status:
        # What it died of may be a machine that the cluster has not given up yet.
        crew.require(*await crew.logs.gather(GATHER_TIMEOUT_S))
    return status


async def _watch(crew: Crew, train: Process, folder: Path) -> None:
    """Until the run ends: gather logs, into the run's folder once that is known.

    Raises RunError if a machine is lost, or Ray on this one.
    """
    ended = asyncio.ensure_future(train.wait())
    known = False
    try:
        while not ended.done():
            await crew.require_all()
            if not known and folder.is_file():
                known = True
                logs = Path(folder.read_text()) / "logs"
                crew.logs.move_to(logs / GATHERED)
                for position in range(len(crew.machines)):
                    await crew.call(position, "follow", str(logs), timeout_s=CALL_TIMEOUT_S)
            await crew.logs.gather(GATHER_TIMEOUT_S)
            await asyncio.wait({ended}, timeout=LOOK_S)
    finally:
        ended.cancel()
