"""Probes this machine, and the Ray cluster and search servers that it can reach, for the preflight.

Contract: a probe leaves no process behind, and returns or raises `Unseen` within about a minute. Tests substitute a
subclass of `ThisMachine`.

Ray retries for minutes to join a cluster that is silent or requires another token, without a timeout option. A separate
process therefore probes the cluster: `python -m rlsys.cluster.preflight.machine ADDRESS` joins it, prints its nodes as
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
from fnmatch import fnmatch
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from rlsys.cluster.local_ray import require_listener
from rlsys.config.schema import SearchConfig
from rlsys.errors import RunError, UserError
from rlsys.observe.environment import Capabilities, detect, version_of
from rlsys.rollout.memory_saver import start_failure

_GIB = 1024**3
_DRIVER_S, _CONNECT_S, _RAY_S, _SEARCH_S = 15.0, 3.0, 60.0, 10.0


class Unseen(Exception):
    """A probe failed; the message is a phrase with the reason."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that this process may use."""

    index: int
    uuid: str
    name: str
    total_gib: float
    used_gib: float


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A compute process on a GPU."""

    uuid: str  # UUID of the GPU.
    pid: int
    name: str
    used_gib: float


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES exposes, and the compute processes of all GPUs."""

    driver: str
    cards: tuple[Gpu, ...]
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class Disk:
    """File system of a path that need not exist yet."""

    folder: Path  # Nearest existing parent folder.
    total_gib: float
    free_gib: float
    writable: bool


@dataclass(frozen=True, slots=True)
class RayMachine:
    """A live machine of a Ray cluster."""

    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A Ray cluster that this machine can join."""

    nodes: tuple[RayMachine, ...]
    free: Mapping[str, float]  # Unreserved resources of all nodes together.


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """One search server's response to a test question."""

    url: str
    passages: int
    error: str = ""  # Phrase with the reason for a failure; empty on success.


class ThisMachine:
    """Probes of the machine that starts the run."""

    @cached_property
    def capabilities(self) -> Capabilities:
        """Installed packages, and devices visible to torch."""
        return detect()

    def gpus(self) -> Gpus:
        """Return the visible GPUs. Raises Unseen if the driver does not respond."""
        cards = _nvidia_smi("--query-gpu=index,uuid,name,memory.total,memory.used,driver_version")
        processes = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
        return read_gpus(cards, processes, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def version(self, package: str) -> str | None:
        """Return the version of an installed package; None if it is absent."""
        return version_of(package)

    def foreign_cudnn(self) -> list[Path]:
        """Return the libraries of another cuDNN on this machine that torch's cuDNN would load.

        Empty unless torch's cuDNN comes from a wheel and CUDNN_HOME is set. Raises Unseen if the loader's cache cannot
        be read.
        """
        version, home = self.version("nvidia-cudnn-cu13"), os.environ.get("CUDNN_HOME")
        if version is None or home is None:
            return []
        return foreign_cudnn(Path(home, "lib"), version, os.environ.get("LD_LIBRARY_PATH", ""), _loader_cache())

    def memory_saver_failure(self) -> str:
        """Return why a process cannot start with torch-memory-saver, which must be installed; empty if it can."""
        return start_failure()

    def disk(self, path: Path) -> Disk:
        """Return the file system of `path`, which need not exist. Raises Unseen if it cannot be examined."""
        whole = path.absolute()
        folder = next((parent for parent in (whole, *whole.parents) if parent.exists()), whole)
        try:
            usage = shutil.disk_usage(folder)
        except OSError as problem:
            raise Unseen(f"{folder} cannot be examined ({problem.strerror})") from problem
        if not folder.is_dir():
            raise Unseen(f"{folder} is a file")
        writable = os.access(folder, os.W_OK | os.X_OK)
        return Disk(folder, usage.total / _GIB, usage.free / _GIB, writable)

    def memory_gib(self) -> float:
        """Return the available host memory in GiB."""
        return float(psutil.virtual_memory().available) / _GIB

    def interfaces(self) -> Mapping[str, Sequence[str]]:
        """Return the addresses of each network interface that is up, by interface name."""
        up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
        every = psutil.net_if_addrs().items()
        return {name: [each.address for each in addresses] for name, addresses in every if name in up}

    def variable(self, name: str) -> str | None:
        """Return an environment variable; None if it is not set."""
        return os.environ.get(name)

    def port_is_free(self, port: int) -> bool:
        """True if a server can listen at `port` on all interfaces."""
        with suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return True
        return False

    def ray(self, address: str) -> RayCluster | Unseen:
        """Return the cluster at `address`, or an Unseen with the reason why this machine cannot join it."""
        try:
            require_listener(address, _CONNECT_S)
            return cluster_at(address, _RAY_S)
        except OSError as problem:
            return Unseen(f"nothing listens there ({problem.strerror or problem})")
        except Unseen as problem:
            return problem

    def search(self, settings: SearchConfig, question: str) -> tuple[SearchAnswer, ...]:
        """Send `question` to `url` and all `replicas`, and return their responses."""

        async def ask_all() -> list[SearchAnswer]:
            urls = [url for url in [settings.url, *settings.replicas] if url]
            return await asyncio.gather(*(_ask(settings, url, question) for url in urls))

        return tuple(asyncio.run(ask_all()))

    def search_differs(self, settings: SearchConfig) -> str:
        """Return a sentence on how the servers differ; empty if they serve the same index."""
        from rlsys.rollout.tools.search_tool import open_client

        quick = replace(settings, retries=0, hedge_after_s=None, timeout_s=min(settings.timeout_s, _SEARCH_S))

        async def compare() -> None:
            async with open_client(quick, topk=settings.topk) as client:
                await client.health()

        with suppress(RunError):  # No server responds; `search` reports each.
            try:
                asyncio.run(compare())
            except UserError as problem:
                return str(problem)
        return ""


def cluster_at(address: str, timeout_s: float) -> RayCluster:
    """Probe the Ray cluster at `address`. Raises Unseen if this machine cannot join it within `timeout_s`."""
    command = [sys.executable, "-m", "rlsys.cluster.preflight.machine", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        out, complaints = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, complaints = "", process.communicate()[1]
    if "InvalidAuthToken" in complaints:
        raise Unseen("the cluster requires a token: export RAY_AUTH_MODE as on the machine that started it")
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
    """Parse nvidia-smi's CSV (no header, no units) of GPUs and of compute processes.

    `visible` is CUDA_VISIBLE_DEVICES; like CUDA, ignore everything from its first invalid entry on. Raises Unseen for
    output in another format.
    """
    try:
        rows = [[cell.strip() for cell in line.split(",")] for line in cards.splitlines() if line.strip()]
        driver = rows[0][5] if rows else ""
        found = [Gpu(int(index), uuid, name, _mib(total), _mib(used)) for index, uuid, name, total, used, _ in rows]
        running = []
        for line in filter(str.strip, processes.splitlines()):
            uuid, pid, rest = line.split(",", 2)
            name, used = rest.rsplit(",", 1)  # The name may contain commas.
            running.append(GpuProcess(uuid.strip(), int(pid), Path(name.strip()).name, _mib(used.strip())))
    except (ValueError, IndexError) as problem:
        raise Unseen(f"the output of nvidia-smi cannot be parsed ({problem})") from problem
    if visible is not None:
        names = filter(None, map(str.strip, visible.split(",")))
        chosen = (
            next((card for card in found if name == str(card.index) or card.uuid.startswith(name)), None)
            for name in names
        )
        found = [card for card in takewhile(bool, chosen) if card]
    return Gpus(driver, tuple(found), tuple(running))


def foreign_cudnn(own: Path, version: str, library_path: str, cache: str) -> list[Path]:
    """Return the libraries of other versions that the cuDNN `version` in the folder `own` would load.

    cuDNN loads its libraries by name: from the folders of `library_path` (LD_LIBRARY_PATH), then from `own`, then
    from `cache`, the output of `ldconfig -p`.
    """
    major, minor, patch = version.split(".")[:3]
    found: list[Path] = []
    for folder in filter(None, library_path.split(":")):
        found += sorted(Path(folder).glob(f"libcudnn*.so.{major}"))
    for line in cache.splitlines():
        name, _, path = line.strip().partition(" => ")
        name = name.split(" ")[0]
        if fnmatch(name, f"libcudnn*.so.{major}") and not (own / name).exists():
            found.append(Path(path))
    real = {file: file.resolve() for file in found}
    same = f".so.{major}.{minor}.{patch}"
    return [file for file, target in real.items() if target.parent != own.resolve() and not target.name.endswith(same)]


def _loader_cache() -> str:
    """Return the output of `ldconfig -p`; empty where there is no ldconfig. Raises Unseen if it does not respond."""
    program = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if program is None:
        return ""
    try:
        return subprocess.run([program, "-p"], capture_output=True, text=True, timeout=_DRIVER_S, check=False).stdout
    except subprocess.TimeoutExpired as problem:
        raise Unseen(f"{program} did not respond within {_DRIVER_S:g} s") from problem


def _mib(text: str) -> float:
    """Convert MiB as text to GiB; 0 if the driver does not report a number."""
    return float(text) / 1024 if text.replace(".", "", 1).isdigit() else 0.0


def _nvidia_smi(query: str) -> str:
    """Run nvidia-smi in a subprocess, so that a hanging driver times out. Raises Unseen on failure."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=True).stdout
    except FileNotFoundError as problem:
        raise Unseen("nvidia-smi is not installed, so there is no NVIDIA driver") from problem
    except subprocess.TimeoutExpired as problem:
        raise Unseen(f"the NVIDIA driver did not respond within {_DRIVER_S:g} s") from problem
    except subprocess.CalledProcessError as failed:
        said = (failed.stdout or failed.stderr).strip().splitlines()
        raise Unseen(f"nvidia-smi failed: {said[0] if said else failed.returncode}") from failed


async def _ask(settings: SearchConfig, url: str, question: str) -> SearchAnswer:
    """Query one server once, without a client's retries and hedging."""
    from rlsys.search.wire import Fault, HttpWire, NoReplyError, passages_of, request_body

    token = os.environ.get(settings.token_env, "").strip() if settings.token_env else ""
    wire, limit_s = HttpWire(token or None), min(settings.timeout_s, _SEARCH_S)
    try:
        async with asyncio.timeout(limit_s):
            reply = await wire.post(f"{url.rstrip('/')}/retrieve", request_body([question], settings.topk))
        return SearchAnswer(url, len(passages_of(reply, 1, settings.topk)[0]))
    except TimeoutError:
        return SearchAnswer(url, 0, f"no response within {limit_s:g} s")
    except (NoReplyError, Fault) as problem:
        return SearchAnswer(url, 0, str(problem))
    finally:
        await wire.close()


if __name__ == "__main__":
    print(json.dumps(_join_and_look(sys.argv[1])))
