"""Saves Megatron distributed checkpoints (torch_dist) while training continues, and loads them into a model.

Contract: a checkpoint holds the state, and each process's random generators, as of the call of `begin`. `complete.json`
appears, by rename, only after everything else in the folder is on disk. TP, CP, PP, EP and DP may differ between saving
and loading.

Saving has three phases:
- `begin` plans and copies the state to host memory (collective).
- A thread writes this process's files, without collectives and without access to training state.
- `finish` completes the folders (collective).
An error on one rank is raised on all ranks, so no rank waits for a failed rank.
"""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_leaves

from rlsys.errors import Code, RunError, UserError, disk_error, first_line
from rlsys.weights.checkpoint.megatron_reader import (
    BACKEND,
    COMMON,
    LAYER_STATE,
    METADATA,
    check_place,
    find_tensors,
    is_weight,
    read_metadata,
    saved,
)
from rlsys.weights.checkpoint.store import COMPLETE, CheckpointInfo, WriteStats, is_complete, read_checkpoint_info
from rlsys.weights.weight_map import aligned

Shard: TypeAlias = "ShardedTensor | ShardedObject"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """State to save in one folder."""

    folder: Path
    state: dict[str, Any]  # Megatron sharded state dict of this process.
    info: CheckpointInfo  # Without the layout, which the writer fills in.
    fill_in: Callable[[Sequence[tuple[Tensor, Tensor]]], None] | None = None
    """Fills host tensors, the second of each two, with the values of tensors of `state` that have none themselves
    (device "meta"), of those that this process writes. Collective."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One process's planned share of one folder, copied and thus independent of the model."""

    folder: Path
    info: CheckpointInfo
    files: Mapping[str, bytes]  # Files other than tensor files that this process writes, by name.
    writer: FileSystemWriter
    planner: SavePlanner
    plan: SavePlan
    metadata: Metadata


class CheckpointWriter:
    """Writes one process's share of checkpoints, one save at a time. `begin` and `finish` are collective."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: Sequence[_Job] = ()
        self._writing: Future[list[list[WriteResult]]] | None = None
        self._seconds = 0.0

    @property
    def writing(self) -> bool:
        """True while this process's files are being written."""
        return self._writing is not None and not self._writing.done()

    def begin(self, contents: Sequence[CheckpointContent]) -> None:
        """Finish the previous save, copy `contents`, and start writing them to a file system shared by all ranks.

        Raises what `finish` raises, and UserError if a folder already holds a complete checkpoint.
        """
        self.finish()
        for content in contents:
            _agree(content.folder, partial(_open, content.folder))
        prepared = [save_preprocess(content.state) for content in contents]
        kept = []
        for state, _ in prepared:
            # Split state that data-parallel ranks replicate into one share per rank.
            group = parallel_state.get_data_parallel_group()
            shares = determine_main_replica_uniform_distribution(state, group)
            distribute_main_replicas_with_precomputed_distribution(state, group, shares)
            kept.append([shard for shard in nested_values(state) if is_main_replica(shard.replica_id)])
        valueless = [
            [(shard, shard.data) for shard in shards if isinstance(shard, ShardedTensor) and shard.data.is_meta]
            for shards in kept
        ]
        _agree(contents[-1].folder, partial(_stage, [shard for shards in kept for shard in shards]))
        for content, pairs in zip(contents, valueless, strict=True):
            if content.fill_in is not None:
                _agree(content.folder, partial(content.fill_in, [(view, shard.data) for shard, view in pairs]))
        self._jobs = [
            _plan(content, shards, common)
            for content, shards, (_, common) in zip(contents, kept, prepared, strict=True)
        ]
        self._writing = self._thread.submit(self._write, self._jobs)

    def finish(self) -> WriteStats:
        """Block until the pending save, if any, is complete. Raises RunError on all ranks if any rank cannot write."""
        jobs, writing, self._jobs, self._writing = self._jobs, self._writing, (), None
        if writing is None:
            return WriteStats(0, 0.0)
        results = _agree(jobs[-1].folder, writing.result)
        for number, job in enumerate(jobs):
            _agree(job.folder, partial(_complete, job, [of_rank[number] for of_rank in results]))
        sharded = sum(result.size_in_bytes for of_job in results[dist.get_rank()] for result in of_job)
        other = sum(len(data) for job in jobs for data in job.files.values())
        return WriteStats(sharded + other, self._seconds)

    def _write(self, jobs: Sequence[_Job]) -> list[list[WriteResult]]:
        """Write this process's files. Runs on the thread."""
        started = perf_counter()
        results = []
        for job in jobs:
            for name, data in job.files.items():
                _write_file(job.folder / name, data)
            # With nothing to write, the writer would leave an empty file.
            results.append(job.writer.write_data(job.plan, job.planner).value() if job.plan.items else [])
        self._seconds = perf_counter() - started
        return results


def _open(folder: Path) -> None:
    """Create `folder` on rank 0. Raises UserError there if it holds a complete checkpoint."""
    if dist.get_rank() == 0:
        if is_complete(folder):
            raise UserError(
                f"{folder} holds a checkpoint already: save to another folder.", code="exists", key=str(folder)
            )
        folder.mkdir(parents=True, exist_ok=True)


def _stage(shards: Sequence[Shard]) -> None:
    """Replace the tensors of `shards` with host copies, because training will change the originals.

    Those without values get memory alone. Other objects need no copy here: `_plan` pickles them.
    """
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    for shard, copy in zip(tensors, host_copies([shard.data for shard in tensors]), strict=True):
        shard.data = copy


def _plan(content: CheckpointContent, shards: Sequence[Shard], common: dict[str, Any]) -> _Job:
    """Agree with all ranks on the items that each one writes; `common` is the state replicated on every rank."""
    by_key: dict[str, list[Shard]] = {}
    for shard in shards:
        key = shard.unique_key if isinstance(shard, ShardedObject) else shard.key
        by_key.setdefault(key, []).append(shard)
    rank = dist.get_rank()
    # No copy-ahead: the data is in host memory already, and the thread must not wait for training's CUDA stream.
    writer = FileSystemWriter(content.folder, per_thread_copy_ahead=0)
    planner = MCoreSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(mcore_to_pyt_state_dict(by_key), is_coordinator=rank == 0)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
    files = {_generators_file(rank): _capture_generators()}
    if rank == 0:
        files[COMMON] = saved(common)
    info = replace(content.info, layout=_parallel_layout())
    return _Job(content.folder, info, files, writer, planner, plan, metadata)


def _complete(job: _Job, results: list[list[WriteResult]]) -> None:
    """Write the metadata and `complete.json`, on rank 0 only; `results` has one list per rank."""
    if dist.get_rank():
        return
    job.writer.finish(job.metadata, results)
    save_config(CheckpointingConfig("torch_dist"), str(job.folder))
    unnamed = job.folder / f".{COMPLETE}.partial"
    _write_file(unnamed, job.info.to_json().encode())
    unnamed.replace(job.folder / COMPLETE)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _agree(folder: Path, action: Callable[[], T]) -> list[T]:
    """Run `action` and return the results of all ranks.

    If `action` fails on one rank, all ranks raise: a UserError unchanged, any other exception as RunError.
    """
    result: T | None = None
    failure: Exception | None = None
    cause = None
    try:
        result = action()
    except UserError as error:
        failure = error
    except Exception as error:  # noqa: BLE001
        cause, on_disk = error, _disk_problem(error)
        reason = f"{type(error).__name__}: {error}" if on_disk is None else on_disk.strerror
        failure = RunError(
            f"The checkpoint {folder} could not be written ({reason}, rank {dist.get_rank()}): check free space and write "
            "permission; earlier checkpoints are intact.",
            code=None if on_disk is None else disk_error(on_disk, folder).code,
        )
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure))
    for _, problem in outcomes:
        if problem is not None:
            raise problem from cause
    return [result for result, _ in outcomes]


def _disk_problem(error: BaseException) -> OSError | None:
    """Return the OSError that underlies `error`, if any."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner
        inner = inner.__cause__ or inner.__context__
    return None


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous copies of `tensors` in a single host allocation, freed with the last copy; for tensors without
    values (device "meta"), memory alone.

    The heap would keep the memory of many small allocations after the copies are freed. The memory is not pinned:
    pinning is slow and pays off only for memory that is reused.
    """
    starts = [0, *accumulate(aligned(tensor.nbytes) for tensor in tensors)]
    memory = torch.empty(starts[-1], dtype=torch.uint8)
    copies = []
    for tensor, start in zip(tensors, starts, strict=False):
        place = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(place if tensor.is_meta else place.copy_(tensor.detach()))
    return copies


def load(folder: str | Path, sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Fill `sharded_state` from a checkpoint and return it (collective). Raises UserError.

    A layer's state beside its weights (`LAYER_STATE`), which only some kinds of layers have, is None if the checkpoint
    lacks it.
    """
    folder = Path(folder)
    parts = {name: part for name, part in sharded_state.items() if isinstance(part, dict)}
    of_layers = {name: [key for key in part if LAYER_STATE in str(key)] for name, part in parts.items()}
    read_checkpoint_info(folder)
    require_sound(folder)
    try:
        # Access: the first data-parallel rank need not read what it does not keep.
        state, unused, lacking = dist_checkpointing.load(
            sharded_state, str(folder), validate_access_integrity=False, strict=StrictHandling.RETURN_ALL
        )
    except (Exception, CheckpointException) as error:  # CheckpointException derives from BaseException only.
        failed = isinstance(error, CheckpointException) and error.failures
        inner = min(failed.items())[1][0] if failed else error
        reason = first_line(inner)
        if isinstance(inner, CheckpointingException | KeyError):
            raise _of_another_model(folder, reason) from error
        raise UserError(
            f"{folder} could not be loaded: take an earlier checkpoint ({reason}).", code="malformed", key=str(folder)
        ) from error
    needed = {key for key in lacking if LAYER_STATE not in key}
    for names, what in ((needed, "lacks"), (set(filter(is_weight, unused)), "has, and the model lacks,")):
        if names:
            raise _of_another_model(folder, f"it {what} {min(names)}")
    loaded: dict[str, Any] = state
    for name, keys in of_layers.items():
        loaded[name] = dict.fromkeys(keys) | loaded[name]
    return loaded


def _of_another_model(folder: Path, reason: str) -> UserError:
    return UserError(
        f"{folder} holds a checkpoint of another model: give one of this model ({reason}).",
        code="mismatch",
        key=str(folder),
    )


def require_sound(folder: Path) -> None:
    """Raise UserError, naming the file, unless the checkpoint in `folder` is whole and safe to load.

    Megatron and torch unpickle the metadata, and objects stored among the tensors, without restrictions. This check
    first reads the same bytes with restricted readers, which accept only plain values, tensors and classes allowed by
    torch's `weights_only`.
    """
    for name in (BACKEND, COMMON, METADATA):
        if not (folder / name).is_file():
            raise _damaged(folder / name, "is missing", "not_found")
    try:
        json.loads((folder / BACKEND).read_text())
    except (ValueError, RecursionError):
        raise _damaged(folder / BACKEND, "is damaged", "malformed") from None
    found = read_metadata(folder / METADATA)
    _require_whole(folder, found)
    with (folder / COMMON).open("rb") as stream:
        find_tensors(folder / COMMON, stream)
    seen = set()
    for index, place in found.storage_data.items():
        key, file = index.fqn, folder / place.relative_path
        if isinstance(found.state_dict_metadata.get(key), TensorStorageMetadata):
            continue
        with file.open("rb") as stream:
            stream.seek(place.offset)
            content = stream.read(place.length)
        # Most layers store the same bytes.
        known = (LAYER_STATE in key, blake2b(content).digest())
        if known not in seen:
            held, _ = find_tensors(file, io.BytesIO(content))
            if LAYER_STATE in key and any(isinstance(leaf, Tensor) and leaf.numel() for leaf in tree_leaves(held)):
                raise UserError(
                    f"{file} holds {key}, which Transformer Engine would unpickle and which could run code, so it is "
                    "not read: use a checkpoint that was saved without FP8.",
                    code="unsafe",
                    key=str(file),
                )
            seen.add(known)


def _require_whole(folder: Path, found: Metadata) -> None:
    ends: dict[str, int] = {}
    for index, place in found.storage_data.items():
        check_place(place, index.fqn)
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        file = folder / name
        if not file.is_file():
            raise _damaged(file, "is missing", "not_found")
        if file.stat().st_size < end:
            raise _damaged(file, f"is truncated to {file.stat().st_size} bytes", "malformed")


def _damaged(file: Path, what: str, code: Code) -> UserError:
    return UserError(f"{file} {what}: take an earlier checkpoint.", code=code, key=str(file))


_CPU, _CUDA, _NUMPY, _REST = "torch", "cuda", "numpy", "rest"
_TRACKED = "megatron/"


def _parallel_layout() -> dict[str, int]:
    """Return the parallel sizes of this process group."""
    return {
        "world": dist.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }


def _generators_file(rank: int) -> str:
    return f"rng_{rank:05}.npz"


def _capture_generators() -> bytes:
    """Return the states of this process's random generators (torch, Megatron, numpy, Python) as file content."""
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    keys = numpy_state["state"].pop("key")
    rest = {"numpy": numpy_state, "python": random.getstate()}
    arrays: dict[str, NDArray[Any]] = {
        _CPU: torch.get_rng_state().numpy(),
        _NUMPY: keys,
        _REST: np.frombuffer(json.dumps(rest).encode(), np.uint8),
    }
    arrays |= {_TRACKED + name: state.numpy() for name, state in get_cuda_rng_tracker().get_states().items()}
    if torch.cuda.is_available():
        arrays[_CUDA] = torch.cuda.get_rng_state().numpy()
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def restore_generators(folder: Path, layout: Mapping[str, int] | None) -> bool:
    """Restore this process's random generators from the checkpoint `folder`, saved under `layout`.

    Return False and change nothing if `layout` is None (a converted model) or not the layout of this group, because no
    saved state then belongs to this rank. Raises UserError, and changes nothing, if this process's file is missing or
    damaged.
    """
    if layout != _parallel_layout():
        return False
    path = folder / _generators_file(dist.get_rank())
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        rest = json.loads(arrays.pop(_REST).tobytes())
        numpy_state = rest["numpy"]
        numpy_state["state"]["key"] = arrays.pop(_NUMPY)
        version, words, gauss = rest["python"]
        python_state = version, tuple(words), gauss
        states = {name: torch.from_numpy(array) for name, array in arrays.items()}
        on_cpu, on_gpu = states.pop(_CPU), states.pop(_CUDA, None)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing: the checkpoint lacks the random generators of a process; take an earlier one.",
            code="not_found",
            key=str(path),
        ) from error
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} is damaged: take an earlier checkpoint ({error}).", code="malformed", key=str(path)
        ) from error
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(on_cpu)
    get_cuda_rng_tracker().set_states({name.removeprefix(_TRACKED): state for name, state in states.items()})
    if on_gpu is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(on_gpu)
    return True
