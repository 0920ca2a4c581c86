"""Probes of this machine and of all that it can reach, for the checks.

Contract: nothing that is asked here starts anything that stays, and each answer comes, or `Unseen` is raised, within a
minute at most. Tests ask another machine, a subclass.

Ray tries for minutes to join a cluster that is silent or that wants another token, and cannot be told not to. So a cluster
is looked at from a process of its own: `python -m rlsys.cluster.preflight.machine ADDRESS` joins it, prints what it sees as
JSON, and leaves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from rlsys.cluster.local_ray import require_listener
from rlsys.config.schema import SearchConfig
from rlsys.errors import RunError, UserError
from rlsys.observe.environment import Capabilities, detect, version_of

_GIB = 1024**3
_DRIVER_S, _CONNECT_S, _RAY_S, _SEARCH_S = 15.0, 3.0, 60.0, 10.0


class Unseen(Exception):
    """There is no answer; one phrase says why."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card that this process may use."""

    index: int
    uuid: str
    name: str
    total_gib: float
    used_gib: float


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a card."""

    uuid: str  # Of the card.
    pid: int
    name: str
    used_gib: float


@dataclass(frozen=True, slots=True)
class Gpus:
    """The cards of this machine that CUDA_VISIBLE_DEVICES leaves, and who is on them."""

    driver: str
    cards: tuple[Gpu, ...]
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that a path is, or will be, on."""

    folder: Path  # The nearest folder that is there.
    total_gib: float
    free_gib: float
    writable: bool


@dataclass(frozen=True, slots=True)
class RayMachine:
    """A machine of a Ray cluster that is alive."""

    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A Ray cluster that this process could join."""

    nodes: tuple[RayMachine, ...]
    free: Mapping[str, float]  # What nobody has reserved, of all nodes together.


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """One search server's answer to a question."""

    url: str
    passages: int
    error: str = ""  # Why there is no answer; one phrase.


class ThisMachine:
    """The machine that a run is to start from."""

    @cached_property
    def capabilities(self) -> Capabilities:
        """Installed packages, and devices that torch sees."""
        return detect()

    def gpus(self) -> Gpus:
        """Raises Unseen where the driver gives no answer."""
        cards = _nvidia_smi("--query-gpu=index,uuid,name,memory.total,memory.used,driver_version")
        processes = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
        return read_gpus(cards, processes, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def version(self, package: str) -> str | None:
        """Version of an installed package; None is absent."""
        return version_of(package)

    def disk(self, path: Path) -> Disk:
        """The file system that `path` is or will be on. Raises Unseen."""
        whole = path.absolute()
        folder = next((parent for parent in (whole, *whole.parents) if parent.exists()), whole)
        try:
            usage = shutil.disk_usage(folder)
        except OSError as problem:
            raise Unseen(f"{folder} cannot be looked at ({problem.strerror})") from problem
        if not folder.is_dir():
            raise Unseen(f"{folder} is a file")
        writable = os.access(folder, os.W_OK | os.X_OK)
        return Disk(folder, usage.total / _GIB, usage.free / _GIB, writable)

    def memory_gib(self) -> float:
        """Host memory that is free."""
        return float(psutil.virtual_memory().available) / _GIB

    def interfaces(self) -> Mapping[str, Sequence[str]]:
        """Addresses of each network interface that is up."""
        up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
        every = psutil.net_if_addrs().items()
        return {name: [each.address for each in addresses] for name, addresses in every if name in up}

    def variable(self, name: str) -> str | None:
        """A variable of the environment."""
        return os.environ.get(name)

    def port_is_free(self, port: int) -> bool:
        """Whether a server could listen there, on all interfaces."""
        with suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return True
        return False

    def ray(self, address: str) -> RayCluster | Unseen:
        """The cluster at `address`, or why it cannot be joined."""
        try:
            require_listener(address, _CONNECT_S)
            return cluster_at(address, _RAY_S)
        except OSError as problem:
            return Unseen(f"nobody listens there ({problem.strerror or problem})")
        except Unseen as problem:
            return problem

    def search(self, settings: SearchConfig, question: str) -> tuple[SearchAnswer, ...]:
        """Answers of `url` and each of `replicas`."""

        async def ask_all() -> list[SearchAnswer]:
            urls = [url for url in [settings.url, *settings.replicas] if url]
            return await asyncio.gather(*(_ask(settings, url, question) for url in urls))

        return tuple(asyncio.run(ask_all()))

    def search_differs(self, settings: SearchConfig) -> str:
        """A sentence on how the servers differ; empty where they are replicas of each other."""
        from rlsys.rollout.tools.search_tool import open_client

        quick = replace(settings, retries=0, hedge_after_s=None, timeout_s=min(settings.timeout_s, _SEARCH_S))

        async def compare() -> None:
            async with open_client(quick, topk=settings.topk) as client:
                await client.health()

        with suppress(RunError):  # None answers, which `search` has said of each.
            try:
                asyncio.run(compare())
            except UserError as problem:
                return str(problem)
        return ""


def cluster_at(address: str, timeout_s: float) -> RayCluster:
    """Look at the Ray cluster at `address`. Raises Unseen where this machine cannot join it within `timeout_s`."""
    command = [sys.executable, "-m", "rlsys.cluster.preflight.machine", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        out, complaints = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, complaints = "", process.communicate()[1]
    if "InvalidAuthToken" in complaints:
        raise Unseen("the cluster wants a token: export RAY_AUTH_MODE as on the machine that started it")
    if process.returncode == 0:
        seen = json.loads(out)
        return RayCluster(tuple(RayMachine(**node) for node in seen["nodes"]), seen["free"])
    said = complaints.strip().splitlines()
    if process.returncode < 0 or not said:
        raise Unseen(f"it did not let this machine join within {timeout_s:g} s")
    raise Unseen(said[-1].rstrip("."))


def _join_and_look(address: str) -> dict[str, Any]:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {
        "nodes": [{"address": node["NodeManagerAddress"], "resources": node["Resources"]} for node in alive],
        "free": ray.available_resources(),
    }


def read_gpus(cards: str, processes: str, visible: str | None) -> Gpus:
    """Read what nvidia-smi prints of cards and of the processes on them, in CSV without header and units.

    `visible` is CUDA_VISIBLE_DEVICES: CUDA takes cards up to the first that is none. Raises Unseen for other text.
    """
    try:
        rows = [[cell.strip() for cell in line.split(",")] for line in cards.splitlines() if line.strip()]
        driver = rows[0][5] if rows else ""
        found = [Gpu(int(index), uuid, name, _mib(total), _mib(used)) for index, uuid, name, total, used, _ in rows]
        running = []
        for line in filter(str.strip, processes.splitlines()):
            uuid, pid, rest = line.split(",", 2)
            name, used = rest.rsplit(",", 1)  # The name may have commas.
            running.append(GpuProcess(uuid.strip(), int(pid), Path(name.strip()).name, _mib(used.strip())))
    except (ValueError, IndexError) as problem:
        raise Unseen(f"nvidia-smi printed what is not understood ({problem})") from problem
    if visible is not None:
        names = filter(None, map(str.strip, visible.split(",")))
        chosen = (
            next((card for card in found if name == str(card.index) or card.uuid.startswith(name)), None)
            for name in names
        )
        found = [card for card in takewhile(bool, chosen) if card]
    return Gpus(driver, tuple(found), tuple(running))


def _mib(text: str) -> float:
    """GiB of a number of MiB; what the driver does not tell counts as none."""
    return float(text) / 1024 if text.replace(".", "", 1).isdigit() else 0.0


def _nvidia_smi(query: str) -> str:
    """Run nvidia-smi, which can be ended where a driver hangs."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=True).stdout
    except FileNotFoundError as problem:
        raise Unseen("nvidia-smi is not here, so there is no NVIDIA driver") from problem
    except subprocess.TimeoutExpired as problem:
        raise Unseen(f"the NVIDIA driver gave no answer within {_DRIVER_S:g} s") from problem
    except subprocess.CalledProcessError as failed:
        said = (failed.stdout or failed.stderr).strip().splitlines()
        raise Unseen(f"nvidia-smi failed: {said[0] if said else failed.returncode}") from failed


async def _ask(settings: SearchConfig, url: str, question: str) -> SearchAnswer:
    """Ask one server once, without the patience of a client."""
    from rlsys.search.wire import Fault, HttpWire, NoReplyError, passages_of, request_body

    token = os.environ.get(settings.token_env) if settings.token_env else None
    wire, limit_s = HttpWire(token), min(settings.timeout_s, _SEARCH_S)
    try:
        async with asyncio.timeout(limit_s):
            reply = await wire.post(f"{url.rstrip('/')}/retrieve", request_body([question], settings.topk))
        return SearchAnswer(url, len(passages_of(reply, 1, settings.topk)[0]))
    except TimeoutError:
        return SearchAnswer(url, 0, f"no answer within {limit_s:g} s")
    except (NoReplyError, Fault) as problem:
        return SearchAnswer(url, 0, str(problem))
    finally:
        await wire.close()


if __name__ == "__main__":
    print(json.dumps(_join_and_look(sys.argv[1])))
