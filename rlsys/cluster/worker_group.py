"""A group of worker processes, one Ray actor a rank, called together.

Contract: every wait has a time-out and names the ranks that are missing; a rank that dies or raises
ends the call at once with the last lines of its log; calls to one rank are carried out in order.
The workers themselves are plain objects that know nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlsys.cluster.host import AsyncHost, SyncHost
from rlsys.cluster.runtime import RESOURCE
from rlsys.config.schema import ClusterConfig
from rlsys.errors import RunError, UserError

LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker of a group."""

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
        indices: Sequence[int],
        cluster: ClusterConfig,
        log_dir: Path,
        *,
        devices: int = 1,
        concurrency: int = 0,
    ) -> WorkerGroup:
        """Start one empty worker process in each bundle of `indices`, with `devices` devices each.

        `concurrency` above 0 makes the workers asynchronous, with that many calls at a time.
        """
        host = AsyncHost if concurrency else SyncHost
        ranks = []
        for rank, index in enumerate(indices):
            log = (log_dir / f"{name}-{rank}.log").resolve()
            options: dict[str, Any] = {
                "num_cpus": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    bundles, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
                ),
                "runtime_env": {"env_vars": _environment(cluster.threads)},
                "max_restarts": 0,
            }
            options["num_cpus" if RESOURCE[cluster.device] == "CPU" else "num_gpus"] = devices
            if concurrency:
                options["max_concurrency"] = concurrency
            handle = ray.remote(host).options(**options).remote(str(log), list(sys.path))
            ranks.append(Rank(f"{name} rank {rank}", handle, log))
        return cls(name, ranks, cluster.call_timeout_s)

    async def build(self, factory: Callable[..., Any], arguments: Sequence[tuple], timeout_s: float) -> None:
        """Make the worker object of each rank: `factory(*arguments[rank])`, in its process."""
        refs = [
            rank.handle.build.remote(factory, *args) for rank, args in zip(self.ranks, arguments, strict=True)
        ]
        await self._gather(refs, "to start", timeout_s)

    async def free_address(self, timeout_s: float) -> tuple[str, int]:
        """Host and a free port of rank 0, for torch.distributed to meet at."""
        address, port = (
            await self._gather([self.ranks[0].handle.free_address.remote()], "to start", timeout_s)
        )[0]
        return address, port

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call `method` on every rank with the same arguments; results in rank order."""
        return await self.call_each(method, [args] * len(self.ranks), timeout_s=timeout_s)

    async def call_each(
        self, method: str, arguments: Sequence[tuple], timeout_s: float | None = None
    ) -> list[Any]:
        """Call `method` on every rank, each with its own arguments; results in rank order."""
        refs = [
            rank.handle.call.remote(method, *args) for rank, args in zip(self.ranks, arguments, strict=True)
        ]
        return await self._gather(refs, f"to finish {method}", timeout_s)

    async def call_rank(self, index: int, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call `method` on one rank."""
        rank = self.ranks[index]
        return (
            await self._gather(
                [rank.handle.call.remote(method, *args)], f"to finish {method}", timeout_s, [rank]
            )
        )[0]

    def kill(self) -> None:
        """End every worker process at once."""
        for rank in self.ranks:
            with contextlib.suppress(Exception):  # already gone is as good
                ray.kill(rank.handle)

    async def _gather(
        self,
        refs: Sequence[Any],
        purpose: str,
        timeout_s: float | None,
        ranks: Sequence[Rank] | None = None,
    ) -> list[Any]:
        """Results of `refs`; the first failure or the time-out ends the wait."""
        ranks = self.ranks if ranks is None else ranks
        limit = self._timeout_s if timeout_s is None else timeout_s
        waits = [asyncio.wrap_future(ref.future()) for ref in refs]
        names = dict(zip(waits, ranks, strict=False))
        try:
            done, missing = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            for wait in done:
                problem = wait.exception()
                if problem is not None:
                    raise _explain(names[wait], purpose, problem) from problem
            if missing:
                late = ", ".join(names[wait].name for wait in waits if wait in missing)
                raise RunError(
                    f"waited {limit:.0f} s for {late} {purpose}.\n{_tail(names[next(iter(missing))])}"
                )
            return [wait.result() for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()


def share(value: Any) -> Any:
    """Put `value` into the cluster's object store once, to be passed to many calls."""
    return ray.put(value)


def _environment(threads: int | None) -> dict[str, str]:
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    environment = {name: str(threads) for name in limits} if threads else {}
    return environment | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def _explain(rank: Rank, purpose: str, problem: BaseException) -> Exception:
    """The failure of a rank as one sentence, with what it last wrote."""
    if isinstance(problem, ray.exceptions.RayTaskError):
        cause = problem.cause if isinstance(problem.cause, Exception) else problem
        if isinstance(cause, UserError | RunError):
            return cause
        return RunError(f"{rank.name} failed {purpose}: {type(cause).__name__}: {cause}\n{_tail(rank)}")
    return RunError(f"{rank.name} died while it was {purpose.removeprefix('to ')}.\n{_tail(rank)}")


def _tail(rank: Rank) -> str:
    """The last lines of a rank's log."""
    if not rank.log.is_file():
        return f"Its log would be {rank.log} on its own machine."
    lines = rank.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"The last lines of {rank.log}:", *(f"    {line}" for line in lines)])
