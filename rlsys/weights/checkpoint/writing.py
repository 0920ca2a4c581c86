"""Writes Megatron's distributed checkpoints (torch_dist) while training goes on.

Contract: what is saved is the state as it was when `begin` was called, whatever happens to it afterwards, with the
random generators of each process; a folder is complete (`complete.json`, by rename) when everything else of it is on
disk, never before.

Saving has three parts. `begin` plans and copies (collectives, and copies to host memory), a thread writes this
process's files (no collective, and nothing that training works with), `finish` completes the folders (collectives).
Where one process can fail all of them hear of it, so that none waits for another in vain.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from rlsys.errors import RunError, UserError
from rlsys.weights.checkpoint import rng
from rlsys.weights.checkpoint.about import COMPLETE, About, is_complete
from rlsys.weights.checkpoint.staging import host_copies
from rlsys.weights.checkpoint.torch_dist import COMMON

Shard: TypeAlias = "ShardedTensor | ShardedObject"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Written:
    """What one process has written of one checkpoint."""

    bytes: int
    seconds: float
    """That its thread took."""


@dataclass(frozen=True, slots=True)
class Content:
    """What goes into one folder."""

    folder: Path
    state: dict[str, Any]
    """Megatron's sharded state of this process."""
    about: About
    """Without the layout, which is that of the group."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One process's part of one folder: planned, copied, and independent of the model."""

    folder: Path
    about: About
    files: Mapping[str, bytes]
    """Of this process alone, by name."""
    writer: FileSystemWriter
    planner: SavePlanner
    plan: SavePlan
    metadata: Metadata


class CheckpointWriter:
    """Writes one process's checkpoints, one after another. All ranks call `begin` and `finish` together."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: Sequence[_Job] = ()
        self._writing: Future[list[list[WriteResult]]] | None = None
        self._seconds = 0.0

    @property
    def writing(self) -> bool:
        """Whether this process's files are still being written."""
        return self._writing is not None and not self._writing.done()

    def begin(self, contents: Sequence[Content]) -> None:
        """Copy `contents`, and begin to write them to a file system that all ranks share.

        A save before it is finished first. Raises what `finish` raises, and UserError if a folder holds a complete
        checkpoint.
        """
        self.finish()
        for content in contents:
            _agree(content.folder, partial(_open, content.folder))
        prepared = [save_preprocess(content.state) for content in contents]
        kept = [_own_shards(sharded) for sharded, _ in prepared]
        _agree(contents[-1].folder, partial(_stage, [shard for shards in kept for shard in shards]))
        self._jobs = [
            _plan(content, shards, common)
            for content, shards, (_, common) in zip(contents, kept, prepared, strict=True)
        ]
        self._writing = self._thread.submit(self._write, self._jobs)

    def finish(self) -> Written:
        """Wait until what was begun is complete; nothing happens if nothing was.

        Raises RunError on all ranks if one could not write, and then leaves the folders incomplete.
        """
        jobs, writing, self._jobs, self._writing = self._jobs, self._writing, (), None
        if writing is None:
            return Written(0, 0.0)
        results = _agree(jobs[-1].folder, writing.result)
        for number, job in enumerate(jobs):
            _agree(job.folder, partial(_complete, job, [of_rank[number] for of_rank in results]))
        sharded = sum(result.size_in_bytes for of_job in results[dist.get_rank()] for result in of_job)
        other = sum(len(data) for job in jobs for data in job.files.values())
        return Written(sharded + other, self._seconds)

    def _write(self, jobs: Sequence[_Job]) -> list[list[WriteResult]]:
        """On the thread."""
        started = perf_counter()
        results = []
        for job in jobs:
            for name, data in job.files.items():
                _write_file(job.folder / name, data)
            # A process that has nothing to write would leave an empty file.
            results.append(job.writer.write_data(job.plan, job.planner).value() if job.plan.items else [])
        self._seconds = perf_counter() - started
        return results


def _open(folder: Path) -> None:
    """On the first rank: make `folder`, or refuse it."""
    if dist.get_rank() == 0:
        if is_complete(folder):
            raise UserError(f"{folder} holds a checkpoint already; save to another folder.")
        folder.mkdir(parents=True, exist_ok=True)


def _own_shards(sharded_state: dict[str, Any]) -> list[Shard]:
    """What this process is to write: of what data-parallel ranks have alike each takes its share."""
    group = parallel_state.get_data_parallel_group()
    shares = determine_main_replica_uniform_distribution(sharded_state, group)
    distribute_main_replicas_with_precomputed_distribution(sharded_state, group, shares)
    return [shard for shard in nested_values(sharded_state) if is_main_replica(shard.replica_id)]


def _stage(shards: Sequence[Shard]) -> None:
    """Put copies in the places of what training is going to change. Objects are pickled by `_plan`."""
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    copies = host_copies([shard.data for shard in tensors])
    for shard, copy in zip(tensors, copies, strict=True):
        shard.data = copy


def _plan(content: Content, shards: Sequence[Shard], common: dict[str, Any]) -> _Job:
    """Agree on who writes what; `common` is what all ranks have alike."""
    by_key: dict[str, list[Shard]] = {}
    for shard in shards:
        key = shard.unique_key if isinstance(shard, ShardedObject) else shard.key
        by_key.setdefault(key, []).append(shard)
    rank = dist.get_rank()
    # Nothing is copied ahead: it is on the host already, and the thread must not wait for training's stream.
    writer = FileSystemWriter(content.folder, per_thread_copy_ahead=0)
    planner = MCoreSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(mcore_to_pyt_state_dict(by_key), is_coordinator=rank == 0)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
    files = {rng.file_name(rank): rng.capture()}
    if rank == 0:
        data = io.BytesIO()
        torch.save(common, data)
        files[COMMON] = data.getvalue()
    about = replace(content.about, layout=rng.parallel_layout())
    return _Job(content.folder, about, files, writer, planner, plan, metadata)


def _complete(job: _Job, results: list[list[WriteResult]]) -> None:
    """On the first rank: write what says that all is there; `results` are of each rank."""
    if dist.get_rank():
        return
    job.writer.finish(job.metadata, results)
    save_config(CheckpointingConfig("torch_dist"), str(job.folder))
    unnamed = job.folder / f".{COMPLETE}.partial"
    _write_file(unnamed, job.about.to_json().encode())
    unnamed.replace(job.folder / COMPLETE)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _agree(folder: Path, action: Callable[[], T]) -> list[T]:
    """What `action` gives on each rank. Where it fails on one all raise: a UserError as it is, else RunError."""
    outcome: tuple[T | None, Exception | None]
    cause = None
    try:
        outcome = action(), None
    except UserError as error:
        outcome = None, error
    except Exception as error:  # noqa: BLE001
        cause, reason = error, f"{_reason(error)}, rank {dist.get_rank()}"
        outcome = (
            None,
            RunError(
                f"The checkpoint {folder} could not be written ({reason}): see that there is room, and that writing is "
                "allowed; earlier checkpoints are as they were."
            ),
        )
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    for _, problem in outcomes:
        if problem is not None:
            raise problem from cause
    return [result for result, _ in outcomes]


def _reason(error: BaseException) -> str:
    """What went wrong, whatever the libraries in between made of it."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return f"{type(error).__name__}: {error}"
