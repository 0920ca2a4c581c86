"""Runs the launcher on the head machine (rank 0): assembles the machines, trains, and shuts everything down.

Order: start Ray, wait for all machines, run the preflight on each, start the search servers of `cluster.search.nodes`, then
run `rlsys train` as a child process. Meanwhile the launcher gathers logs and watches the machines. A machine that is lost
before the run starts ends the launch with a RunError that names it. After that, the run itself goes on or ends, and the
launcher names lost machines if it fails. On every exit the launcher sends the run's ending to all machines.

A `NodeAgent` works for the launcher on each machine, in a Ray actor that takes no device and ends with the cluster.
`GatheredLogs` copies logs to `<folder>/<rank>/...` while they grow. If a machine is lost, only the last seconds of its
logs are missing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.cluster.launch.ray_node import FOLDER_VARIABLE, RayNode, ray_node, rlsys_command, write_ending
from rlsys.cluster.launch.role import LaunchTask, Notify, Role, search_settings, serving_positions
from rlsys.cluster.local_ray import RANK, address_here, answers, promised_port, rays_own
from rlsys.cluster.runtime import POLL_S as MACHINES_POLL_S
from rlsys.cluster.runtime import SEES_ALL_GPUS, Machine, answer, joined, lost, machines, remote_shell
from rlsys.cluster.worker_group import GATHERED, Rank, RankDied, RankSilent, SyncHost, WorkerGroup
from rlsys.errors import RunError, UserError
from rlsys.files import named
from rlsys.observe.faults import Restarts
from rlsys.search.address import TOKEN_VARIABLE
from rlsys.search.server_process import SearchServer, child_environment

_LOOPBACK = "127.0.0.1"
POLL_S = 1.0  # Poll interval for the machines and the run.
START_S = 120.0  # Timeout for starting an agent.
GATHER_TIMEOUT_S = 10.0  # Timeout for reading a machine's logs.
PREFLIGHT_S = 180.0  # Timeout for one machine's preflight.
CALL_TIMEOUT_S = 60.0  # Timeout for short calls to an agent.
WATCH_S = 1.0  # Pause between two health checks of a search server.
MAX_BYTES = 4 * 1024**2  # Maximum log bytes in one response.
_WORKERS = "workers"  # Folder of the logs of a machine's workers.
_OF_THE_HEAD = ("search", "task.")
"""Prefixes of findings about things that only the head or the search machines need."""


async def run_head(task: LaunchTask, role: Role, notify: Notify) -> int:
    """Start Ray on this machine, wait for the other machines, run `task`, and return its exit status.

    Raises RunError naming machines that do not join in time or are lost. Raises UserError if `role.host` is another machine
    or its port is in use.
    """
    only_here = role.nodes == 1 and role.host in ("", "localhost", _LOOPBACK)
    outer = "" if only_here else address_here(role.host)
    host = outer if role.nodes > 1 else _LOOPBACK
    if answers(host, role.port, POLL_S):
        raise UserError(
            f"--head: port {role.port} of {host} is already in use: stop the program that uses it, or give another port.",
            code="in_use",
            key="--head",
        )
    notify(f"node 0 starts Ray at {host}:{role.port}")
    until = time.monotonic() + task.wait_s
    arguments = ["--head", "--port", str(role.port), "--node-ip-address", host]
    arguments += ["--include-dashboard", "false", "--no-monitor"]
    with promised_port() as unused:
        # Ray's client server is not used here, but Ray exits if its default port is taken.
        arguments += ["--ray-client-server-port", str(unused.getsockname()[1])]
        with ray_node(arguments, task.config, f"{RANK}0", alone=role.nodes == 1) as node:
            while not await asyncio.to_thread(answers, host, role.port, POLL_S):
                node.require_alive()
                if time.monotonic() > until:
                    raise RunError(f"Ray was not ready at {host}:{role.port} in time: raise --wait.")
                await asyncio.sleep(POLL_S / 4)
            return await run_on_cluster(task, role, f"{host}:{role.port}", notify, until, node)


async def run_on_cluster(
    task: LaunchTask, role: Role, address: str, notify: Notify, until: float | None = None, node: RayNode | None = None
) -> int:
    """Run `task` on the Ray cluster at `address` once all machines have joined, and return its exit status.

    `until` is the deadline for joining on the monotonic clock, by default `task.wait_s` from now. `node` is the Ray that
    this launcher started here, if any; the run ends when that Ray exits.
    """
    until = time.monotonic() + task.wait_s if until is None else until
    with ExitStack() as stack:
        await _join(stack, address, until, node)
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlsys-logs-", ignore_cleanup_errors=True))
        there = await _assemble(role, address, task.wait_s, until, node, notify)
        nodes = ClusterNodes(task, there, Path(logs), node, notify)
        try:
            await nodes.agents.build(NodeAgent, [()] * len(there), START_S)
            return await _run(nodes, address)
        finally:
            nodes.agents.kill()


class ClusterNodes:
    """All machines of a launch, each with its agent."""

    def __init__(
        self, task: LaunchTask, there: Sequence[Machine], logs: Path, node: RayNode | None, notify: Notify
    ) -> None:
        """`node` is the Ray that the launcher started on this machine; None for an existing cluster."""
        self.task = task
        self.machines, self.node, self.notify = there, node, notify
        group = []
        for number, machine in enumerate(there):
            strategy = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
            # An agent reserves no device, so Ray would hide all GPUs from the search server it starts.
            handle = remote_shell(SyncHost, strategy, Path(os.devnull), {SEES_ALL_GPUS: "1"})
            group.append(Rank(number, machine.name, handle, logs / str(machine.rank) / "node" / "search.log"))
        self.agents = WorkerGroup("node", group, START_S)
        self.logs = GatheredLogs(self.agents, [machine.rank for machine in there], logs)

    async def gone(self) -> list[int]:
        """Return the positions of lost machines. Raises RunError if Ray on this machine has exited."""
        if self.node is not None:
            self.node.require_alive()
        try:
            return [self.machines.index(machine) for machine in await answer(lambda: lost(self.machines))]
        except RunError:
            if self.node is not None:
                self.node.require_alive()  # If Ray has exited here, that is the cause: report it instead.
            raise

    def require(self, *gone: int) -> None:
        """Raise RunError naming the machines at positions `gone`; a no-op if `gone` is empty."""
        if names := [self.machines[position].name for position in gone]:
            one = len(names) == 1
            raise RunError(
                f"{' and '.join(names)} {'is' if one else 'are'} lost: {'it no longer responds' if one else 'they no longer respond'}"
                f", and the run has ended. Check {'its' if one else 'their'} power, network and memory; the logs of all "
                "machines are in the run's folder, under logs/nodes. resume=auto continues from the last checkpoint."
            )

    async def call(self, position: int, method: str, *args: Any, timeout_s: float) -> Any:
        """Call `method` of the agent at `position`. Raises RunError naming the machine if it is lost."""
        try:
            return await self.agents.call_rank(position, method, *args, timeout_s=timeout_s)
        except (RankDied, RankSilent):
            self.require(position)

    async def send_ending(self, status: int, sentence: str) -> None:
        """Send the run's ending to all machines, best effort."""

        async def send(position: int) -> None:
            with suppress(RunError):
                await self.agents.call_rank(position, "close", status, sentence, timeout_s=GATHER_TIMEOUT_S)

        await asyncio.gather(*map(send, range(len(self.machines))))


async def _join(stack: ExitStack, address: str, until: float, node: RayNode | None) -> None:
    """Connect to Ray at `address` until `stack` closes.

    Ray's head accepts connections before its own node is ready, so a Ray that was started here is asked again until the
    deadline `until` (monotonic clock). Raises RunError then, or if `node` has exited.
    """
    while True:
        try:
            stack.enter_context(joined(address))
        except RunError as problem:
            if node is None:
                raise
            node.require_alive()
            if time.monotonic() > until:
                raise RunError(f"Ray was not ready at {address} in time: raise --wait.") from problem
        else:
            return
        await asyncio.sleep(MACHINES_POLL_S)


async def _assemble(
    role: Role, address: str, wait_s: float, until: float, node: RayNode | None, notify: Notify
) -> list[Machine]:
    """Wait until all machines have joined, and return them.

    Raises RunError naming the missing machines at the deadline `until` (monotonic clock), or if `node` has exited. Raises
    UserError if two machines have the same rank.
    """
    known: set[str] = set()
    while True:
        if node is not None:
            node.require_alive()
        there, given = await answer(machines), dict[int, Machine]()
        for machine in there:
            if machine.node_id not in known:
                known.add(machine.node_id)
                notify(f"{machine.name} has joined")
        for machine in there:
            if machine.came_with_rank and given.setdefault(machine.rank, machine) is not machine:
                both = f"{given[machine.rank]} and on {machine}"
                raise UserError(
                    f"--rank {machine.rank} was given on {both}: give every machine its own.",
                    code="conflict",
                    key="--rank",
                )
        # A machine that joined without a rank counts by its position in the list.
        missing = sorted({*range(role.nodes)} - {machine.rank for machine in there})
        if not missing:
            return there
        if time.monotonic() > until:
            raise RunError(
                f"{' and '.join(map(role.describe, missing))} did not join {address} within {wait_s:.0f} s "
                f"({len(there)} of {role.nodes} machines have joined): start `rlsys launch` on every machine, check its "
                "output there, or raise --wait."
            )
        await asyncio.sleep(MACHINES_POLL_S)


async def _run(nodes: ClusterNodes, address: str) -> int:
    task, status, sentence = nodes.task, 1, "the head stopped on an error"
    try:
        settings = [f"cluster.address={address}"]
        serving = serving_positions(task.config, [(machine.rank, machine.host) for machine in nodes.machines])
        status = await _preflight(nodes, settings) if task.preflight else 0
        if status == 0:
            settings += await _searching(nodes, serving)
            status = await _train(nodes, settings)
        sentence = "the run has ended" if status == 0 else f"the run has ended with status {status}"
    except asyncio.CancelledError:
        status, sentence = 130, "the run was interrupted"
        raise
    except (UserError, RunError) as error:
        sentence = str(error).partition("\n")[0]
        raise
    finally:
        await nodes.logs.gather(GATHER_TIMEOUT_S)
        await nodes.send_ending(status, sentence)
    return status


async def _searching(nodes: ClusterNodes, serving: Sequence[int]) -> list[str]:
    """Start search servers on the machines at positions `serving`, and return the overrides that select them.

    The servers require the token from the environment, or else a new one.
    """
    if not serving:
        return []
    cluster, search = nodes.task.config.cluster, nodes.task.config.search
    # The run is a child of this process, inherits the token, and passes it to its workers.
    token = os.environ.setdefault(search.token_env or TOKEN_VARIABLE, secrets.token_urlsafe(32))

    async def serve(position: int) -> str:
        machine, port = nodes.machines[position], cluster.search.port
        nodes.notify(f"{machine.name} serves {search.index} at {machine.address}:{port}")
        limit = search.start_timeout_s
        how: dict[str, Any] = {
            "host": machine.address,
            "port": port,
            "device": cluster.search.device,
            "threads": cluster.threads,
        }
        how |= {"topk": search.topk, "token": token, "kind": search.index_kind, "pages": search.pages}
        arguments = (search.index, how, limit, search.timeout_s, Restarts(cluster))
        url: str = await nodes.call(position, "serve", *arguments, timeout_s=limit + CALL_TIMEOUT_S)
        return url

    async with asyncio.TaskGroup() as starts:
        urls = [starts.create_task(serve(position)) for position in serving]
    return search_settings(search, [url.result() for url in urls])


async def _preflight(nodes: ClusterNodes, settings: Sequence[str]) -> int:
    """Run the preflight on all machines, report every failed check, and return 0 if the run can start."""
    nodes.notify("the preflight runs on every machine")
    doctor = nodes.task.arguments(["doctor", "--launched", "--for"], settings)

    async def look_there(position: int) -> bool:
        try:
            limit = PREFLIGHT_S + CALL_TIMEOUT_S
            wrong = await nodes.call(position, "examine", doctor, PREFLIGHT_S, timeout_s=limit)
        except RunError as problem:
            nodes.require(*await nodes.gone())
            wrong = [str(problem)]
        for finding in wrong:
            nodes.notify(f"{nodes.machines[position].name} failed the preflight: {finding}")
        return not wrong

    # The head's own preflight prints the full table of `rlsys doctor`.
    async with rlsys_command(doctor) as here:
        status = await here.wait()
    there = await asyncio.gather(*map(look_there, range(1, len(nodes.machines))))
    return status or (0 if all(there) else 2)


async def _train(nodes: ClusterNodes, settings: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="rlsys-launch-") as scratch:
        folder = Path(scratch) / "folder"
        nodes.notify("the run starts")
        arguments = nodes.task.arguments(["train", "--config-name"], settings)
        async with rlsys_command([*arguments, "--folder-to", str(folder)]) as train:
            await _watch(nodes, train, folder)
            status = await train.wait()
    if status:
        # The cause may be a lost machine that Ray has not declared dead yet.
        nodes.require(*await nodes.logs.gather(GATHER_TIMEOUT_S))
    return status


async def _watch(nodes: ClusterNodes, train: Process, folder: Path) -> None:
    """Gather logs until the run ends, into the run's folder as soon as the folder is known; report lost machines.

    The run goes on without a machine that had only engines; else it ends by itself. It has a new folder if its driver was
    killed before a checkpoint, and started again. Raises RunError if Ray on this machine exits.
    """
    ended = asyncio.ensure_future(train.wait())
    known, reported = "", set[int]()
    try:
        while not ended.done():
            for position in set(await nodes.gone()) - reported:
                reported.add(position)
                nodes.notify(f"{nodes.machines[position].name} is lost: the run goes on if it had only engines there")
            if folder.is_file() and (found := folder.read_text()) != known:
                known = found
                logs = Path(known) / "logs"
                nodes.logs.move_to(logs / GATHERED)
                for position in range(len(nodes.machines)):
                    with suppress(RankDied, RankSilent):  # A lost machine has no logs to follow.
                        await nodes.agents.call_rank(position, "follow", str(logs), timeout_s=CALL_TIMEOUT_S)
            await nodes.logs.gather(GATHER_TIMEOUT_S)
            await asyncio.wait({ended}, timeout=POLL_S)
    finally:
        ended.cancel()


class LogChunk(NamedTuple):
    """Part of a log: `data` starts at byte offset `start` of log `name`, for example `ray/raylet.out`."""

    name: str
    start: int
    data: bytes


class NodeAgent:
    """Works for the launcher on one machine: runs the preflight and a search server, reads logs, relays the ending."""

    def __init__(self) -> None:
        launched = os.environ.get(FOLDER_VARIABLE)
        self._folder = Path(tempfile.mkdtemp(prefix="rlsys-node-", dir=launched))
        self._server: SearchServer | None = None
        self._over, self._restarting = threading.Event(), threading.Lock()
        rays = rays_own(Path(launched)) if launched else Path("/tmp/ray")
        self._logs = {"node": self._folder, "ray": rays / "session_latest" / "logs"}

    def examine(self, arguments: Sequence[str], timeout_s: float) -> list[str]:
        """Run `rlsys doctor` with `arguments`, and return its failed checks that concern this machine.

        Raises RunError if it does not return findings within `timeout_s`.
        """
        command = [sys.executable, "-m", "rlsys.apps.cli.main", *arguments, "--json"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=child_environment(),
                timeout=timeout_s, check=False,
            )  # fmt: skip
            findings = json.loads(done.stdout)["findings"]
        except subprocess.TimeoutExpired:
            raise RunError(f"the preflight took longer than {timeout_s:.0f} s") from None
        except (ValueError, LookupError):
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise RunError(f"the preflight ended with status {done.returncode}: {''.join(last)}") from None
        return [
            f"{finding['what']}: {finding['found']}{' -> ' if finding['fix'] else ''}{finding['fix']}"
            for finding in findings
            if finding["state"] == "wrong" and not finding["what"].startswith(_OF_THE_HEAD)
        ]

    def serve(
        self, index: str, settings: Mapping[str, Any], timeout_s: float, answer_s: float, restarts: Restarts
    ) -> str:
        """Start a search server, wait until it is healthy, and return its URL. It is restarted within limits until `close`.

        Raises UserError if the port is taken, RunError if it dies or is not healthy within `timeout_s`.
        """
        # Ray limits its actors, and so their children, to one thread.
        threads = settings["threads"] or len(os.sched_getaffinity(0))
        self._server = SearchServer(index, self._folder / "search.log", **{**settings, "threads": threads})
        self._server.wait_healthy(timeout_s)
        keeps = partial(self._keep, self._server, timeout_s, answer_s, restarts)
        threading.Thread(target=keeps, daemon=True).start()
        return self._server.url

    def _keep(self, server: SearchServer, start_s: float, answer_s: float, restarts: Restarts) -> None:
        """Restart `server` when it has died, or twice in a row has not answered within `answer_s`, until `close`."""
        silent = 0
        while not self._over.wait(WATCH_S):
            with suppress(RunError, UserError, OSError):  # Its log says why it has died, or could not start.
                silent = 0 if server.is_healthy(answer_s) else silent + 1
                if silent < 2:
                    continue
            silent = 0
            with self._restarting, suppress(RunError, UserError, OSError):
                if self._over.is_set() or not restarts.take():
                    return
                server.restart()
            with suppress(RunError, UserError, OSError):
                server.wait_healthy(start_s)

    def follow(self, logs: str) -> None:
        """Also read the worker logs in `logs`, unless the folder is shared with the head."""
        if not (Path(logs) / GATHERED).is_dir():
            self._logs[_WORKERS] = Path(logs)

    def read(self, since: Mapping[str, int], most_bytes: int = MAX_BYTES) -> list[LogChunk]:
        """Read log content past the byte offsets `since`, at most `most_bytes` per call; empty when all is read."""
        chunks: list[LogChunk] = []
        for kind, folder in self._logs.items():
            for file in sorted(folder.rglob("*")):
                name = f"{kind}/{file.relative_to(folder)}"
                start = since.get(name, 0)
                with suppress(OSError):  # Ray renames logs on rotation.
                    if most_bytes <= 0 or file.is_symlink() or not file.is_file() or file.stat().st_size == start:
                        continue
                    start = 0 if file.stat().st_size < start else start  # The log was truncated or replaced.
                    with file.open("rb") as log:
                        log.seek(start)
                        data = log.read(most_bytes)
                    chunks += [LogChunk(name, start, data)] if data else []
                    most_bytes -= len(data)
        return chunks

    def close(self, status: int, sentence: str) -> None:
        """Tell this machine's launcher how the run ended; then stop the search server, which takes longer."""
        if folder := os.environ.get(FOLDER_VARIABLE):
            write_ending(Path(folder), status, sentence)
        self._over.set()
        if self._server is not None:
            with self._restarting:
                self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class GatheredLogs:
    """Copies the logs of all machines to one folder on the head."""

    def __init__(self, agents: WorkerGroup, ranks: Sequence[int], folder: Path) -> None:
        """`ranks[i]` is the machine rank of agent i, and names its folder."""
        self._agents, self._ranks, self._folder = agents, ranks, folder
        self._read: list[dict[str, int]] = [{} for _ in ranks]

    def move_to(self, parent: Path) -> None:
        """Move all copies to a new folder in `parent`, named by the current time, and continue there.

        A resumed run has one such folder for each launch. Logs of workers stay, because they are of the run before.
        """
        now = time.strftime("%Y-%m-%d_%H-%M-%S")
        names = (now if number == 1 else f"{now}_{number}" for number in itertools.count(1))
        for folder in (parent / name for name in names):
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                break
        for part in self._folder.glob("*/*"):
            if part.name != _WORKERS:
                (folder / part.parent.name).mkdir(exist_ok=True)
                shutil.move(part, folder / part.parent.name / part.name)
        for read in self._read:
            for name in [name for name in read if name.startswith(f"{_WORKERS}/")]:
                del read[name]
        self._folder = folder

    async def gather(self, timeout_s: float) -> list[int]:
        """Copy new log content from all agents, and return the positions of the agents that did not respond in time."""
        answered = await asyncio.gather(*(self._gather_from(agent, timeout_s) for agent in range(len(self._ranks))))
        return [agent for agent, did in enumerate(answered) if not did]

    async def _gather_from(self, agent: int, timeout_s: float) -> bool:
        more = True
        while more:
            try:
                chunks = await self._agents.call_rank(agent, "read", self._read[agent], timeout_s=timeout_s)
            except RunError as problem:
                return not isinstance(problem, RankSilent | RankDied)  # Any other error comes from a live machine.
            for chunk in chunks:
                file = self._folder / str(self._ranks[agent]) / chunk.name
                with named(file):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with file.open("ab") as log:
                        log.write(chunk.data)
                self._read[agent][chunk.name] = chunk.start + len(chunk.data)
            # Stop at a partial response: a log that grows constantly would otherwise never end the loop.
            more = sum(len(chunk.data) for chunk in chunks) >= MAX_BYTES
        return True
