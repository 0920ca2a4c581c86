"""Ray on this machine, commands of rlsys, and a machine that is not the first: it joins the head and stays till that is done.

Child processes are certainly ended, with all that came of them. Ray keeps its files in a folder of this machine's own,
which goes with it; `end.json` in it is where the head says how the run has ended. Nothing of Ray is imported here.
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

from rlsys.cluster import LOOPBACK_VARIABLE
from rlsys.cluster.launch.role import Notify, Role
from rlsys.cluster.local_ray import RANK, address_towards, answers, ends_with_parent, local_ray, rays_own, require_token
from rlsys.cluster.planning.placement import parse_placement
from rlsys.config.derived import has_critic
from rlsys.config.schema import Device, RunConfig
from rlsys.errors import RunError
from rlsys.files import write_atomically
from rlsys.search.server_process import child_environment

FOLDER_VARIABLE = "RLSYS_NODE_FOLDER"  # Where processes that Ray starts learn the folder.
STOP_S = 10.0  # For Ray to end by itself.
PATIENCE_S = 60.0  # For a command that is told to end: a run closes what it has opened.
LOOK_S = 1.0  # Between two looks at the head.
LOST_S = 20.0  # The head is lost when it has answered nothing for so long.
FAREWELL_S = 90.0
"""For a head that was told to end at the same time, as by Slurm, to close the run, which needs this machine."""
_END, _OUTPUT = "end.json", "ray-start.log"
_LOG_LINES = 15
_PATIENCE = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
}
"""A machine is given up after half a minute of silence; Ray's own patience is over a minute. The last: of a process with
a head that is silent, in seconds, after which Ray ends it on the spot; the launcher is sooner, and ends it in order."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run."""

    status: int  # As a process's exit status.
    sentence: str


@dataclass(frozen=True, slots=True)
class RayNode:
    """A handle of `ray start`, which runs until `ray_node` is left."""

    _process: subprocess.Popen[bytes]
    folder: Path

    def require_alive(self) -> None:
        """Raise RunError, with the end of what Ray said, if it has ended."""
        status = self._process.poll()
        if status is None:
            return
        said, hint = (self.folder / _OUTPUT).read_text(errors="replace"), ""
        if "InvalidAuthToken" in said:
            hint = (
                " The machines have different tokens of Ray: copy the file ~/.ray/auth_token of the head to all, or set the "
                "same RAY_AUTH_TOKEN everywhere."
            )
        lines = "\n".join(f"    {line}" for line in said.splitlines()[-_LOG_LINES:])
        raise RunError(f"Ray ended on this machine with status {status}.{hint} It said last:\n{lines}")

    def ending(self) -> Ending | None:
        """The end of the run as the head has told it; None before it has."""
        file = self.folder / _END
        return Ending(**json.loads(file.read_text())) if file.is_file() else None


def tell_ending(folder: Path, status: int, sentence: str) -> None:
    """Let whoever has started Ray in `folder` know how the run ended; see `Ending`."""
    write_atomically(folder / _END, json.dumps({"status": status, "sentence": sentence}) + "\n")


@contextmanager
def ray_node(arguments: Sequence[str], config: RunConfig, resource: str, *, alone: bool) -> Iterator[RayNode]:
    """Start Ray on this machine with `arguments` and 1 of `resource`; on the way out nothing of it stays.

    `alone` keeps it to this machine's loopback interface.
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
        with (folder / _OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                ends_with_parent([*command, "--temp-dir", str(rays_own(folder))]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment() | patience(os.environ) | told,
                process_group=0,
            )
        yield RayNode(process, folder)


def _slots(config: RunConfig) -> list[str]:
    """Arguments of `ray start` for a machine's devices."""
    cluster = config.cluster
    if cluster.device is Device.gpu:
        return [] if cluster.devices_per_node is None else ["--num-gpus", str(cluster.devices_per_node)]
    placed = parse_placement(cluster.placement, has_critic(config.algorithm))
    number = cluster.devices_per_node or 1 + max(max(ranks) for ranks in placed.values())
    return ["--num-cpus", str(number), "--object-store-memory", str(512 * 1024**2)]  # Else a share of the memory.


def patience(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for how long Ray waits for what is silent, where `environment` does not say it."""
    return {name: value for name, value in _PATIENCE.items() if name not in environment}


@asynccontextmanager
async def rlsys_command(arguments: Sequence[str]) -> AsyncIterator[Process]:
    """Run `rlsys` with `arguments`, its output where ours goes; on the way out it is ended, gently if it can be.

    It leads a process group, so that Ctrl-C reaches it through us alone, once, and is told to end if we are killed.
    """
    command = ends_with_parent([sys.executable, "-m", "rlsys.apps.cli.main", *arguments])
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, env=child_environment(), process_group=0)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), PATIENCE_S)
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def work(role: Role, config: RunConfig, wait_s: float, notify: Notify) -> Ending:
    """Be a part of the head's cluster until the run has ended, and return how it did.

    Raises RunError if the head does not come within `wait_s` seconds, or is lost; UserError without Ray's token.
    """
    notify(f"node {role.rank} waits for the head at {role.host}:{role.port}")
    address = await _await_head(role, wait_s)
    joining = ["--address", f"{role.host}:{role.port}", "--node-ip-address", address]
    # With a home that all machines share, the head has made the token by now.
    os.environ.update(require_token(os.environ, make=False))
    with ray_node(joining, config, f"{RANK}{role.rank}", alone=False) as node:
        notify(f"node {role.rank} joins the head as {address}")
        ending = await _stay(role, node, notify)
    notify(f"node {role.rank} leaves: {ending.sentence}")
    return ending


async def _await_head(role: Role, wait_s: float) -> str:
    """This machine's address on the way to the head, once that answers."""
    until = time.monotonic() + wait_s
    while True:
        problem = "nothing listens there"
        try:
            address = await asyncio.to_thread(address_towards, role.host)
            if await asyncio.to_thread(answers, role.host, role.port, LOOK_S):
                return address
        except OSError as error:  # The name may be known later, as a pod's is.
            problem = str(error)
        if time.monotonic() > until:
            raise RunError(
                f"node {role.rank} waited {wait_s:.0f} s for the head at {role.host}:{role.port} ({problem}): start "
                "`rlsys launch --rank 0` there, and see that this machine can reach it."
            )
        await asyncio.sleep(LOOK_S)


async def _stay(role: Role, node: RayNode, notify: Notify) -> Ending:
    """Wait until the head says how the run ended, or is lost. A first SIGTERM lets the head have its time."""
    heard, leave, task = time.monotonic(), float("inf"), asyncio.current_task()
    assert task is not None

    def asked() -> None:
        nonlocal leave
        if leave < float("inf"):
            task.cancel()
            return
        leave = time.monotonic() + FAREWELL_S
        notify(f"node {role.rank} leaves when the head has closed the run, within {FAREWELL_S:.0f} s")

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked)
    while True:
        if ending := node.ending():
            return ending
        if time.monotonic() > leave:
            raise asyncio.CancelledError
        if await asyncio.to_thread(answers, role.host, role.port, LOOK_S):
            heard = time.monotonic()
        elif time.monotonic() - heard > LOST_S:
            raise RunError(
                f"the head at {role.host}:{role.port} is lost: it has answered nothing for {LOST_S:.0f} s. All of "
                f"the run on node {role.rank} has been ended."
            )
        node.require_alive()
        await asyncio.sleep(LOOK_S)
