"""Megatron's distributed checkpoints (torch_dist), written while training goes on, and loaded into a model.

Contract: what is saved is the state as it was when `begin` was called, whatever happens to it afterwards, with the
random generators of each process; a folder is complete (`complete.json`, by rename) when everything else of it is on
disk, never before. TP, CP, PP, EP and DP may differ between saving and loading.

Saving has three parts. `begin` plans and copies (collectives, and copies to host memory), a thread writes this
process's files (no collective, and nothing that training works with), `finish` completes the folders (collectives).
Where one process can fail all of them hear of it, so that none waits for another in vain.
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

from rlsys.errors import Code, RunError, UserError
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
from rlsys.weights.checkpoint.store import COMPLETE, About, is_complete, read_about
from rlsys.weights.weight_map import aligned

Shard: TypeAlias = "ShardedTensor | ShardedObject"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Written:
    """What one process has written of one checkpoint."""

    bytes: int
    seconds: float  # That its thread took.


@dataclass(frozen=True, slots=True)
class Content:
    """What goes into one folder."""

    folder: Path
    state: dict[str, Any]  # Megatron's sharded state of this process.
    about: About  # Without the layout, which is that of the group.


@dataclass(frozen=True, slots=True)
class _Job:
    """One process's part of one folder: planned, copied, and independent of the model."""

    folder: Path
    about: About
    files: Mapping[str, bytes]  # Of this process alone, by name.
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
        """This process's files are still being written."""
        return self._writing is not None and not self._writing.done()

    def begin(self, contents: Sequence[Content]) -> None:
        """Copy `contents`, and begin to write them to a file system that all ranks share, once a save before is finished.

        Raises what `finish` raises, and UserError if a folder holds a complete checkpoint.
        """
        self.finish()
        for content in contents:
            _agree(content.folder, partial(_open, content.folder))
        prepared = [save_preprocess(content.state) for content in contents]
        kept = []
        for state, _ in prepared:
            # Of what data-parallel ranks have alike each writes its share.
            group = parallel_state.get_data_parallel_group()
            shares = determine_main_replica_uniform_distribution(state, group)
            distribute_main_replicas_with_precomputed_distribution(state, group, shares)
            kept.append([shard for shard in nested_values(state) if is_main_replica(shard.replica_id)])
        _agree(contents[-1].folder, partial(_stage, [shard for shards in kept for shard in shards]))
        self._jobs = [
            _plan(content, shards, common)
            for content, shards, (_, common) in zip(contents, kept, prepared, strict=True)
        ]
        self._writing = self._thread.submit(self._write, self._jobs)

    def finish(self) -> Written:
        """Wait until what was begun, if anything, is complete. Raises RunError on all ranks if one could not write."""
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
            raise UserError(
                f"{folder} holds a checkpoint already; save to another folder.", code="exists", key=str(folder)
            )
        folder.mkdir(parents=True, exist_ok=True)


def _stage(shards: Sequence[Shard]) -> None:
    """Put copies in the places of what training is going to change. Objects are pickled by `_plan`."""
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    for shard, copy in zip(tensors, host_copies([shard.data for shard in tensors]), strict=True):
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
    files = {_generators_file(rank): _capture_generators()}
    if rank == 0:
        files[COMMON] = saved(common)
    about = replace(content.about, layout=_parallel_layout())
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
    result: T | None = None
    failure: Exception | None = None
    cause = None
    try:
        result = action()
    except UserError as error:
        failure = error
    except Exception as error:  # noqa: BLE001
        cause, reason = error, f"{_reason(error)}, rank {dist.get_rank()}"
        failure = RunError(
            f"The checkpoint {folder} could not be written ({reason}): see that there is room, and that writing is "
            "allowed; earlier checkpoints are as they were."
        )
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure))
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


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies of `tensors` as they are now, in one stretch of host memory that goes with the last of them.

    One stretch, for the heap does not give back what many small pieces leave. It is not pinned: that is slow, and pays
    only for memory that is kept.
    """
    starts = [0, *accumulate(aligned(tensor.nbytes) for tensor in tensors)]
    memory = torch.empty(starts[-1], dtype=torch.uint8)
    copies = []
    for tensor, start in zip(tensors, starts, strict=False):
        place = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(place.copy_(tensor.detach()))
    return copies


def load(folder: str | Path, sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Fill `sharded_state` from a checkpoint and return it; all ranks call this together. Raises UserError."""
    folder = Path(folder)
    read_about(folder)
    require_sound(folder)
    try:
        state, unused, lacking = dist_checkpointing.load(sharded_state, str(folder), strict=StrictHandling.RETURN_ALL)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        failed = isinstance(error, CheckpointException) and error.failures
        inner = min(failed.items())[1][0] if failed else error
        reason = (str(inner) or type(inner).__name__).splitlines()[0]
        if isinstance(inner, CheckpointingException | KeyError):
            raise _of_another_model(folder, reason) from error
        raise UserError(
            f"{folder} could not be loaded: take an earlier checkpoint ({reason}).", code="malformed", key=str(folder)
        ) from error
    for names, what in ((lacking, "lacks"), (set(filter(is_weight, unused)), "has, and the model lacks,")):
        if names:
            raise _of_another_model(folder, f"it {what} {min(names)}")
    loaded: dict[str, Any] = state
    return loaded


def _of_another_model(folder: Path, reason: str) -> UserError:
    return UserError(
        f"{folder} holds a checkpoint of another model; give one of this model ({reason}).",
        code="mismatch",
        key=str(folder),
    )


def require_sound(folder: Path) -> None:
    """Raise UserError, which names the file, unless `folder` holds a checkpoint that can be loaded without danger.

    Megatron and torch unpickle the metadata, and the objects that lie among the tensors, with trust. So what they read is read
    here before, by readers that make nothing but plain values, tensors and classes that torch's `weights_only` allows.
    """
    for name in (BACKEND, COMMON, METADATA):
        if not (folder / name).is_file():
            raise _unsound(folder / name, "is missing", "not_found")
    try:
        json.loads((folder / BACKEND).read_text())
    except (ValueError, RecursionError):
        raise _unsound(folder / BACKEND, "is damaged", "malformed") from None
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
        # Most layers have the same one.
        known = (LAYER_STATE in key, blake2b(content).digest())
        if known not in seen:
            held, _ = find_tensors(file, io.BytesIO(content))
            if LAYER_STATE in key and any(isinstance(leaf, Tensor) and leaf.numel() for leaf in tree_leaves(held)):
                raise UserError(
                    f"{file} holds {key}, which Transformer Engine would unpickle; it is not read, for it could run "
                    "code. Use a checkpoint that was saved without FP8.",
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
            raise _unsound(file, "is missing", "not_found")
        if file.stat().st_size < end:
            raise _unsound(file, f"was cut short, to {file.stat().st_size} bytes", "malformed")


def _unsound(file: Path, what: str, code: Code) -> UserError:
    return UserError(f"{file} {what}: take an earlier checkpoint.", code=code, key=str(file))


_CPU, _CUDA, _NUMPY, _REST = "torch", "cuda", "numpy", "rest"
_TRACKED = "megatron/"


def _parallel_layout() -> dict[str, int]:
    """How the model is spread over this group's processes."""
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
    """The content of this process's file: all generators (torch's, Megatron's, numpy's, Python's) as they are."""
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
    """Let all generators of this process go on as in the checkpoint `folder`, which was saved in `layout`.

    False, and nothing is changed, if that is another one than this group's, in which no process has drawn what this one is going
    to, or None (a converted model). Raises UserError, and changes nothing, if this process's file is missing or damaged.
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
