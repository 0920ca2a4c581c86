"""Starts or joins Ray in this process, lists its machines, reserves bundles, and queries the head with a timeout.

A local Ray belongs to this run and stops with it, also after an exception or Ctrl-C. A cluster at an address is joined
and left; leaving it stops only the run's own actors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlsys.cluster.local_ray import (
    HEAD_GONE_S,
    HEALTH_CHECKS,
    RANK,
    end,
    local_ray,
    rays_own,
    require_listener,
    require_token,
    temporary_files_in,
)
from rlsys.config.schema import ClusterConfig, Device
from rlsys.errors import RunError, UserError

_log = logging.getLogger(__name__)
T = TypeVar("T")
RESOURCE = {Device.cpu: "CPU", Device.gpu: "GPU"}
POLL_S = 0.5  # Poll interval for missing machines.
DEVICES_POLL_S = 2.0
"""Interval at which machines are looked at while Ray finds the devices of a run."""
WATCH_S = 2.0
"""Interval at which a local Ray is watched."""
ANSWER_S = 30.0
"""Time-out of a query to Ray's head."""
_WAITS = 10
"""Number of waits that a time-out of a watched Ray is divided into."""
NEAR_CHECKS = HEALTH_CHECKS | {"health_check_timeout_ms": 2000, "gcs_rpc_server_reconnect_timeout_s": HEAD_GONE_S}
"""Settings of a Ray of this machine alone, which gives up a raylet that is silent for 16 s."""
_STOPS = "so the run was stopped: see its log, and the memory of this machine. resume=auto continues from the last checkpoint."
_STARTS = 3
"""Attempts to start a local Ray; the first may time out on a busy machine."""
SEES_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Environment variable that keeps Ray from setting CUDA_VISIBLE_DEVICES, even for a process that reserves no GPU."""
_NICENESS = "RAY_worker_niceness"
SLIVER = 0.001  # Share of a machine's own resource; any share places a bundle on that machine.
_HEAD = "node:__internal_head__"


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of the Ray cluster."""

    rank: int  # Rank given by `rlsys launch`, else the position in `machines`.
    came_with_rank: bool
    host: str
    address: str
    node_id: str  # Ray's node id.
    resource: str  # Ray resource that only this machine has.
    devices: Mapping[str, float]  # CPU and GPU slots.

    @property
    def name(self) -> str:
        """Name used in messages: `node 1 (gpu02, 10.0.0.2)`."""
        return f"node {self.rank} ({self.host}, {self.address})"

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


@contextmanager
def ray_runtime(
    cluster: ClusterConfig, bundle_sizes: Sequence[int], on: Sequence[int] | None = None
) -> Iterator[PlacementGroup]:
    """Join or start Ray, and reserve one bundle of `bundle_sizes[i]` devices for each i, each on one machine.

    `on[i]` is the machine of bundle i: an index into `machines()` restricted to machines that fit the largest bundle.
    Without `on`, Ray chooses. Raises RunError if the cluster still lacks machines or devices at the timeout, or if a machine
    that was chosen leaves.
    """
    with _local(cluster, sum(bundle_sizes)) if cluster.address is None else _joined(cluster.address):
        until = time.monotonic() + cluster.start_timeout_s
        chosen = [] if on is None else _chosen(cluster, max(bundle_sizes), on, until)
        places = [{machine.resource: SLIVER} for machine in chosen] or [{}] * len(bundle_sizes)
        resource = RESOURCE[cluster.device]
        shapes = [{resource: size} | place for size, place in zip(bundle_sizes, places, strict=True)]
        bundles = placement_group(shapes, strategy="PACK")
        _await_devices(bundles, cluster, chosen, until)
        try:
            yield bundles
        finally:
            if cluster.address is not None:  # A local Ray stops now; if its head is dead, the call would block.
                remove_placement_group(bundles)


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Connect to the Ray cluster at `address`, and disconnect on exit. Raises RunError if Ray does not let this process in."""
    try:
        _connect(address=address)
    except ConnectionError as problem:
        ray.shutdown()
        said = str(problem.__cause__ or problem)
        reason = said.strip().splitlines()[-1].rstrip(".") if said.strip() else "it gives no reason"
        if "No node info" in said:
            reason = "it has no node on this machine; run rlsys on a machine of that cluster"
        raise RunError(f"Ray at {address} cannot be joined: {reason}.") from problem
    try:
        yield
    finally:
        ray.shutdown()


def machines() -> list[Machine]:
    """Return the live machines in rank order.

    Machines that joined through `rlsys launch` carry a Ray resource with their rank; others follow them by host name.
    If no machine has a rank, the head comes first.
    """

    def rank_of(node: Mapping[str, Any]) -> int | None:
        return next((int(name.removeprefix(RANK)) for name in node["Resources"] if name.startswith(RANK)), None)

    found = [(rank_of(node), node) for node in ray.nodes() if node["Alive"]]
    ranked = any(rank is not None for rank, _ in found)

    def place(item: tuple[int | None, Mapping[str, Any]]) -> tuple[float, list[tuple[int, str]]]:
        rank, node = item
        unranked = float("inf") if ranked else _HEAD not in node["Resources"]
        return unranked if rank is None else rank, natural(node["NodeManagerHostname"])

    return [_machine(position, rank, node) for position, (rank, node) in enumerate(sorted(found, key=place))]


def lost(known: Sequence[Machine]) -> list[Machine]:
    """Return the machines of `known` that Ray reports dead, in order."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return [machine for machine in known if machine.node_id not in alive]


def remote_shell(shell: type, strategy: Any, log: Path, environment: Mapping[str, str], **options: Any) -> Any:
    """Start an actor of class `shell`, placed by `strategy`, and return its handle. By default it takes no device.

    Its process has normal priority unless RAY_worker_niceness in the driver's environment says otherwise. Ray's default
    of 15 gives every other busy process, such as a search server on the same machine, 28 times its share of a core.
    """
    variables = {_NICENESS: os.environ.get(_NICENESS, "0"), **environment}
    settings = {"num_cpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": variables}, **options}
    return ray.remote(shell).options(scheduling_strategy=strategy, **settings).remote(str(log), list(sys.path))


def _asked(ask: Callable[[], T]) -> Future[T]:
    """Call `ask`, a query to Ray, in a daemon thread, which does not keep the process alive if it blocks for ever."""
    result: Future[T] = Future()

    def work() -> None:
        result.set_running_or_notify_cancel()  # The thread cannot be cancelled.
        try:
            result.set_result(ask())
        except (ray.exceptions.RayError, RuntimeError, OSError) as problem:
            result.set_exception(problem)

    threading.Thread(target=work, daemon=True, name="asks-ray").start()
    return result


async def answer(ask: Callable[[], T], timeout_s: float = ANSWER_S) -> T:
    """Call `ask`, a query to Ray, with a timeout; Ray itself blocks for minutes if its head is dead.

    Raises RunError on timeout or if the query fails.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(_asked(ask))
    except TimeoutError:
        why = f"has not responded for {timeout_s:.0f} s"
    except (ray.exceptions.RayError, RuntimeError, OSError) as problem:
        why = f"rejects queries ({problem})"
    raise RunError(
        f"the head of the Ray cluster {why}, so the run was stopped. Check gcs_server's log and the memory of that "
        "machine. resume=auto continues from the last checkpoint."
    )


class RayWatch:
    """Finds out that a process of the Ray which this process has started has died or hangs. A no-op for a Ray of others.

    A call to Ray on the event loop may block for ever then. A thread therefore watches, and kills Ray's processes: a call
    that needs the raylet then ends this process with status 1, and any other fails.
    """

    def __init__(
        self, processes: Mapping[str, psutil.Process], is_lost: Callable[[], bool] = lambda: not machines()
    ) -> None:
        """`is_lost` asks Ray's head whether Ray's node is lost."""
        self._processes, self._is_lost = processes, is_lost

    def require_alive(self) -> None:
        """Raise RunError if a process has died."""
        gone, _ = psutil.wait_procs(self._processes.values(), timeout=0)
        for name, process in self._processes.items():
            if process in gone:
                raise RunError(f"Ray's process {name} has died, {_STOPS}")

    async def run(self, every_s: float = WATCH_S, timeout_s: float = ANSWER_S) -> None:
        """Watch until cancelled. Raises RunError if a process dies, or does not answer for 30 s (the head) or 16 s."""
        if not self._processes:
            return
        over, ended = threading.Event(), Future[None]()
        ended.set_running_or_notify_cancel()  # The thread ends it.

        def watch() -> None:
            try:
                while not over.wait(every_s):
                    self._check(timeout_s)
            except RunError as problem:
                if not over.is_set():
                    _log.warning("%s", problem)  # A call that blocks may end this process.
                    end(self._processes.values(), timeout_s=0.0)
                    ended.set_exception(problem)

        threading.Thread(target=watch, daemon=True, name="watches-ray").start()
        try:
            await asyncio.wrap_future(ended)
        finally:
            over.set()

    def _check(self, timeout_s: float) -> None:
        self.require_alive()
        asked = _asked(self._is_lost)
        # If an import stalls all threads of this process, the head is not to blame: a stall ends only one of these waits.
        for _ in range(_WAITS - 1):
            futures.wait([asked], timeout_s / _WAITS)
            self.require_alive()
        try:
            lost_node, name = asked.result(timeout_s / _WAITS), "raylet"
        except (TimeoutError, ray.exceptions.RayError, RuntimeError, OSError):
            lost_node, name = True, "gcs_server"
        self.require_alive()
        if lost_node:
            raise RunError(f"Ray's process {name} does not answer, {_STOPS}")


def hosts_of(bundles: PlacementGroup) -> dict[int, str]:
    """Return the host name of each bundle's machine, by bundle index."""
    hosts = {machine.node_id: machine.host for machine in machines()}
    nodes = placement_group_table(bundles)["bundles_to_node_id"]
    return {index: hosts.get(node_id, node_id) for index, node_id in nodes.items()}


def within(bundles: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Return the strategy that places an actor in bundle `index`; the actor's own children may run anywhere."""
    return PlacementGroupSchedulingStrategy(
        bundles, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
    )


def machines_of(bundles: PlacementGroup, alive: Iterable[Machine]) -> dict[int, Machine]:
    """Return bundle index -> its machine, without bundles that have none of `alive`."""
    by_id = {machine.node_id: machine for machine in alive}
    nodes = placement_group_table(bundles)["bundles_to_node_id"]
    return {index: by_id[node] for index, node in nodes.items() if node in by_id}


def device_ids(bundles: PlacementGroup, indices: Iterable[int], timeout_s: float) -> dict[int, tuple[str, ...]]:
    """Return the sorted GPU ids of each bundle, as CUDA_VISIBLE_DEVICES takes them, by bundle index.

    Runs a task that reserves the whole bundle, so no other process may hold part of it at that time.
    """

    @ray.remote(num_cpus=0, max_retries=0)
    def names() -> list[str]:
        return list(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]))

    refs = {}
    for index in indices:
        size = bundles.bundle_specs[index]["GPU"]
        refs[index] = names.options(num_gpus=size, scheduling_strategy=within(bundles, index)).remote()
    try:
        answers = ray.get(list(refs.values()), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as late:
        raise RunError(f"waited {timeout_s:.0f} s for the cluster to list the GPUs of its bundles.") from late
    return {index: tuple(sorted(ids, key=natural)) for index, ids in zip(refs, answers, strict=True)}


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places node-2 before node-10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _connect(**options: Any) -> None:
    """Call `ray.init` quietly, and restore the signal handlers that it replaces.

    Ray installs SIGTERM handlers, in Python and in C, that end the process with a stack trace at any point. Restoring
    the previous handlers allows an orderly shutdown.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT) if main}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _chosen(cluster: ClusterConfig, devices: int, on: Sequence[int], until: float) -> list[Machine]:
    """Wait for enough machines, and return the machine of each bundle."""
    resource = RESOURCE[cluster.device]
    while True:
        fit = [machine for machine in machines() if machine.devices[resource] >= devices]
        if len(fit) > max(on):
            return [fit[number] for number in on]
        if time.monotonic() > until:
            have = ", ".join(f"{machine.host} with {machine.devices[resource]:g}" for machine in machines())
            raise RunError(
                f"the cluster has {len(fit)} machines with {devices} {cluster.device} slots, but cluster.nodes="
                f"{cluster.nodes} needs {max(on) + 1} (waited {cluster.start_timeout_s:.0f} s; its machines: {have}): "
                "start Ray on the missing ones, or place the groups on fewer."
            )
        time.sleep(POLL_S)


def _await_devices(bundles: PlacementGroup, cluster: ClusterConfig, chosen: Sequence[Machine], until: float) -> None:
    """Wait until all bundles are placed. Raises RunError at `until`, or if one of the machines `chosen` leaves."""
    while not bundles.wait(DEVICES_POLL_S):
        if gone := lost(chosen):
            names = " and ".join(dict.fromkeys(machine.name for machine in gone))
            raise RunError(
                f"{names} left the cluster before the run could start: check power, network and memory there, and start the "
                "run again."
            )
        if time.monotonic() > until:
            resource = RESOURCE[cluster.device]
            have = int(ray.cluster_resources().get(resource, 0))
            raise RunError(
                f"the cluster did not provide {int(sum(spec.get(resource, 0) for spec in bundles.bundle_specs))} "
                f"{cluster.device} slots within {cluster.start_timeout_s:.0f} s (it has {have} in total): free some, or place "
                "the groups on fewer."
            )


def _machine(position: int, rank: int | None, node: Mapping[str, Any]) -> Machine:
    return Machine(
        rank=position if rank is None else rank,
        came_with_rank=rank is not None,
        host=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        node_id=node["NodeID"],
        resource=f"node:{node['NodeManagerAddress']}" if rank is None else f"{RANK}{rank}",
        devices={name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")},
    )


def _joined(address: str) -> AbstractContextManager[None]:
    """Return `joined(address)`. Raises UserError if nothing listens there."""
    try:
        require_listener(address, timeout_s=5)
    except OSError as problem:
        raise UserError(
            f"cluster.address={address}: no Ray cluster answers there ({problem.strerror or problem}); start one "
            "with `ray start --head`, or set cluster.address=null for a local one.",
            code="unreachable",
            key="cluster.address",
        ) from problem
    return joined(address)


@contextmanager
def _local(cluster: ClusterConfig, slots: int) -> Iterator[None]:
    """Start a Ray reachable only from this machine, with the user's token; on exit stop all its processes."""
    require_token(os.environ, make=True)
    on_cpus = {"num_cpus": slots, "object_store_memory": 512 * 1024 * 1024} if cluster.device is Device.cpu else {}
    with local_ray(ray.shutdown) as folder:
        for attempt in range(1, _STARTS + 1):
            try:
                with temporary_files_in(folder):
                    own = {"_temp_dir": str(rays_own(folder)), "_system_config": NEAR_CHECKS}
                    _connect(address="local", include_dashboard=False, **own, **on_cpus)
                break
            except Exception as problem:  # Ray raises a bare Exception if its processes take longer than 30 s to start.
                ray.shutdown()
                if attempt == _STARTS:
                    reason = str(problem).partition("\n")[0].rstrip(".")
                    raise RunError(
                        f"Ray failed to start on this machine {_STARTS} times ({reason}): stop other programs here, and retry."
                    ) from problem
        yield
