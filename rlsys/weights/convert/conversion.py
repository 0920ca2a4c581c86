"""Conversion both ways between a Megatron checkpoint and a Hugging Face folder, bit for bit, by one or several processes.

A critic, known by its value head, is in Hugging Face a token classification of one label. A Megatron checkpoint (torch_dist) is
written as weights alone, at step 0: an actor that loads it begins with a new optimiser. It holds what belongs to the model
besides weights too, so that it converts back without its original.

The files are known before the first is written, and each is written whole by one process. Invariants: a file is written once,
also when a conversion is killed and started again; what a file holds does not depend on how many processes there are; whoever
waits for a process that dies gets RunError; a process ends with the one that started it.

Beside `out` lies `.<name>.partial`, where it grows before it has its name:

    lock            held by the process that converts there
    journal.json    what is converted, and the files that are complete
    folder/         what becomes `out`

So one process converts to one place; `out` is complete or not there; a file that the journal names is complete; nothing is
deleted that no conversion made.
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
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint, open_checkpoint
from rlsys.weights.checkpoint.store import About
from rlsys.weights.checkpoint.torch_dist_writer import TorchDistWriter
from rlsys.weights.convert.model_folder import (
    MODEL,
    adjust_config,
    architecture_in,
    bytes_in,
    cast,
    check_hf,
    chosen,
    companions,
    copy_companions,
    fingerprint,
    is_critic,
    model_of,
    most,
)
from rlsys.weights.hf_io import INDEX, SINGLE, HfReader, TensorSpec, file_bytes, write_safetensors
from rlsys.weights.transport import dtype_name
from rlsys.weights.weight_map import Entry, WeightMap, packed

SHARD_BYTES = 5 * 1000**3  # Most bytes of one safetensors file, as Hugging Face writes them.
OnBytes = Callable[[int, int], None]
"""Called with the bytes that are written, and those of the whole; first with what was there before."""
GOES_ON = "the same command goes on where this one stopped."
_LOOK_EVERY_S = 0.2
_JOURNAL, _FOLDER = "journal.json", "folder"
_WORTH_BYTES = 4 * 10**9  # A process takes the time to start in which another writes about so much.


@dataclass(frozen=True, slots=True)
class Job:
    """One file to write."""

    name: str  # Within the folder; no other job's.
    nbytes: int  # About as long as it will be.


class Conversion(Protocol):
    """What is converted, and how; it is pickled to the processes that write."""

    def recipe(self) -> Mapping[str, Any]:
        """Plain JSON that differs if the files would: the source's fingerprint and all settings."""

    def jobs(self, folder: Path) -> Sequence[Job]:
        """The files that make up the model in `folder`, without writing one."""

    def write(self, name: str, folder: Path) -> Any:
        """Write the file of one job; a receipt, plain JSON, that `finish` wants."""

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:
        """Write what is small, when all files are there; sentences for the user."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `run` did."""

    files: int
    kept: int  # Of these, files that an earlier conversion had written.
    nbytes: int
    notes: tuple[str, ...]  # Sentences for the user.


def run(conversion: Conversion, out: Path, processes: int | None = None, show: OnBytes | None = None) -> Outcome:
    """Make the folder `out`, which must not exist.

    At most `processes` write (None: one for each core, if there is enough to do). Raises UserError for what the user
    gave, RunError if a file cannot be written, Interrupted; after them the same call goes on with what is missing.
    """
    if processes is not None and processes < 1:
        raise UserError(f"processes is {processes}; give 1 or more.", code="out_of_range", key="processes")
    try:
        with claim(out) as draft:
            same = draft.begin(conversion.recipe())
            outcome = _finished(conversion, draft, processes, show)
            draft.publish()
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted; {GOES_ON}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{error.filename or out} cannot be read or written ({reason}); {GOES_ON}") from error
    anew = () if same else (f"What another conversion had begun for {out} was thrown away.",)
    return replace(outcome, notes=(*anew, *outcome.notes))


def _finished(conversion: Conversion, draft: ConversionDraft, processes: int | None, show: OnBytes | None) -> Outcome:
    """Write what is missing in the draft."""
    jobs = conversion.jobs(draft.folder)
    waiting = [job for job in jobs if job.name not in draft.finished()]
    total = sum(job.nbytes for job in jobs)
    worth = min(len(os.sched_getaffinity(0)), 1 + sum(job.nbytes for job in waiting) // _WORTH_BYTES)
    crowd = min(processes or worth, len(waiting))
    with _shown(draft.folder, total, show):
        if crowd > 1:
            _together(conversion, draft, waiting, crowd)
        else:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                for job in waiting:
                    draft.finish(job.name, conversion.write(job.name, draft.folder))
            finally:
                torch.set_num_threads(threads)
    notes = conversion.finish(draft.folder, draft.finished())
    return Outcome(len(jobs), len(jobs) - len(waiting), total, tuple(notes))


def _together(conversion: Conversion, draft: ConversionDraft, jobs: Sequence[Job], crowd: int) -> None:
    context = multiprocessing.get_context("spawn")
    there, here = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(crowd, context, _begin_process, (there,))
    try:
        # The largest first, so that no process has a large one left at the end.
        ordered = sorted(jobs, key=lambda job: -job.nbytes)
        written = {pool.submit(conversion.write, job.name, draft.folder): job.name for job in ordered}
        for future in as_completed(written):
            draft.finish(written[future], _receipt_of(future))
    finally:
        here.close()
        pool.shutdown(cancel_futures=True)


def _receipt_of(future: Future[Any]) -> Any:
    """What a process has answered. Raises RunError for one that was ended, or that failed for want of memory and the like."""
    try:
        return future.result()
    except (UserError, RunError, OSError):
        raise
    except Exception as error:
        raise RunError(
            f"A process of the conversion was ended (is there too little memory? use fewer processes); {GOES_ON}"
        ) from error


def _begin_process(pipe: Connection) -> None:
    """Prepare a process that writes; it ends at once when the other end of `pipe` is closed, or is gone with its owner."""

    def end() -> None:
        pipe.poll(None)
        os._exit(1)

    # Ctrl-C reaches all processes of a terminal; the one that started this one says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end, daemon=True).start()
    torch.set_num_threads(1)


@contextmanager
def _shown(folder: Path, total: int, show: OnBytes | None) -> Iterator[None]:
    """Tell `show` how much is written, by looking at the files."""
    if show is None:
        yield
        return
    end = threading.Event()

    def look() -> None:
        looks = True
        while looks:
            show(min(bytes_in(folder), total), total)
            looks = not end.wait(_LOOK_EVERY_S)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
        show(total, total)
    finally:
        end.set()
        watcher.join()


class ConversionDraft:
    """The place where `out` grows; made by `claim`."""

    def __init__(self, out: Path, home: Path) -> None:
        self._out, self._home = out, home
        self.folder = home / _FOLDER
        self._journal: dict[str, Any] = {}

    def begin(self, recipe: Mapping[str, Any]) -> bool:
        """Go on with what was begun from the same `recipe` (JSON); False if another's had to go."""
        # As it reads in JSON, where a tuple is a list.
        fresh = {"recipe": json.loads(json.dumps(recipe)), "files": {}}
        self._journal = self._read() or fresh
        same: bool = self._journal["recipe"] == fresh["recipe"]
        if not same:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._journal = fresh
        # Before the folder, so that a folder always has one.
        self._write()
        self.folder.mkdir(exist_ok=True)
        self._drop_unfinished()
        return same

    def finished(self) -> dict[str, Any]:
        """Receipts of the files that are complete, by name."""
        return {name: file["receipt"] for name, file in self._journal["files"].items()}

    def finish(self, name: str, receipt: Any) -> None:
        """Note that the file `name` is complete; `receipt` is plain JSON."""
        size = (self.folder / name).stat().st_size
        self._journal["files"][name] = {"bytes": size, "receipt": receipt}
        self._write()

    def publish(self) -> None:
        """Make the folder the one at `out`. Raises UserError if there is one by now."""
        _refuse(self._out)
        self.folder.rename(self._out)
        (self._home / _JOURNAL).unlink()

    def abandon(self) -> None:
        """Leave nothing behind, unless a file is complete, with which another conversion can go on."""
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
                f"{path} is damaged; remove {self._home} to begin anew.", code="malformed", key=str(path)
            ) from None

    def _write(self) -> None:
        partial = self._home / f".{_JOURNAL}"
        try:
            partial.write_text(json.dumps(self._journal))
            os.replace(partial, self._home / _JOURNAL)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def claim(out: Path) -> Iterator[ConversionDraft]:
    """The draft of `out`, for this process alone, with what an ended conversion left there. Raises UserError."""
    with ExitStack() as stack:
        home = out.with_name(f".{out.name}.partial")
        try:
            _refuse(out)
            found = {path.name for path in home.iterdir()} if home.is_dir() else set()
            # A conversion writes the journal before it makes the folder, and renames the folder before the journal goes.
            if found - {LOCK, _JOURNAL, _FOLDER, f".{_JOURNAL}"} or (_FOLDER in found and _JOURNAL not in found):
                raise UserError(
                    f"{home} was not made by a conversion; move it away, or give another folder.",
                    code="exists",
                    key=str(home),
                )
            stack.enter_context(working_folder(home))
        except BlockingIOError:
            raise UserError(
                f"Another process converts in {home}; wait for it, or end it.", code="in_use", key=str(home)
            ) from None
        except OSError as error:
            raise UserError(
                f"Nothing can be written to {out} ({error.strerror}); give another folder.", code="denied", key=str(out)
            ) from None
        draft = ConversionDraft(out, home)
        stack.callback(draft.abandon)
        yield draft


def _refuse(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(
            f"{out} exists already; give a folder that does not, or remove it first.", code="exists", key=str(out)
        )


def megatron_to_hf(
    checkpoint: str | Path,
    out: str | Path,
    original: str | Path | None = None,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    processes: int | None = None,
    show: OnBytes | None = None,
) -> Outcome:
    """Write the weights of a Megatron checkpoint as the new Hugging Face folder `out`; see `run` for the rest.

    `original` is the Hugging Face folder that training started from, for its config and tokenizer; None if
    `hf_to_megatron` made the checkpoint. The dtype of each tensor is kept unless one is given.
    """
    if shard_bytes < 1:
        raise UserError(f"shard_bytes is {shard_bytes}; give 1 or more.", code="out_of_range", key="shard_bytes")
    opened = open_checkpoint(checkpoint)
    model = model_of(opened.folder, original)
    values = is_critic(opened)
    weights = WeightMap(architecture_in(model), values=values)
    opened.check(weights)
    opened.check_copies(weights)
    return run(ToHf(opened, weights, values, model, chosen(dtype), shard_bytes), Path(out), processes, show)


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file."""

    name: str
    entries: tuple[Entry, ...]  # In the order in which they are written: that of export, larger dtypes first.
    specs: tuple[TensorSpec, ...]  # Of all their Hugging Face tensors, in that order.


@dataclass(frozen=True)
class ToHf:
    """See `Conversion`."""

    checkpoint: MegatronCheckpoint
    weights: WeightMap
    values: bool
    original: Path
    dtype: torch.dtype | None
    shard_bytes: int

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """The files by name."""
        return {shard.name: shard for shard in self._plan()}

    def recipe(self) -> Mapping[str, Any]:
        return {
            "to": "hugging face",
            "checkpoint": fingerprint(self.checkpoint.folder, self.checkpoint.files()),
            "original": fingerprint(self.original, companions(self.original)),
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
            "shard_bytes": self.shard_bytes,
        }

    def jobs(self, folder: Path) -> Sequence[Job]:  # noqa: ARG002
        return [Job(shard.name, file_bytes(shard.specs)) for shard in self.shards.values()]

    def write(self, name: str, folder: Path) -> None:
        shard = self.shards[name]
        parts = (part for entry in shard.entries for part in self.checkpoint.parts(entry, self.weights))
        write_safetensors(folder / name, shard.specs, ((hf, cast(hf, tensor, self.dtype)) for hf, tensor in parts))

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG002
        specs = [spec for shard in self.shards.values() for spec in shard.specs]
        if len(self.shards) > 1:
            file_of = {spec.name: shard.name for shard in self.shards.values() for spec in shard.specs}
            total = {"total_size": sum(spec.nbytes for spec in specs)}
            index = {"metadata": total, "weight_map": dict(sorted(file_of.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        notes = copy_companions(self.original, folder)
        adjust_config(folder, most(specs), self.values)
        return notes

    def _plan(self) -> Iterator[Shard]:
        pairs = []
        for entry in self.weights.entries():
            dtype, shapes = self.dtype or self.checkpoint.dtype(entry), entry.rule.shapes
            specs = [TensorSpec(name, dtype, shape) for name, shape in zip(entry.hf, shapes, strict=True)]
            pairs.append((entry, specs))
        runs = list(packed(pairs, lambda pair: sum(spec.nbytes for spec in pair[1]), self.shard_bytes))
        for number, held in enumerate(runs, 1):
            name = SINGLE if len(runs) == 1 else f"model-{number:05d}-of-{len(runs):05d}.safetensors"
            held.sort(key=lambda pair: -pair[1][0].dtype.itemsize)
            yield Shard(name, tuple(entry for entry, _ in held), tuple(spec for _, specs in held for spec in specs))


def hf_to_megatron(
    source: str | Path,
    out: str | Path,
    *,
    parallel: ParallelConfig | None = None,
    dtype: str | None = None,
    values: bool = False,
    processes: int | None = None,
    show: OnBytes | None = None,
) -> Outcome:
    """Write the Hugging Face folder `source` as the new Megatron checkpoint `out`; see `run` for the rest.

    It loads under any TP, PP and EP; `parallel` is the one that it is laid out for. `values` makes a critic's, with a
    head of zeros where the source has none. The dtype of each tensor is kept unless one is given.
    """
    source, parallel = Path(source), parallel or ParallelConfig()
    for key, size in (("tp", parallel.tp), ("pp", parallel.pp), ("ep", parallel.ep)):
        if size < 1:
            raise UserError(f"{key} is {size}; give 1 or more.", code="out_of_range", key=key)
    weights = WeightMap(architecture_in(source), values=values)
    reader = HfReader(source)
    check_hf(reader, weights, source, values)
    made = ToMegatron(source, reader, weights, values, parallel, chosen(dtype))
    return run(made, Path(out), processes, show)


@dataclass(frozen=True)
class ToMegatron:
    """See `Conversion`."""

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
        # Last, because it says that the checkpoint is complete.
        self._writer.finish(folder, [receipts[file.name] for file in self._writer.files], About(step=0))
        return notes

    @cached_property
    def _writer(self) -> TorchDistWriter:
        """Made once: it plans every weight."""
        return TorchDistWriter(self.weights, self._dtype, self.parallel)

    def _dtype(self, entry: Entry) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        found = {self.reader.spec(name).dtype for name in entry.hf if name in self.reader.names()}
        if len(found) > 1:
            raise UserError(
                f"{self.source} has {', '.join(entry.hf)} in {' and '.join(sorted(map(dtype_name, found)))}, and "
                "they are one tensor in Megatron; give --dtype.",
                code="mismatch",
                key=entry.hf[0],
            )
        return found.pop() if found else most(self.reader.spec(name) for name in self.reader.names())

    def _parts(self, entry: Entry) -> list[Tensor]:
        dtype, names = self._dtype(entry), self.reader.names()
        # What is not there is a critic's head, or its bias: values begin at zero.
        return [
            cast(name, self.reader.get(name), dtype) if name in names else torch.zeros(shape, dtype=dtype)
            for name, shape in zip(entry.hf, entry.rule.shapes, strict=True)
        ]
