"""Runs `ray start` and `rlsys` as child processes, and the launcher on every machine but the head.

Child processes and their descendants never outlive this process. Ray's files are in a local folder, which is removed
when Ray stops; the agent writes the run's ending to `end.json` there. This module does not import ray.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlsys.cluster import LOOPBACK_VARIABLE
from rlsys.cluster.launch.role import Notify, Role
from rlsys.cluster.local_ray import (
    HEALTH_CHECKS,
    RANK,
    address_towards,
    answers,
    end,
    ends_with_parent,
    family,
    local_ray,
    rays_own,
    require_token,
    scratch,
)
from rlsys.cluster.planning.placement import parse_placement
from rlsys.config.derived import has_critic
from rlsys.config.schema import Device, RunConfig
from rlsys.errors import RunError
from rlsys.files import write_atomically
from rlsys.search.server_process import child_environment

FOLDER_VARIABLE = "RLSYS_NODE_FOLDER"  # Environment variable with the folder, for processes that Ray starts.
STOP_S = 10.0  # Timeout for Ray to exit on SIGTERM.
PATIENCE_S = 60.0  # Timeout for a command to exit on SIGTERM; a run closes its workers and files first.
POLL_S = 1.0  # Poll interval for the head.
LOST_S = 20.0  # Silence after which the head counts as lost.
ENDING_GRACE_S = 90.0
"""Grace period after SIGTERM on a machine that is not the head. Slurm signals all machines at once, and the head still
needs this machine to close the run."""
_END, _OUTPUT = "end.json", "ray-start.log"
_LOG_LINES = 15
_HEALTH_CHECKS = {
    **{f"RAY_{name}": str(value) for name, value in HEALTH_CHECKS.items()},
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
}
"""Variables of Ray's health checks.

The last variable is the time in seconds after which Ray kills a process whose head is silent. This is long enough for
the launcher to stop the run in an orderly way first.
"""


@dataclass(frozen=True, slots=True)
class Ending:
    """Exit status of a run, and a sentence that describes its end."""

    status: int
    sentence: str


@dataclass(frozen=True, slots=True)
class RayNode:
    """Handle to a `ray start` process, which runs until `ray_node` exits."""

    _process: subprocess.Popen[bytes]
    folder: Path

    def require_alive(self) -> None:
        """Raise RunError with the last lines of Ray's output if Ray has exited."""
        status = self._process.poll()
        if status is None:
            return
        said, hint = (self.folder / _OUTPUT).read_text(errors="replace"), ""
        if "InvalidAuthToken" in said:
            hint = (
                " The machines have different Ray tokens: copy the head's ~/.ray/auth_token to all machines, or set the "
                "same RAY_AUTH_TOKEN everywhere."
            )
        lines = "\n".join(f"    {line}" for line in said.splitlines()[-_LOG_LINES:])
        raise RunError(f"Ray exited on this machine with status {status}.{hint} Its last output:\n{lines}")

    def ending(self) -> Ending | None:
        """Ending of the run as sent by the head; None until the head sends it."""
        file = self.folder / _END
        return Ending(**json.loads(file.read_text())) if file.is_file() else None


def write_ending(folder: Path, status: int, sentence: str) -> None:
    """Write the run's ending to `folder`, where `RayNode.ending` reads it."""
    write_atomically(folder / _END, json.dumps({"status": status, "sentence": sentence}) + "\n")


@contextmanager
def ray_node(arguments: Sequence[str], config: RunConfig, resource: str, *, alone: bool) -> Iterator[RayNode]:
    """Start Ray on this machine with `arguments` and 1 unit of `resource`; on exit, stop it and remove its files.

    `alone` restricts Ray to the loopback interface.
    """
    process: subprocess.Popen[bytes] | None = None

    def stop() -> None:
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-style", "record"]
    command += ["--disable-usage-stats", "--resources", json.dumps({resource: 1}), *arguments, *_slots(config)]
    with local_ray(stop) as folder:
        told = {LOOPBACK_VARIABLE: "0" if alone else "1", FOLDER_VARIABLE: str(folder)}
        told["TMPDIR"] = str(scratch(folder))
        with (folder / _OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                ends_with_parent([*command, "--temp-dir", str(rays_own(folder))]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment() | health_check_timeouts(os.environ) | told,
                process_group=0,
            )
        yield RayNode(process, folder)


def _slots(config: RunConfig) -> list[str]:
    """Return the `ray start` arguments for the machine's devices."""
    cluster = config.cluster
    if cluster.device is Device.gpu:
        return [] if cluster.devices_per_node is None else ["--num-gpus", str(cluster.devices_per_node)]
    placed = parse_placement(cluster.placement, has_critic(config.algorithm))
    number = cluster.devices_per_node or 1 + max(max(ranks) for ranks in placed.values())
    return ["--num-cpus", str(number), "--object-store-memory", str(512 * 1024**2)]  # Default: a share of host memory.


def health_check_timeouts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of Ray's timeouts for silent peers, except those already in `environment`."""
    return {name: value for name, value in _HEALTH_CHECKS.items() if name not in environment}


@asynccontextmanager
async def rlsys_command(arguments: Sequence[str]) -> AsyncIterator[Process]:
    """Run `rlsys` with `arguments`, sharing this process's output; on exit send SIGTERM, and after `PATIENCE_S` SIGKILL to it
    and to all processes that it has started.

    The command leads its own process group, so a Ctrl-C in the terminal does not reach it directly. The kernel sends it
    SIGTERM if this process is killed.
    """
    command = ends_with_parent([sys.executable, "-m", "rlsys.apps.cli.main", *arguments])
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, env=child_environment(), process_group=0)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=PATIENCE_S)
        if process.returncode is None:  # Its driver has a process group of its own.
            with suppress(psutil.NoSuchProcess):  # It has just ended.
                end(family(psutil.Process(process.pid)), timeout_s=0.0)
            await process.wait()


async def join_head(role: Role, config: RunConfig, wait_s: float, notify: Notify) -> Ending:
    """Join the head's cluster, stay until the run ends, and return its ending.

    Raises RunError if the head does not answer within `wait_s` seconds or is lost, and UserError if Ray's token is
    missing.
    """
    notify(f"node {role.rank} waits for the head at {role.host}:{role.port}")
    address = await _await_head(role, wait_s)
    joining = ["--address", f"{role.host}:{role.port}", "--node-ip-address", address]
    # Read the token only now: on a shared home folder, the head has created it by this time.
    os.environ.update(require_token(os.environ, make=False))
    with ray_node(joining, config, f"{RANK}{role.rank}", alone=False) as node:
        notify(f"node {role.rank} joins the head as {address}")
        ending = await _wait_for_ending(role, node, notify)
    notify(f"node {role.rank} leaves: {ending.sentence}")
    return ending


async def _await_head(role: Role, wait_s: float) -> str:
    """Wait until the head answers, and return this machine's address towards it."""
    until = time.monotonic() + wait_s
    while True:
        problem = "nothing listens there"
        try:
            address = await asyncio.to_thread(address_towards, role.host)
            if await asyncio.to_thread(answers, role.host, role.port, POLL_S):
                return address
        except OSError as error:  # The host name may resolve later: a pod gets its name after its start.
            problem = str(error)
        if time.monotonic() > until:
            raise RunError(
                f"node {role.rank} waited {wait_s:.0f} s for the head at {role.host}:{role.port} ({problem}): start "
                "`rlsys launch --rank 0` there, and check that this machine can reach it."
            )
        await asyncio.sleep(POLL_S)


async def _wait_for_ending(role: Role, node: RayNode, notify: Notify) -> Ending:
    """Wait for the run's ending from the head; raise RunError if the head is lost.

    The first SIGTERM leaves `ENDING_GRACE_S` for the ending to arrive; the second cancels at once.
    """
    heard, leave, task = time.monotonic(), float("inf"), asyncio.current_task()
    assert task is not None

    def asked() -> None:
        nonlocal leave
        if leave < float("inf"):
            task.cancel()
            return
        leave = time.monotonic() + ENDING_GRACE_S
        notify(f"node {role.rank} waits up to {ENDING_GRACE_S:.0f} s for the head to end the run, then leaves")

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked)
    while True:
        if ending := node.ending():
            return ending
        if time.monotonic() > leave:
            raise asyncio.CancelledError
        if await asyncio.to_thread(answers, role.host, role.port, POLL_S):
            heard = time.monotonic()
        elif time.monotonic() - heard > LOST_S:
            raise RunError(
                f"the head at {role.host}:{role.port} is lost: it has not responded for {LOST_S:.0f} s. All processes "
                f"of the run on node {role.rank} have been stopped."
            )
        node.require_alive()
        await asyncio.sleep(POLL_S)
