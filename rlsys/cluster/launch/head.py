"""The first machine: it brings the others together, runs what is launched, and ends everything everywhere.

In order: Ray, all machines, the preflight on each, search servers where the config says, then `rlsys train` as a child.
While that goes on, logs are gathered and the machines are watched: the loss of one ends the run with a
sentence that names it. On the way out, whatever the reason, every machine is told how the run ended.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

from rlsys.cluster.launch.child import rlsys_command
from rlsys.cluster.launch.crew import Crew, assemble, crew_of
from rlsys.cluster.launch.ray_node import RayNode, ray_node
from rlsys.cluster.launch.searching import search_settings, serving_positions
from rlsys.cluster.launch.task import Say, Task
from rlsys.cluster.machines import RANK, joined
from rlsys.cluster.network import address_here, answers, promised_port
from rlsys.cluster.role import Role
from rlsys.cluster.worker_group import GATHERED
from rlsys.errors import RunError, UserError
from rlsys.search.address import TOKEN_VARIABLE

_LOOPBACK = "127.0.0.1"
LOOK_S = 1.0
"""Between two looks at the machines and the run."""
GATHER_TIMEOUT_S = 10.0
"""For a machine to hand its logs out."""
PREFLIGHT_S = 180.0
"""For one machine's look at itself."""
CALL_TIMEOUT_S = 60.0
"""For a machine to do what takes a moment."""


async def lead(task: Task, role: Role, say: Say) -> int:
    """Start Ray on this machine, bring the others together, and run `task`; its exit status.

    Raises RunError naming the machines that do not come in time, or are lost.
    """
    host = own_address(role)
    if answers(host, role.port, LOOK_S):
        raise UserError(f"--head: port {role.port} of {host} is taken already: end what uses it, or give another.")
    say(f"node 0 starts Ray at {host}:{role.port}")
    until = time.monotonic() + task.wait_s
    arguments = [
        "--head",
        "--port",
        str(role.port),
        "--node-ip-address",
        host,
        "--include-dashboard",
        "false",
        "--no-monitor",
    ]
    alone = role.nodes == 1
    with (
        promised_port() as unused,
        ray_node([*arguments, *_unused(unused)], task.config, f"{RANK}0", alone=alone) as node,
    ):
        await _answering(host, role.port, node, until)
        return await lead_cluster(task, role, f"{host}:{role.port}", say, until, node)


async def lead_cluster(
    task: Task, role: Role, address: str, say: Say, until: float | None = None, node: RayNode | None = None
) -> int:
    """Run `task` on the Ray cluster at `address` once all machines are there; its exit status.

    Machines must have come when the monotonic clock says `until`, by default `task.wait_s` from now. `node` is the
    Ray that has been started for it here, if any, whose end ends the run.
    """
    until = time.monotonic() + task.wait_s if until is None else until
    with joined(address):
        found = await assemble(role, address, task.wait_s, until, node, say)
        async with crew_of(found) as crew:
            return await _run(task, crew, address, node, say)


def own_address(role: Role) -> str:
    """The address of this machine that the others come to: the loopback interface's where there are none.

    Raises UserError if `role.host` is another machine.
    """
    if role.nodes > 1:
        return address_here(role.host)
    if role.host not in ("", "localhost", _LOOPBACK):
        address_here(role.host)
    return _LOOPBACK


def _unused(promise: socket.socket) -> list[str]:
    """The port of a server that nobody asks, but which ends Ray where its usual port is taken."""
    return ["--ray-client-server-port", str(promise.getsockname()[1])]


async def _answering(host: str, port: int, node: RayNode, until: float) -> None:
    while not await asyncio.to_thread(answers, host, port, LOOK_S):
        node.require_alive()
        if time.monotonic() > until:
            raise RunError(f"Ray was not ready at {host}:{port} in time: give more with --wait.")
        await asyncio.sleep(LOOK_S / 4)


async def _run(task: Task, crew: Crew, address: str, node: RayNode | None, say: Say) -> int:
    status, sentence = 1, "the head has broken off"
    try:
        settings = [f"cluster.address={address}"]
        serving = serving_positions(task.config, crew.hosts())
        status = await _preflight(task, crew, settings, say) if task.preflight else 0
        if status == 0:
            settings += await _searching(task, crew, serving, say)
            status = await _train(task, crew, settings, node, say)
        sentence = "the run has ended" if status == 0 else f"the run has ended with status {status}"
    except asyncio.CancelledError:
        status, sentence = 130, "the run was interrupted"
        raise
    except (UserError, RunError) as error:
        sentence = str(error).partition("\n")[0]
        raise
    finally:
        await crew.gathering.gather(GATHER_TIMEOUT_S)
        await crew.dismiss(status, sentence, GATHER_TIMEOUT_S)
    return status


async def _searching(task: Task, crew: Crew, serving: Sequence[int], say: Say) -> list[str]:
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
        say(f"{crew.name(position)} serves {search.index} at {host}:{place.port}")
        arguments = (search.index, host, place.port, search.topk, place.device, config.cluster.threads, token)
        url: str = await crew.call(position, "serve", *arguments, timeout_s=CALL_TIMEOUT_S)
        limit = search.start_timeout_s
        await crew.call(position, "await_server", limit, timeout_s=limit + CALL_TIMEOUT_S)
        return url

    async with asyncio.TaskGroup() as starts:
        urls = [starts.create_task(serve(position)) for position in serving]
    return search_settings(search, [url.result() for url in urls])


async def _preflight(task: Task, crew: Crew, settings: Sequence[str], say: Say) -> int:
    """0 if the run can start as far as all machines see; what is wrong has been said then."""
    say("the preflight looks at everything first, on every machine")

    async def look_there(position: int) -> bool:
        """Whether all is well."""
        arguments = (task.doctor(settings), PREFLIGHT_S)
        try:
            wrong = await crew.call(position, "examine", *arguments, timeout_s=PREFLIGHT_S + CALL_TIMEOUT_S)
        except RunError as problem:
            crew.require(*await crew.lost())
            wrong = [str(problem)]
        for one in wrong:
            say(f"{crew.name(position)} is not right: {one}")
        return not wrong

    async def look_here() -> int:
        async with rlsys_command(task.doctor(settings)) as doctor:
            return await doctor.wait()

    # This one's findings are a table of all, as those of `rlsys doctor`.
    status = await look_here()
    there = await asyncio.gather(*(look_there(number) for number in range(len(crew.machines)) if number))
    return status or (0 if all(there) else 2)


async def _train(task: Task, crew: Crew, settings: Sequence[str], node: RayNode | None, say: Say) -> int:
    with tempfile.TemporaryDirectory(prefix="rlsys-launch-") as scratch:
        folder = Path(scratch) / "folder"
        say("the run starts")
        async with rlsys_command([*task.train(settings), "--folder-to", str(folder)]) as train:
            await _watch(crew, node, train, folder)
            status = await train.wait()
    if status:
        # What it died of may be a machine that the cluster has not given up yet.
        crew.require(*await crew.gathering.gather(GATHER_TIMEOUT_S))
    return status


async def _watch(crew: Crew, node: RayNode | None, train: Process, folder: Path) -> None:
    """Until the run ends: gather logs, into the run's folder once that is known.

    Raises RunError if a machine is lost, or Ray on this one.
    """
    ended = asyncio.ensure_future(train.wait())
    known = False
    try:
        while not ended.done():
            await _require_all(crew, node)
            if not known and folder.is_file():
                known = True
                logs = Path(folder.read_text()) / "logs"
                crew.gathering.move_to(logs / GATHERED)
                for position in range(len(crew.machines)):
                    await crew.call(position, "follow", str(logs), timeout_s=CALL_TIMEOUT_S)
            await crew.gathering.gather(GATHER_TIMEOUT_S)
            await asyncio.wait({ended}, timeout=LOOK_S)
    finally:
        ended.cancel()


async def _require_all(crew: Crew, node: RayNode | None) -> None:
    """Raise RunError if Ray on this machine has ended, or another machine is lost."""
    if node is not None:
        node.require_alive()
    try:
        gone = await crew.lost()
    except RunError:
        if node is not None:
            node.require_alive()  # Its end explains the silence.
        raise
    crew.require(*gone)
