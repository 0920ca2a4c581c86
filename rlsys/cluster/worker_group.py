"""Groups of worker processes, one Ray actor per rank, called together. Workers are plain objects without Ray.

Contract:
- Every wait has a timeout, and its error names the missing ranks. At the time limit of a call, the stacks of all
  processes of the run are written first, and the error names the function that each missing rank is in.
- Calls to one rank run in order.
- A rank that dies or raises ends the call at once, with the last lines of its log in the error.
- If one rank's death makes other ranks fail, the error reports the death.
- Calls to several groups whose processes exchange data are awaited by `together`.

Calls raise `RankDied` if a rank's process died, and `RankSilent` if a rank did not respond in time. A UserError or RunError
of the worker is re-raised unchanged, except that a RunError without a code from its start gets the last lines of its log;
any other exception of the worker becomes a RunError.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup

from rlsys.cluster.local_ray import interface_settings, own_addresses, promised_port, ray_parent
from rlsys.cluster.planning.placement import DeviceSlot
from rlsys.cluster.runtime import RESOURCE, SEES_ALL_GPUS, device_ids, hosts_of, remote_shell, within
from rlsys.cluster.seats import Seats
from rlsys.cluster.stacks import SIGNAL, StackWriter, call_of, processes_of
from rlsys.config.derived import stage_limits
from rlsys.config.schema import ClusterConfig, Device
from rlsys.errors import PeerLost, RunError, UserError, root_cause

_START = "to start"
DEATH_S = 10.0
"""Time to wait for Ray to report a dead process, after its peers have already failed."""
GATHERED = "nodes"
"""Subfolder of a run's logs with the logs of all machines: `logs/nodes/<time of the launch>/<rank>/`."""
NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""NCCL variable -> value in all workers on GPUs, unless the driver's environment has another. SGLang sets these values in an
engine's process where they are unset; a trainer in the same NCCL group would keep NCCL's defaults, and two processes of one
machine that differ in NCCL_CUMEM_ENABLE cannot map each other's buffers."""
GPU_THREADS = 8
"""CPU threads of a worker on a GPU if cluster.threads is null. Ray would set OMP_NUM_THREADS to 1 in a worker that reserves
no CPU, but copies of weights in host memory need several threads. 64 cores give each of 8 GPUs this many."""
STAGES = {
    "compute": "scoring",
    **dict.fromkeys(("accumulate", "apply", "end_step"), "training"),
    **dict.fromkeys(("open_transport", "open_export", "begin_update", "load_bucket", "finish_update"), "sync"),
    **dict.fromkeys(("begin_export", "next_handle", "end_export"), "sync"),
    **dict.fromkeys(("begin_save", "finish_save", "load"), "checkpoint"),
    **dict.fromkeys(("offload", "restore", "sleep", "wake"), "switch"),
}
"""Method of a worker -> its stage in `cluster.stage_timeout_s`."""
POLLS = frozenset({"metrics", "activity", "in_flight", "saving"})
"""Methods whose answer is no progress: a run that hangs still polls."""
_LOCATED = 8
"""Maximum number of ranks whose call an error names."""
_DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)
"""Exceptions that Ray raises if a worker's process is gone, or the machine that holds its result."""
_OF_MEMORY = ("NODE_OUT_OF_MEMORY", "running low on memory")
"""Phrases in Ray's error for a process killed by its memory monitor."""


class RankLost(RunError):
    """A worker died or hangs."""

    def __init__(self, message: str, rank: int, name: str = "") -> None:
        super().__init__(message)
        self.rank, self.name = rank, name
        """Rank of the lost worker in its group, and name of the worker."""


class RankDied(RankLost):
    """A worker's process died."""


class RankSilent(RankLost):
    """A worker did not respond in time; if several workers did not, `rank` is the first of them."""


@dataclass(frozen=True, slots=True)
class Rank:
    number: int
    name: str
    handle: Any
    log: Path


class WorkerGroup:
    """Handles to the ranks of one group."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[Rank],
        timeout_s: float,
        stage_timeout_s: Mapping[str, float] | None = None,
        stacks: StackWriter | None = None,
        start: Callable[[int], Rank] | None = None,
        seats: Seats | None = None,
    ) -> None:
        """`start` starts the process of a rank, for `restart`; `seats` are the devices of the ranks."""
        self.name = name
        self.ranks = tuple(ranks)
        self.finished = 0
        """Number of finished calls, without `POLLS`."""
        self._timeout_s, self._stage_timeout_s = timeout_s, stage_timeout_s or {}
        self._stacks, self._start, self._seats = stacks, start, seats

    @classmethod
    def launch(
        cls,
        name: str,
        bundles: PlacementGroup,
        seats: Sequence[DeviceSlot],
        cluster: ClusterConfig,
        log_dir: Path,
        *,
        concurrency: int = 0,
        variables: Mapping[str, str] | None = None,
        stacks: StackWriter | None = None,
        near: int | None = None,
    ) -> WorkerGroup:
        """Start one empty worker process per seat; each sees only the devices of its seat.

        `near` is a bundle on whose machine processes must be that join later; None if they may be on any machine.
        `concurrency` above 0 makes the workers asynchronous, with that many concurrent calls. `variables` are added to
        their environment. `stacks` writes the stacks of the run's processes when a call reaches its time limit.
        """
        machines = hosts_of(bundles) if cluster.nodes > 1 else {}
        places = Seats(bundles, seats, cluster, near)
        pinned = {seat.bundle for seat in seats if seat.pinned and cluster.device is Device.gpu}
        named = device_ids(bundles, pinned, cluster.start_timeout_s)

        def start(number: int) -> Rank:
            held, seat = places.of(number)
            log = (log_dir / f"{name}-{number}.log").resolve()
            ids = [named[seat.bundle][device] for device in seat.devices] if seat.pinned and named else None
            options: dict[str, Any] = {"max_concurrency": concurrency} if concurrency else {}
            if ids is None and held is not None:
                options["num_cpus" if RESOURCE[cluster.device] == "CPU" else "num_gpus"] = seat.share
            environment = {**(variables or {}), **_environment(cluster, ids)}
            host = AsyncHost if concurrency else SyncHost
            strategy = "DEFAULT" if held is None else within(held, seat.bundle)
            handle = remote_shell(host, strategy, log, environment, **options)
            where = f" (on {machines[seat.bundle]})" if machines and held is bundles else ""
            return Rank(number, f"{name} rank {number}{where}", handle, log)

        ranks = [start(number) for number in range(len(seats))]
        return cls(name, ranks, cluster.call_timeout_s, stage_limits(cluster), stacks, start, places)

    @property
    def seats(self) -> Seats:
        """Devices of the ranks. Raises RuntimeError for a group that was not launched."""
        if self._seats is None:
            raise RuntimeError(f"Group {self.name} has no devices.")
        return self._seats

    async def build(
        self, factory: Callable[..., Any], arguments: Sequence[tuple], timeout_s: float, only: int | None = None
    ) -> None:
        """Create each rank's worker in its process: `factory(*arguments[rank])`. `only` selects one rank."""
        ranks = self.ranks if only is None else (self.ranks[only],)
        refs = [rank.handle.build.remote(factory, *args) for rank, args in zip(ranks, arguments, strict=True)]
        await self._gather(refs, _START, timeout_s, ranks)

    async def free_address(self, timeout_s: float) -> tuple[str, int]:
        """Return host and a free port of rank 0, for the rendezvous of torch.distributed."""
        address, port = (await self._gather([self.ranks[0].handle.free_address.remote()], _START, timeout_s))[0]
        return address, port

    @property
    def driver_host(self) -> str:
        """Address of this process in the cluster."""
        return str(ray.util.get_node_ip_address())

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call `method` on every rank with the same arguments, and return the results in rank order."""
        return await self.call_each(method, [args] * len(self.ranks), timeout_s=timeout_s)

    async def call_each(self, method: str, arguments: Sequence[tuple], timeout_s: float | None = None) -> list[Any]:
        """Call `method` on every rank, each with its own arguments, and return the results in rank order."""
        refs = [rank.handle.call.remote(method, *args) for rank, args in zip(self.ranks, arguments, strict=True)]
        return await self._finish(method, refs, timeout_s)

    async def call_rank(
        self,
        index: int,
        method: str,
        *args: Any,
        timeout_s: float | None = None,
        until: asyncio.Future[str] | None = None,
    ) -> Any:
        """Call `method` on one rank. If `until` completes first, raise RankDied with its result as the message."""
        if until is not None and until.done():
            raise RankDied(until.result(), index)
        rank = self.ranks[index]
        ref = rank.handle.call.remote(method, *args)
        return (await self._finish(method, [ref], timeout_s, [rank], until))[0]

    async def require_alive(self, timeout_s: float | None = None) -> None:
        """Wait until every rank answers. Raises RankDied if one has died, RankSilent if one is late."""
        refs = [rank.handle.__ray_ready__.remote() for rank in self.ranks]
        await self._gather(refs, "to answer", self._timeout_s if timeout_s is None else timeout_s)

    def kill(self) -> None:
        """Kill every worker process at once."""
        for rank in self.ranks:
            self.kill_rank(rank.number)

    def restart(self, only: int | None = None) -> None:
        """Kill every worker process, and start one without a worker on the same devices in place of each. `only` selects
        one rank, which may be the next one after the last."""
        if self._start is None:
            raise RuntimeError(f"The processes of group {self.name} cannot be started again.")
        new = list(self.ranks)
        for index in range(len(new)) if only is None else (only,):
            self.kill_rank(index)
            new[index : index + 1] = [self._start(index)]
        self.ranks = tuple(new)

    def kill_rank(self, index: int) -> None:
        """Kill one worker process at once; calls to it in flight raise RankDied."""
        with contextlib.suppress(Exception):  # The process may be gone already.
            if ray.is_initialized():  # Otherwise ray.kill would start a Ray.
                ray.kill(self.ranks[index].handle)

    def memory_bytes(self) -> int:
        """Return the memory of the largest rank on this machine with its child processes.

        What processes share, such as the pages of a fork and its parent, counts by their shares.
        """
        sizes: dict[Path, int] = {rank.log: 0 for rank in self.ranks}
        for pid, log in processes_of(os.path.realpath(self.ranks[0].log.parent)):
            with contextlib.suppress(psutil.Error):
                sizes[log] = sizes.get(log, 0) + psutil.Process(pid).memory_full_info().pss
        return max(sizes[rank.log] for rank in self.ranks)

    def log_tail(self, index: int) -> str:
        """Return the last lines of one worker's log, to append to a message."""
        return _tail(self.ranks[index])

    async def located(self, ranks: Sequence[Rank]) -> str:
        """Write the stacks of all processes of the run; return which function each of `ranks` is in, as a clause.

        Call it before a hung process is killed. Empty if the group has no `stacks`.
        """
        if self._stacks is None:
            return ""
        found = await self._stacks.dump()
        calls = {rank.name: call_of(found.texts.get(rank.log.stem, "")) for rank in ranks[:_LOCATED]}
        places = [f"{name} is in {call}" for name, call in calls.items() if call]
        return "; ".join([*places, f"the stacks of all processes are in {found.folder}"])

    async def _finish(
        self,
        method: str,
        refs: Sequence[Any],
        timeout_s: float | None,
        ranks: Sequence[Rank] | None = None,
        until: asyncio.Future[str] | None = None,
    ) -> list[Any]:
        """Return the results of `refs`, calls of `method`; its default time limit is that of its stage.

        Callers with a limit of their own, neither that of the stage nor of the group, handle late ranks themselves.
        """
        own_s = self._stage_timeout_s.get(STAGES.get(method, ""), self._timeout_s)
        limit_s = own_s if timeout_s is None else timeout_s
        results = await self._gather(
            refs, f"to finish {method}", limit_s, ranks, until, locate=timeout_s in (None, self._timeout_s)
        )
        self.finished += method not in POLLS
        return results

    async def _gather(
        self,
        refs: Sequence[Any],
        purpose: str,
        limit: float,
        ranks: Sequence[Rank] | None = None,
        until: asyncio.Future[str] | None = None,
        locate: bool = True,
    ) -> list[Any]:
        """Return the results of `refs`; the first failure, the time limit or `until` ends the wait.

        With `locate`, the stacks of late ranks are written before the error is raised.
        """
        ranks = self.ranks if ranks is None else ranks
        waits = [asyncio.wrap_future(ref.future()) for ref in refs]
        names = dict(zip(waits, ranks, strict=False))
        try:
            if until is None:
                done, missing = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            else:
                done, missing = await asyncio.wait([*waits, until], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not waits[0].done() and until.done():
                    raise RankDied(until.result(), ranks[0].number)
                done, missing = done - {until}, missing - {until}
            problems = [wait.exception() for wait in done]
            causes = [problem.cause for problem in problems if isinstance(problem, ray.exceptions.RayTaskError)]
            # A rank may fail because a peer in its collectives has died.
            if any(
                not isinstance(cause, UserError | RunError | None) or isinstance(cause, PeerLost) for cause in causes
            ):
                later, missing = await _until_death(missing)
                done |= later
            for wait in sorted(done, key=lambda wait: not isinstance(wait.exception(), _DEATHS)):
                problem = wait.exception()
                if problem is not None:
                    raise _explain(names[wait], purpose, problem) from problem
            if missing:
                late = [names[wait] for wait in waits if wait in missing]
                who = ", ".join(rank.name for rank in late)
                where = await self.located(late) if locate else ""
                sentence = f"waited {limit:.0f} s for {who} {purpose}{where and f': {where}'}."
                raise RankSilent(f"{sentence}\n{_tail(late[0])}", late[0].number, late[0].name)
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()


class _Shell:
    """Ray actor that hosts a worker: `build` creates the plain worker object, `call` calls its methods.

    Redirects stdout and stderr of the process, native libraries included, to its own log file.
    """

    def __init__(self, log: str, path: list[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.enable(file=2)
        faulthandler.register(SIGNAL, file=2)
        self._worker: Any = None
        self._promised: list[socket.socket] = []
        # torch and SGLang use the same network as Ray's nodes; on a single machine, the loopback interface.
        os.environ.update(interface_settings(ray.util.get_node_ip_address(), own_addresses()))

    def free_address(self) -> tuple[str, int]:
        """Return this machine's address in the cluster and a port reserved for this run; see `promised_port`."""
        self._promised.append(promised_port())
        return ray.util.get_node_ip_address(), int(self._promised[-1].getsockname()[1])


class SyncHost(_Shell):
    """Runs one call at a time."""

    def build(self, factory: Callable[..., Any], *args: Any) -> None:
        self._worker = factory(*args)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)


class AsyncHost(_Shell):
    """Runs many calls concurrently on one event loop."""

    async def build(self, factory: Callable[..., Any], *args: Any) -> None:
        """Create the worker and await its `start()`."""
        self._worker = factory(*args)
        await self._worker.start()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker, and await the result if it is awaitable."""
        result = getattr(self._worker, method)(*args)
        return await result if inspect.isawaitable(result) else result


async def together(*calls: Awaitable[Any]) -> list[Any]:
    """Await calls to processes that exchange data with each other; return their results in order.

    An error ends the wait and cancels the other waits. PeerLost is raised only once all calls have ended: the other
    calls tell who has died, and no process is still busy when its next call begins.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                if not isinstance(task.exception(), PeerLost):
                    task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def share(value: Any) -> Any:
    """Put `value` into Ray's object store once, to pass it to many calls. Raises RunError if memory and disk are full."""
    try:
        return ray.put(value)
    except ray.exceptions.OutOfDiskError as problem:
        raise RunError(
            f"Ray's object store and the disk of its folder in {ray_parent()} are full: free some space there, or set TMPDIR "
            "to a folder of another disk.",
            code="no_room",
        ) from problem


def _environment(cluster: ClusterConfig, device_ids: Sequence[str] | None) -> dict[str, str]:
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    threads = cluster.threads or (GPU_THREADS if cluster.device is Device.gpu else None)
    environment = {name: str(threads) for name in limits} if threads else {}
    if cluster.device is Device.gpu:
        environment |= {name: os.environ.get(name, value) for name, value in NCCL_SETTINGS.items()}
    else:
        # On a CPU, torch.compile needs a C++ compiler. Disabling it also imports Megatron and SGLang 0.8 s faster.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if device_ids is not None:
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(device_ids), SEES_ALL_GPUS: "1"}
    if level := os.environ.get("RLSYS_LOG"):
        environment["RLSYS_LOG"] = level
    return environment | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


async def _until_death(waits: set[asyncio.Future[Any]]) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
    """Wait until one of `waits` reports a dead rank, at most `DEATH_S`. Returns the waits that are done and the pending
    waits."""
    until = time.monotonic() + DEATH_S
    done: set[asyncio.Future[Any]] = set()
    while waits and not any(isinstance(wait.exception(), _DEATHS) for wait in done):
        left = until - time.monotonic()
        more, waits = await asyncio.wait(waits, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
        done |= more
        if left <= 0:
            break
    return done, waits


def _explain(rank: Rank, purpose: str, problem: BaseException) -> Exception:
    """Turn a rank's failure into an error with one sentence and the last lines of its log."""
    if isinstance(problem, ray.exceptions.RayTaskError):
        cause = problem.cause if isinstance(problem.cause, Exception) else problem
        shown = root_cause(cause, f"a file of its machine, such as its log {rank.log},")
        # The reason may be in the log, of a process that the worker has started.
        if purpose == _START and type(cause) is RunError and cause.code is None:
            return RunError(f"{cause}\n{_tail(rank)}")
        if isinstance(cause, UserError | RunError):
            return cause
        if isinstance(shown, RunError):
            return RunError(f"{rank.name} failed {purpose}: {shown}", code=shown.code)
        return RunError(f"{rank.name} failed {purpose}: {type(cause).__name__}: {cause}\n{_tail(rank)}")
    if isinstance(problem, _DEATHS):
        died = f"{rank.name} died before it could {purpose.removeprefix('to ')}"
        if isinstance(problem, ray.exceptions.OutOfMemoryError) or any(sign in str(problem) for sign in _OF_MEMORY):
            died += (
                ": Ray killed it because the memory of its machine was nearly full; free some there, place the groups "
                "on more machines, or use a smaller model"
            )
        return RankDied(f"{died}.\n{_tail(rank)}", rank.number, rank.name)
    return RunError(f"the call to {rank.name} {purpose} failed: {type(problem).__name__}: {problem}\n{_tail(rank)}")


def _tail(rank: Rank) -> str:
    """Return the last lines of a rank's log, or of the copy gathered from its machine."""
    gathered = sorted(rank.log.parent.glob(f"{GATHERED}/*/*/workers/{rank.log.name}"), reverse=True)
    log = next((file for file in (rank.log, *gathered) if file.is_file()), None)
    if log is None:
        return f"Its log should be at {rank.log} on its own machine."
    lines = log.read_text(errors="replace").splitlines()[-15:]
    return "\n".join([f"The last lines of {log}:", *(f"    {line}" for line in lines)])
