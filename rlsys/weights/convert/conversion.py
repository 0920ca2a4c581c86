"""Converts between Megatron checkpoints and Hugging Face folders, both ways and bit for bit, in one or more processes.

A checkpoint with a value head (a critic) becomes a Hugging Face token classification model with one label. A written
Megatron checkpoint (torch_dist) is at step 0 and holds no optimiser state, so an actor that loads it starts with a new
optimiser. It includes the model's config and tokenizer, so it can be converted back without the original folder.

All files are planned before the first one is written, and each file is written by a single process. Invariants:
- A complete file is never rewritten, even if a conversion is killed and restarted.
- The content of a file does not depend on the number of processes.
- The death of a worker process raises RunError; a worker process exits with its parent.

The output grows in `.<name>.partial` beside `out`:

    lock            held by the converting process.
    journal.json    source, settings and complete files.
    folder/         renamed to `out` at the end.

One process at a time converts to a given `out`, which is complete or absent. Every file that the journal lists is
complete. Only files made by a conversion are deleted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlsys.config.schema import ParallelConfig
from rlsys.errors import Interrupted, RunError, UserError
from rlsys.files import LOCK, working_folder
from rlsys.weights.bucket import dtype_name
from rlsys.weights.checkpoint.adapters import MergedCheckpoint
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint
from rlsys.weights.checkpoint.store import CheckpointInfo
from rlsys.weights.checkpoint.torch_dist_writer import TorchDistWriter
from rlsys.weights.convert.model_folder import (
    MODEL,
    adjust_config,
    architecture_in,
    bytes_in,
    cast,
    check_hf,
    companions,
    copy_companions,
    dominant_dtype,
    dtype_named,
    fingerprint,
    is_critic,
    open_whole,
)
from rlsys.weights.hf_io import INDEX, SINGLE, HfReader, TensorSpec, file_bytes, stacked, write_safetensors
from rlsys.weights.lora import peft_config, peft_name
from rlsys.weights.weight_map import Entry, WeightMap, load_family, packed

SHARD_BYTES = 5 * 1000**3  # Default size limit of one safetensors file, as in Hugging Face.
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OnBytes = Callable[[int, int], None]
"""Progress callback (bytes written, bytes in all); the first call reports the bytes kept from an earlier attempt."""
RERUN_HINT = "run the same command again to continue."
_POLL_S = 0.2
_JOURNAL, _FOLDER = "journal.json", "folder"
_WORTH_BYTES = 4 * 10**9  # Bytes that a process writes in about the time that another process takes to start.


@dataclass(frozen=True, slots=True)
class Job:
    """One file to write."""

    name: str  # Path within the folder; unique among the jobs.
    nbytes: int  # Expected size.


class Conversion(Protocol):
    """One conversion: source, target format and settings. It is pickled and sent to the worker processes."""

    def recipe(self) -> Mapping[str, Any]:
        """Return the source's fingerprint and all settings as plain JSON; equal recipes give equal files."""

    def jobs(self, folder: Path) -> Sequence[Job]:
        """Return the files to write to `folder`, without writing any."""

    def write(self, name: str, folder: Path) -> Any:
        """Write the file of one job; return a receipt (plain JSON) for `finish`."""

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:
        """Write the small remaining files once all jobs are done; return notes for the user."""


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """Result of `run`."""

    files: int
    kept: int  # Number of files that an earlier attempt had written.
    nbytes: int
    notes: tuple[str, ...]  # Sentences for the user.


def run(
    conversion: Conversion, out: Path, processes: int | None = None, show: OnBytes | None = None
) -> ConversionResult:
    """Convert to the folder `out`, which must not exist.

    At most `processes` processes write files (None: up to one per core, fewer for small models). Raises UserError for
    invalid input, RunError if a file cannot be written, and Interrupted on Ctrl-C; call `run` again with the same
    arguments to continue.
    """
    if processes is not None and processes < 1:
        raise UserError(f"processes is {processes}: give 1 or more.", code="out_of_range", key="processes")
    try:
        with locked_draft(out) as draft:
            same = draft.begin(conversion.recipe())
            outcome = _write_missing(conversion, draft, processes, show)
            draft.publish()
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted; {RERUN_HINT}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{error.filename or out} cannot be read or written ({reason}); {RERUN_HINT}") from error
    anew = () if same else (f"The unfinished output of another conversion to {out} was deleted.",)
    return replace(outcome, notes=(*anew, *outcome.notes))


def _write_missing(
    conversion: Conversion, draft: ConversionDraft, processes: int | None, show: OnBytes | None
) -> ConversionResult:
    """Write the missing files of the draft."""
    jobs = conversion.jobs(draft.folder)
    waiting = [job for job in jobs if job.name not in draft.finished()]
    total = sum(job.nbytes for job in jobs)
    default_workers = min(len(os.sched_getaffinity(0)), 1 + sum(job.nbytes for job in waiting) // _WORTH_BYTES)
    workers = min(processes or default_workers, len(waiting))
    with _shown(draft.folder, total, show):
        if workers > 1:
            _write_in_parallel(conversion, draft, waiting, workers)
        else:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                for job in waiting:
                    draft.finish(job.name, conversion.write(job.name, draft.folder))
            finally:
                torch.set_num_threads(threads)
    notes = conversion.finish(draft.folder, draft.finished())
    return ConversionResult(len(jobs), len(jobs) - len(waiting), total, tuple(notes))


def _write_in_parallel(conversion: Conversion, draft: ConversionDraft, jobs: Sequence[Job], workers: int) -> None:
    context = multiprocessing.get_context("spawn")
    there, here = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _begin_process, (there,))
    try:
        # Largest first, so that no process starts a large file at the end.
        ordered = sorted(jobs, key=lambda job: -job.nbytes)
        written = {pool.submit(conversion.write, job.name, draft.folder): job.name for job in ordered}
        for future in as_completed(written):
            draft.finish(written[future], _receipt_of(future))
    finally:
        here.close()
        pool.shutdown(cancel_futures=True)


def _receipt_of(future: Future[Any]) -> Any:
    """Return the receipt from a worker process. Raises RunError if the process died or failed unexpectedly."""
    try:
        return future.result()
    except (UserError, RunError, OSError):
        raise
    except Exception as error:
        raise RunError(
            f"A worker process of the conversion died (out of memory? use fewer processes); {RERUN_HINT}"
        ) from error


def _begin_process(pipe: Connection) -> None:
    """Prepare a worker process, which exits at once when its parent closes the other end of `pipe` or dies."""

    def end() -> None:
        pipe.poll(None)
        os._exit(1)

    # Ctrl-C reaches every process of the terminal; only the parent handles it, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end, daemon=True).start()
    torch.set_num_threads(1)


@contextmanager
def _shown(folder: Path, total: int, show: OnBytes | None) -> Iterator[None]:
    """Report progress to `show` by polling the sizes of the files."""
    if show is None:
        yield
        return
    end = threading.Event()

    def look() -> None:
        looks = True
        while looks:
            show(min(bytes_in(folder), total), total)
            looks = not end.wait(_POLL_S)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
        show(total, total)
    finally:
        end.set()
        watcher.join()


class ConversionDraft:
    """The unfinished output of a conversion and its journal; made by `locked_draft`."""

    def __init__(self, out: Path, home: Path) -> None:
        self._out, self._home = out, home
        self.folder = home / _FOLDER
        self._journal: dict[str, Any] = {}

    def begin(self, recipe: Mapping[str, Any]) -> bool:
        """Resume the draft if it has the same `recipe` (JSON), else start a new draft.

        Return False if a draft of another recipe was deleted.
        """
        # Round trip through JSON, which turns tuples into lists.
        fresh = {"recipe": json.loads(json.dumps(recipe)), "files": {}}
        self._journal = self._read() or fresh
        same: bool = self._journal["recipe"] == fresh["recipe"]
        if not same:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._journal = fresh
        # Write the journal before creating the folder: `locked_draft` rejects a folder without a journal.
        self._write()
        self.folder.mkdir(exist_ok=True)
        self._drop_unfinished()
        return same

    def finished(self) -> dict[str, Any]:
        """Return the receipts of the complete files, by name."""
        return {name: file["receipt"] for name, file in self._journal["files"].items()}

    def finish(self, name: str, receipt: Any) -> None:
        """Record in the journal that the file `name` is complete; `receipt` is plain JSON."""
        size = (self.folder / name).stat().st_size
        self._journal["files"][name] = {"bytes": size, "receipt": receipt}
        self._write()

    def publish(self) -> None:
        """Rename the finished folder to `out`. Raises UserError if `out` has been created meanwhile."""
        _require_absent(self._out)
        self.folder.rename(self._out)
        (self._home / _JOURNAL).unlink()

    def abandon(self) -> None:
        """Delete the draft unless it holds a complete file, from which a later conversion can resume."""
        if self._journal and not self._journal["files"]:
            shutil.rmtree(self.folder, ignore_errors=True)
            (self._home / _JOURNAL).unlink(missing_ok=True)

    def _drop_unfinished(self) -> None:
        files = self._journal["files"]
        for name, file in list(files.items()):
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                del files[name]
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):
                    path.rmdir()
            elif str(path.relative_to(self.folder)) not in files:
                path.unlink()

    def _read(self) -> dict[str, Any] | None:
        path = self._home / _JOURNAL
        if not path.is_file():
            return None
        try:
            journal = json.loads(path.read_text())
            return {"recipe": journal["recipe"], "files": dict(journal["files"])}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{path} is damaged: remove {self._home} to start over.", code="malformed", key=str(path)
            ) from None

    def _write(self) -> None:
        partial = self._home / f".{_JOURNAL}"
        try:
            partial.write_text(json.dumps(self._journal))
            os.replace(partial, self._home / _JOURNAL)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def locked_draft(out: Path) -> Iterator[ConversionDraft]:
    """Lock and yield the draft of `out`, including files of an earlier attempt. Raises UserError."""
    with ExitStack() as stack:
        home = out.with_name(f".{out.name}.partial")
        try:
            _require_absent(out)
            found = {path.name for path in home.iterdir()} if home.is_dir() else set()
            # A conversion writes the journal before creating the folder and deletes it after renaming the folder.
            if found - {LOCK, _JOURNAL, _FOLDER, f".{_JOURNAL}"} or (_FOLDER in found and _JOURNAL not in found):
                raise UserError(
                    f"{home} was not made by a conversion: move it away, or give another folder.",
                    code="exists",
                    key=str(home),
                )
            stack.enter_context(working_folder(home))
        except BlockingIOError:
            raise UserError(
                f"Another process is converting in {home}: wait for it, or stop it.", code="in_use", key=str(home)
            ) from None
        except OSError as error:
            raise UserError(
                f"{out} is not writable ({error.strerror}): give another folder.", code="denied", key=str(out)
            ) from None
        draft = ConversionDraft(out, home)
        stack.callback(draft.abandon)
        yield draft


def _require_absent(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(
            f"{out} exists already: give a new folder, or remove this one first.", code="exists", key=str(out)
        )


def megatron_to_hf(
    checkpoint: str | Path,
    out: str | Path,
    original: str | Path | None = None,
    *,
    family: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    processes: int | None = None,
    show: OnBytes | None = None,
) -> ConversionResult:
    """Convert a Megatron checkpoint to the new Hugging Face folder `out`.

    See `run` for `processes`, `show` and errors; `family` is as in `model.family`. Config and tokenizer are copied from `original`, the Hugging Face
    folder that training started from; a checkpoint made by `hf_to_megatron` has its own and needs no `original`. Each
    tensor keeps its dtype unless `dtype` is given. Adapters are merged into the weights of `original`.
    """
    if shard_bytes < 1:
        raise UserError(f"shard_bytes is {shard_bytes}: give 1 or more.", code="out_of_range", key="shard_bytes")
    opened, model = open_whole(checkpoint, original, family)
    values = is_critic(opened)
    weights = WeightMap(architecture_in(model, family), values=values)
    opened.check(weights)
    opened.check_copies(weights)
    return run(
        MegatronToHf(opened, weights, values, model, dtype_named(dtype), shard_bytes), Path(out), processes, show
    )


def megatron_to_peft(
    checkpoint: str | Path, out: str | Path, original: str | Path, family: str | None = None, dtype: str | None = None
) -> int:
    """Write the adapters of a Megatron checkpoint to the new folder `out` in PEFT's format; return its tensors' bytes.

    `original` is the Hugging Face folder of the frozen model; its weights are read to compare them. Each tensor keeps its
    dtype unless `dtype` is given. Raises UserError if the checkpoint holds a whole model.
    """
    made = dtype_named(dtype)
    opened, model = open_whole(checkpoint, original, family)
    if not isinstance(opened, MergedCheckpoint):
        raise UserError(
            f"{opened.folder} holds a whole model and no adapters: leave out --adapter.",
            code="mismatch",
            key="--adapter",
        )
    pairs = {
        hf: pair
        for entry in WeightMap(architecture_in(model, family)).entries()
        for hf, pair in opened.adapter(entry).items()
    }
    found = ((peft_name(hf, kind), one) for hf, pair in pairs.items() for kind, one in zip("AB", pair, strict=True))
    named = [(name, cast(name, one, made)) for name, one in found]
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    out = Path(out)
    with locked_draft(out) as draft:
        draft.begin({"to": "peft", "checkpoint": str(opened.folder)})
        write_safetensors(draft.folder / PEFT_WEIGHTS, specs, named)
        config = peft_config(opened.lora, str(model))
        (draft.folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        draft.publish()
    return sum(spec.nbytes for spec in specs)


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One safetensors file."""

    name: str
    held: tuple[tuple[Entry, ...], ...]  # In write order: larger dtypes first, then export order. See `_held`.
    specs: tuple[TensorSpec, ...]  # Hugging Face tensors of the entries, in write order.


@dataclass(frozen=True)
class MegatronToHf:
    """Conversion of a Megatron checkpoint to a Hugging Face folder; see `Conversion`."""

    checkpoint: MegatronCheckpoint
    weights: WeightMap
    values: bool
    original: Path
    dtype: torch.dtype | None
    shard_bytes: int

    @cached_property
    def output_files(self) -> dict[str, SafetensorsFile]:
        """Files to write, by name."""
        return {file.name: file for file in self._plan()}

    def recipe(self) -> Mapping[str, Any]:
        return {
            "to": "hugging face",
            "tensors": load_family(self.weights.architecture.family).tensors,
            "checkpoint": fingerprint(self.checkpoint.folder, self.checkpoint.files()),
            "original": fingerprint(self.original, companions(self.original)),
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
            "shard_bytes": self.shard_bytes,
        }

    def jobs(self, folder: Path) -> Sequence[Job]:  # noqa: ARG002
        return [Job(file.name, file_bytes(file.specs)) for file in self.output_files.values()]

    def write(self, name: str, folder: Path) -> None:
        file = self.output_files[name]
        write_safetensors(folder / name, file.specs, (part for held in file.held for part in self._tensors(held)))

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG002
        specs = [spec for file in self.output_files.values() for spec in file.specs]
        if len(self.output_files) > 1:
            file_of = {spec.name: file.name for file in self.output_files.values() for spec in file.specs}
            total = {"total_size": sum(spec.nbytes for spec in specs)}
            index = {"metadata": total, "weight_map": dict(sorted(file_of.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        notes = copy_companions(self.original, folder)
        adjust_config(folder, dominant_dtype(specs), self.values)
        return notes

    def _held(self) -> Iterator[tuple[Entry, ...]]:
        """Yield each entry alone, or together those of all experts that one Hugging Face tensor stacks."""
        experts = range(self.weights.architecture.experts)
        for entry in self.weights.entries():
            if entry.rule.stack is None:
                yield (entry,)
            elif entry.expert == 0:
                name = entry.rule.megatron[0]
                yield tuple(self.weights.entry(name.format(layer=entry.layer, expert=number)) for number in experts)

    def _specs(self, held: Sequence[Entry]) -> list[TensorSpec]:
        entry, shapes = held[0], held[0].rule.shapes
        dtype = self.dtype or self.checkpoint.dtype(entry)
        if entry.rule.stack is None:
            return [TensorSpec(name, dtype, shape) for name, shape in zip(entry.hf, shapes, strict=True)]
        whole = (len(held), *shapes[0][1:], sum(shape[0] for shape in shapes))
        return [TensorSpec(entry.rule.stack.format(layer=entry.layer), dtype, whole)]

    def _tensors(self, held: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
        parts = map(self._parts, held)
        if held[0].rule.stack is None:
            yield from next(parts)
            return
        (spec,) = self._specs(held)
        yield spec.name, stacked(spec, ([tensor for _, tensor in own] for own in parts))

    def _parts(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        return ((hf, cast(hf, one, self.dtype)) for hf, one in self.checkpoint.parts(entry, self.weights))

    def _plan(self) -> Iterator[SafetensorsFile]:
        pairs = [(held, self._specs(held)) for held in self._held()]
        runs = list(packed(pairs, lambda pair: sum(spec.nbytes for spec in pair[1]), self.shard_bytes))
        for number, of_file in enumerate(runs, 1):
            name = SINGLE if len(runs) == 1 else f"model-{number:05d}-of-{len(runs):05d}.safetensors"
            of_file.sort(key=lambda pair: -pair[1][0].dtype.itemsize)
            yield SafetensorsFile(
                name, tuple(held for held, _ in of_file), tuple(spec for _, specs in of_file for spec in specs)
            )


def hf_to_megatron(
    source: str | Path,
    out: str | Path,
    *,
    family: str | None = None,
    parallel: ParallelConfig | None = None,
    dtype: str | None = None,
    values: bool = False,
    processes: int | None = None,
    show: OnBytes | None = None,
) -> ConversionResult:
    """Convert the Hugging Face folder `source` to the new Megatron checkpoint `out`.

    See `run` for `processes`, `show` and errors; `family` is as in `model.family`. The result loads under any TP, PP and EP; a group with the parallel
    sizes `parallel` reads each shard in one piece. With `values` the result is a critic, whose value head is zero if
    the source has none. Each tensor keeps its dtype unless `dtype` is given.
    """
    source, parallel = Path(source), parallel or ParallelConfig()
    for key, size in (("tp", parallel.tp), ("pp", parallel.pp), ("ep", parallel.ep)):
        if size < 1:
            raise UserError(f"{key} is {size}: give 1 or more.", code="out_of_range", key=key)
    weights = WeightMap(architecture_in(source, family), values=values)
    reader = HfReader(source)
    check_hf(reader, weights, source, values)
    made = HfToMegatron(source, reader, weights, values, parallel, dtype_named(dtype))
    return run(made, Path(out), processes, show)


@dataclass(frozen=True)
class HfToMegatron:
    """Conversion of a Hugging Face folder to a Megatron checkpoint; see `Conversion`."""

    source: Path
    reader: HfReader
    weights: WeightMap
    values: bool
    parallel: ParallelConfig
    dtype: torch.dtype | None

    def recipe(self) -> Mapping[str, Any]:
        files = [file.relative_to(self.source) for file in self.reader.files()]
        parallel = self.parallel
        return {
            "to": "megatron",
            "tensors": load_family(self.weights.architecture.family).tensors,
            "source": fingerprint(self.source, [*files, *companions(self.source)]),
            "parallel": [parallel.tp, parallel.pp, parallel.ep, parallel.pp_layers],
            "values": self.values,
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
        }

    def jobs(self, folder: Path) -> Sequence[Job]:  # noqa: ARG002
        return [Job(file.name, file.nbytes) for file in self._writer.files]

    def write(self, name: str, folder: Path) -> Any:
        job = next(file for file in self._writer.files if file.name == name)
        return self._writer.write(folder, job, self._parts)

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:
        notes = copy_companions(self.source, folder / MODEL)
        # Last, because it marks the checkpoint as complete.
        self._writer.finish(folder, [receipts[file.name] for file in self._writer.files], CheckpointInfo(step=0))
        return notes

    @cached_property
    def _writer(self) -> TorchDistWriter:
        """The writer, cached because construction plans every weight."""
        return TorchDistWriter(self.weights, self._dtype, self.parallel)

    def _dtype(self, entry: Entry) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        found = {self.reader.spec(name).dtype for name in entry.hf if name in self.reader.names()}
        if len(found) > 1:
            raise UserError(
                f"{self.source} has {', '.join(entry.hf)} in {' and '.join(sorted(map(dtype_name, found)))}, but "
                "Megatron fuses them into one tensor: give a single dtype with --dtype.",
                code="mismatch",
                key=entry.hf[0],
            )
        return found.pop() if found else dominant_dtype(self.reader.spec(name) for name in self.reader.names())

    def _parts(self, entry: Entry) -> list[Tensor]:
        dtype, names = self._dtype(entry), self.reader.names()
        # Only a critic's value head or its bias can be missing; with zeros, the critic's first values are zero.
        return [
            cast(name, self.reader.get(name), dtype) if name in names else torch.zeros(shape, dtype=dtype)
            for name, shape in zip(entry.hf, entry.rule.shapes, strict=True)
        ]
