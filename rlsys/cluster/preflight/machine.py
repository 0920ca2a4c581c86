"""The probes of the machine that this process is on."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import psutil

from rlsys.cluster.preflight.probes import Answer, Disk, Gpu, Gpus, RayCluster, RayNode, Tenant, Unseen
from rlsys.config.schema import SearchConfig
from rlsys.errors import RunError, UserError
from rlsys.observe.capabilities import Capabilities, detect, version_of

_GIB = 1024**3
_DRIVER_S, _CONNECT_S, _RAY_S, _SEARCH_S = 15.0, 3.0, 60.0, 10.0
_CARD_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version"
_TENANT_FIELDS = "gpu_uuid,pid,process_name,used_memory"


class ThisMachine:
    """See `rlsys.cluster.preflight.probes.Probes`."""

    @cached_property
    def _capabilities(self) -> Capabilities:
        return detect()

    def capabilities(self) -> Capabilities:
        """What is installed, and what torch sees."""
        return self._capabilities

    def gpus(self) -> Gpus:
        """Raises Unseen where the driver gives no answer."""
        cards = _nvidia_smi(f"--query-gpu={_CARD_FIELDS}")
        tenants = _nvidia_smi(f"--query-compute-apps={_TENANT_FIELDS}")
        return read_gpus(cards, tenants, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def version(self, package: str) -> str | None:
        """Of an installed package; None is absent."""
        return version_of(package)

    def disk(self, path: Path) -> Disk:
        """Where `path` is or will be. Raises Unseen."""
        whole = path.absolute()
        folder = next((one for one in (whole, *whole.parents) if one.exists()), whole)
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
        return {
            name: [one.address for one in addresses] for name, addresses in psutil.net_if_addrs().items() if name in up
        }

    def variable(self, name: str) -> str | None:
        """Of the environment."""
        return os.environ.get(name)

    def port_is_free(self, port: int) -> bool:
        """Whether a server could listen there, on all interfaces."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
        return True

    def ray(self, address: str) -> RayCluster:
        """The cluster at `address`. Raises Unseen where it cannot be joined."""
        from rlsys.cluster.look import cluster_at

        _require_listener(address)
        try:
            seen = cluster_at(address, _RAY_S)
        except RunError as problem:
            raise Unseen(str(problem)) from problem
        return RayCluster(tuple(RayNode(**node) for node in seen["nodes"]), seen["free"])

    def search(self, settings: SearchConfig, question: str) -> tuple[Answer, ...]:
        """What `url` and each of `replicas` answers."""
        return asyncio.run(_ask_all(settings, question))

    def search_differs(self, settings: SearchConfig) -> str:
        """In what the servers are no replicas of each other; empty where they are."""
        try:
            asyncio.run(_compare(settings))
        except UserError as problem:
            return str(problem)
        except RunError:  # None answers, which `search` has said of each.
            return ""
        return ""


def read_gpus(cards: str, tenants: str, visible: str | None) -> Gpus:
    """Read what nvidia-smi prints of cards and of the processes on them, in CSV without header and units.

    `visible` is CUDA_VISIBLE_DEVICES: CUDA takes cards up to the first that is none. Raises Unseen for other text.
    """
    try:
        rows = [[cell.strip() for cell in line.split(",")] for line in cards.splitlines() if line.strip()]
        driver = rows[0][5] if rows else ""
        everything = tuple(
            Gpu(int(index), uuid, name, _mib(total), _mib(used)) for index, uuid, name, total, used, _ in rows
        )
        found = tuple(_tenant(line) for line in tenants.splitlines() if line.strip())
    except (ValueError, IndexError) as problem:
        raise Unseen(f"nvidia-smi printed what is not understood ({problem})") from problem
    return Gpus(driver, _visible(everything, visible), found)


def _tenant(line: str) -> Tenant:
    """Of a process, whose name may have commas."""
    uuid, pid, rest = line.split(",", 2)
    name, used = rest.rsplit(",", 1)
    return Tenant(uuid.strip(), int(pid), Path(name.strip()).name, _mib(used.strip()))


def _visible(cards: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    if visible is None:
        return tuple(cards)
    chosen: list[Gpu] = []
    for name in filter(None, map(str.strip, visible.split(","))):
        card = next((one for one in cards if name == str(one.index) or one.uuid.startswith(name)), None)
        if card is None:
            break
        chosen.append(card)
    return tuple(chosen)


def _mib(text: str) -> float:
    """GiB of a number of MiB; what the driver does not tell counts as none."""
    return float(text) / 1024 if text.replace(".", "", 1).isdigit() else 0.0


def _nvidia_smi(query: str) -> str:
    """Its own process, which can be ended where a driver hangs."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=False)
    except FileNotFoundError as problem:
        raise Unseen("nvidia-smi is not here, so there is no NVIDIA driver") from problem
    except subprocess.TimeoutExpired as problem:
        raise Unseen(f"the NVIDIA driver gave no answer within {_DRIVER_S:g} s") from problem
    if done.returncode:
        said = (done.stdout or done.stderr).strip().splitlines()
        raise Unseen(f"nvidia-smi failed: {said[0] if said else done.returncode}")
    return done.stdout


def _require_listener(address: str) -> None:
    """Raise Unseen where nobody listens, which Ray would take long to say."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as problem:
        raise Unseen(f"nobody listens there ({problem.strerror or problem})") from problem


async def _ask_all(settings: SearchConfig, question: str) -> tuple[Answer, ...]:
    urls = [url for url in [settings.url, *settings.replicas] if url]
    return tuple(await asyncio.gather(*(_ask(settings, url, question) for url in urls)))


async def _ask(settings: SearchConfig, url: str, question: str) -> Answer:
    """Once, without the patience of a client."""
    from rlsys.search.wire import Fault, HttpWire, NoReplyError, passages_of, request_body

    token = os.environ.get(settings.token_env) if settings.token_env else None
    wire, limit_s = HttpWire(token), min(settings.timeout_s, _SEARCH_S)
    try:
        async with asyncio.timeout(limit_s):
            reply = await wire.post(f"{url.rstrip('/')}/retrieve", request_body([question], settings.topk))
        return Answer(url, len(passages_of(reply, 1, settings.topk)[0]))
    except TimeoutError:
        return Answer(url, 0, f"no answer within {limit_s:g} s")
    except (NoReplyError, Fault) as problem:
        return Answer(url, 0, str(problem))
    finally:
        await wire.close()


async def _compare(settings: SearchConfig) -> None:
    from rlsys.rollout.search_tool import open_client

    quick = replace(settings, retries=0, hedge_after_s=None, timeout_s=min(settings.timeout_s, _SEARCH_S))
    async with open_client(quick, topk=settings.topk) as client:
        await client.health()
