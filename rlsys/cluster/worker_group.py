"""A group of worker processes, one Ray actor a rank, called together.

Contract: every wait has a time-out and names the ranks that are missing; a rank that dies or raises ends the call at once
with the last lines of its log; calls to one rank are carried out in order. Where a death makes other ranks fail, it is the
death that is told. A rank that died (`RankDied`), one that does not answer in time (`RankSilent`) and one whose worker
raised (its UserError or RunError as it is, else a RunError) are told apart. Workers are plain objects that know no Ray.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from rlsys.cluster.local_ray import interface_settings, own_addresses, promised_port
from rlsys.cluster.planning.placement import DeviceSlot
from rlsys.cluster.runtime import RESOURCE, SEES_ALL_GPUS, device_ids, hosts_of, remote_shell, within
from rlsys.config.schema import ClusterConfig, Device
from rlsys.errors import RunError, UserError

DEATH_S = 10.0
"""In which the death of a process becomes known, later than to those that it was connected with."""
GATHERED = "nodes"
"""Folder of a run's logs that has those of machines of their own, each by the time of the launch and its rank."""
_DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)
"""What Ray raises when a worker's process is gone, or its machine with the answer."""
_OF_MEMORY = ("NODE_OUT_OF_MEMORY", "running low on memory")
"""In Ray's words for a process that its memory monitor has ended."""


class _RankLost(RunError):
    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        """Its number in the group."""


class RankDied(_RankLost):
    """The process of a worker is gone."""


class RankSilent(_RankLost):
    """A worker has not answered in time, the first of several."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker of a group."""

    number: int
    name: str
    handle: Any
    log: Path


class WorkerGroup:
    """Handles to the ranks of one group."""

    def __init__(self, name: str, ranks: Sequence[Rank], timeout_s: float) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self._timeout_s = timeout_s

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
    ) -> WorkerGroup:
        """Start one empty worker process in each of `seats`, which see the devices of their seats alone.

        `concurrency` above 0 makes the workers asynchronous, with that many calls at a time. `variables` are set in
        their environment.
        """
        machines = hosts_of(bundles) if cluster.nodes > 1 else {}
        pinned = {seat.bundle for seat in seats if seat.pinned and cluster.device is Device.gpu}
        named = device_ids(bundles, pinned, cluster.start_timeout_s)
        ranks = []
        for number, seat in enumerate(seats):
            log = (log_dir / f"{name}-{number}.log").resolve()
            ids = [named[seat.bundle][device] for device in seat.devices] if seat.bundle in named else None
            options: dict[str, Any] = {"max_concurrency": concurrency} if concurrency else {}
            if ids is None:
                options["num_cpus" if RESOURCE[cluster.device] == "CPU" else "num_gpus"] = seat.share
            environment = {**(variables or {}), **_environment(cluster.threads, ids)}
            host = AsyncHost if concurrency else SyncHost
            handle = remote_shell(host, within(bundles, seat.bundle), log, environment, **options)
            where = f" (on {machines[seat.bundle]})" if machines else ""
            ranks.append(Rank(number, f"{name} rank {number}{where}", handle, log))
        return cls(name, ranks, cluster.call_timeout_s)

    async def build(self, factory: Callable[..., Any], arguments: Sequence[tuple], timeout_s: float) -> None:
        """Make the worker object of each rank: `factory(*arguments[rank])`, in its process."""
        refs = [rank.handle.build.remote(factory, *args) for rank, args in zip(self.ranks, arguments, strict=True)]
        await self._gather(refs, "to start", timeout_s)

    async def free_address(self, timeout_s: float) -> tuple[str, int]:
        """Host and a free port of rank 0, for torch.distributed to meet at."""
        address, port = (await self._gather([self.ranks[0].handle.free_address.remote()], "to start", timeout_s))[0]
        return address, port

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call `method` on every rank with the same arguments; results in rank order."""
        return await self.call_each(method, [args] * len(self.ranks), timeout_s=timeout_s)

    async def call_each(self, method: str, arguments: Sequence[tuple], timeout_s: float | None = None) -> list[Any]:
        """Call `method` on every rank, each with its own arguments; results in rank order."""
        refs = [rank.handle.call.remote(method, *args) for rank, args in zip(self.ranks, arguments, strict=True)]
        return await self._gather(refs, f"to finish {method}", timeout_s)

    async def call_rank(
        self,
        index: int,
        method: str,
        *args: Any,
        timeout_s: float | None = None,
        until: asyncio.Future[str] | None = None,
    ) -> Any:
        """Call `method` on one rank. Raises RankDied once `until` is done, whose result is the reason."""
        if until is not None and until.done():
            raise RankDied(until.result(), index)
        rank = self.ranks[index]
        ref = rank.handle.call.remote(method, *args)
        return (await self._gather([ref], f"to finish {method}", timeout_s, [rank], until))[0]

    def kill(self) -> None:
        """End every worker process at once."""
        for rank in self.ranks:
            self.kill_rank(rank.number)

    def kill_rank(self, index: int) -> None:
        """End one worker process at once; calls to it that still wait then raise RankDied."""
        with contextlib.suppress(Exception):  # already gone is as good
            ray.kill(self.ranks[index].handle)

    def log_tail(self, index: int) -> str:
        """What one worker last wrote, as lines to add to a message."""
        return _tail(self.ranks[index])

    async def _gather(
        self,
        refs: Sequence[Any],
        purpose: str,
        timeout_s: float | None,
        ranks: Sequence[Rank] | None = None,
        until: asyncio.Future[str] | None = None,
    ) -> list[Any]:
        """Results of `refs`; the first failure, the time-out or `until` ends the wait."""
        ranks = self.ranks if ranks is None else ranks
        limit = self._timeout_s if timeout_s is None else timeout_s
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
            # A rank may have failed because another one, which it exchanges tensors with, is gone.
            if not all(isinstance(cause, UserError | RunError | None) for cause in causes):
                later, missing = await _until_death(missing)
                done |= later
            for wait in sorted(done, key=lambda wait: not isinstance(wait.exception(), _DEATHS)):
                problem = wait.exception()
                if problem is not None:
                    raise _explain(names[wait], purpose, problem) from problem
            if missing:
                late = [names[wait] for wait in waits if wait in missing]
                who = ", ".join(rank.name for rank in late)
                raise RankSilent(f"waited {limit:.0f} s for {who} {purpose}.\n{_tail(late[0])}", late[0].number)
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()


class _Shell:
    """A worker's process: empty until a plain object is built in it, whose methods are then called.

    Everything that the process writes goes to its own log file, native libraries' output included.
    """

    def __init__(self, log: str, path: list[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.enable(file=2)
        self._worker: Any = None
        self._promised: list[socket.socket] = []
        # The groups of torch and SGLang meet on the network that Ray's nodes meet on: of one machine, its loopback.
        os.environ.update(interface_settings(ray.util.get_node_ip_address(), own_addresses()))

    def free_address(self) -> tuple[str, int]:
        """This machine's address in the cluster and a port that is nobody else's until one of this run listens at it."""
        self._promised.append(promised_port())
        return ray.util.get_node_ip_address(), int(self._promised[-1].getsockname()[1])


class SyncHost(_Shell):
    """Carries out one call at a time."""

    def build(self, factory: Callable[..., Any], *args: Any) -> None:
        """Make the worker."""
        self._worker = factory(*args)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*args)


class AsyncHost(_Shell):
    """Carries out many calls at a time on one event loop."""

    async def build(self, factory: Callable[..., Any], *args: Any) -> None:
        """Make the worker; a `start` coroutine method of it is awaited."""
        self._worker = factory(*args)
        await self._worker.start()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker, awaiting what is awaitable."""
        result = getattr(self._worker, method)(*args)
        return await result if inspect.isawaitable(result) else result


def share(value: Any) -> Any:
    """Put `value` into the cluster's object store once, to be passed to many calls."""
    return ray.put(value)


def _environment(threads: int | None, device_ids: Sequence[str] | None) -> dict[str, str]:
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    environment = {name: str(threads) for name in limits} if threads else {}
    if device_ids is not None:
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(device_ids), SEES_ALL_GPUS: "1"}
    if level := os.environ.get("RLSYS_LOG"):
        environment["RLSYS_LOG"] = level
    return environment | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


async def _until_death(waits: set[asyncio.Future[Any]]) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
    """Those of `waits` that are done, and the others, once one of them is known to be of a dead rank, or soon."""
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
    """The failure of a rank as one sentence, with what it last wrote."""
    if isinstance(problem, ray.exceptions.RayTaskError):
        cause = problem.cause if isinstance(problem.cause, Exception) else problem
        if isinstance(cause, UserError | RunError):
            return cause
        return RunError(f"{rank.name} failed {purpose}: {type(cause).__name__}: {cause}\n{_tail(rank)}")
    if isinstance(problem, _DEATHS):
        died = f"{rank.name} died before it could {purpose.removeprefix('to ')}"
        if isinstance(problem, ray.exceptions.OutOfMemoryError) or any(sign in str(problem) for sign in _OF_MEMORY):
            died += (
                ": Ray ended it because the memory of its machine was nearly used up, so free some there, place the groups "
                "on more machines, or take a smaller model"
            )
        return RankDied(f"{died}.\n{_tail(rank)}", rank.number)
    return RunError(f"{rank.name} could not be asked {purpose}: {type(problem).__name__}: {problem}\n{_tail(rank)}")


def _tail(rank: Rank) -> str:
    """The last lines of a rank's log, or of what was gathered of it from its machine."""
    gathered = sorted(rank.log.parent.glob(f"{GATHERED}/*/*/workers/{rank.log.name}"), reverse=True)
    log = next((file for file in (rank.log, *gathered) if file.is_file()), None)
    if log is None:
        return f"Its log would be {rank.log} on its own machine."
    lines = log.read_text(errors="replace").splitlines()[-15:]
    return "\n".join([f"The last lines of {log}:", *(f"    {line}" for line in lines)])
