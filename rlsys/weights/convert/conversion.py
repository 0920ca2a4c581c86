"""A conversion: files that are known before the first is written, each written whole by one of several processes.

Invariants: a file is written once, also when a conversion is killed and started again; what a file holds does not depend on how
many processes there are; whoever waits for a process that dies gets RunError; a process ends with the one that started it.

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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from rlsys.errors import Interrupted, RunError, UserError
from rlsys.files import LOCK, working_folder

OnBytes = Callable[[int, int], None]
"""Called with the bytes that are written, and those of the whole; first with what was there before."""
GOES_ON = "the same command goes on where this one stopped."
_LOOK_EVERY_S = 0.2
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

    At most `processes` write (None: one for each core, if there is enough to do); with one, none is started. Raises
    UserError for what the user gave, RunError if a file cannot be written, Interrupted; after all of them the same call
    goes on with the files that are missing.
    """
    if processes is not None and processes < 1:
        raise UserError(f"processes is {processes}; give 1 or more.")
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
        (_alone if crowd <= 1 else _together)(conversion, draft, waiting, crowd)
    notes = conversion.finish(draft.folder, draft.finished())
    return Outcome(len(jobs), len(jobs) - len(waiting), total, tuple(notes))


def _alone(conversion: Conversion, draft: ConversionDraft, jobs: Sequence[Job], _crowd: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job in jobs:
            draft.finish(job.name, conversion.write(job.name, draft.folder))
    finally:
        torch.set_num_threads(threads)


def _together(conversion: Conversion, draft: ConversionDraft, jobs: Sequence[Job], crowd: int) -> None:
    # The largest first, so that no process has a large one left at the end.
    waiting = sorted(jobs, key=lambda job: job.nbytes)
    with _workers(conversion, draft.folder, crowd) as workers:
        idle, busy = workers, dict[Connection, str]()
        while waiting or busy:
            with _alive():
                for pipe in idle[: len(waiting)]:
                    busy[pipe] = waiting.pop().name
                    pipe.send(busy[pipe])
                answering = wait(list(busy))
            idle = [pipe for pipe in busy if pipe in answering]
            for pipe in idle:
                with _alive():
                    receipt, error = pipe.recv()
                if error is not None:
                    raise error
                draft.finish(busy.pop(pipe), receipt)


@contextmanager
def _alive() -> Iterator[None]:
    """Raise RunError where a pipe turns out to have nobody at its other end."""
    try:
        yield
    except (EOFError, OSError):
        raise RunError(
            f"A process of the conversion was ended (is there too little memory? use fewer processes); {GOES_ON}"
        ) from None


@contextmanager
def _workers(conversion: Conversion, folder: Path, crowd: int) -> Iterator[list[Connection]]:
    """Pipes to processes that take a job's name and answer (receipt, None) or (None, error)."""
    context = multiprocessing.get_context("spawn")
    started: list[tuple[SpawnProcess, Connection]] = []
    try:
        for _ in range(crowd):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(conversion, folder, there), daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        yield [pipe for _, pipe in started]
    finally:
        for process, pipe in started:
            pipe.close()
            process.terminate()
        for process, _ in started:
            process.join()


def _serve(conversion: Conversion, folder: Path, pipe: Connection) -> None:
    # Ctrl-C reaches all processes of a terminal; the one that started this one says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        answer: tuple[Any, Exception | None]
        try:
            answer = (conversion.write(name, folder), None)
        except (UserError, RunError, OSError) as error:
            answer = (None, error)
        pipe.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _shown(folder: Path, total: int, show: OnBytes | None) -> Iterator[None]:
    """Tell `show` how much is written, by looking at the files."""
    if show is None:
        yield
        return
    end = threading.Event()

    def look() -> None:
        show(min(bytes_in(folder), total), total)
        while not end.wait(_LOOK_EVERY_S):
            show(min(bytes_in(folder), total), total)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
        show(total, total)
    finally:
        end.set()
        watcher.join()


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder, which may change meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


_JOURNAL, _FOLDER = "journal.json", "folder"


class ConversionDraft:
    """The place where `out` is made; made by `claim`."""

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
        self._drop_what_was_not_finished()
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

    def _drop_what_was_not_finished(self) -> None:
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
            raise UserError(f"{path} is damaged; remove {self._home} to begin anew.") from None

    def _write(self) -> None:
        partial = self._home / f".{_JOURNAL}"
        try:
            partial.write_text(json.dumps(self._journal))
            os.replace(partial, self._home / _JOURNAL)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def claim(out: Path) -> Iterator[ConversionDraft]:
    """The draft of `out`, for this process alone; what an ended conversion left there is kept.

    Raises UserError if `out` is there already, nothing can be there, or another process converts to it.
    """
    with ExitStack() as stack:
        home = out.with_name(f".{out.name}.partial")
        try:
            _refuse(out)
            _refuse_strange(home)
            stack.enter_context(working_folder(home))
        except BlockingIOError:
            raise UserError(f"Another process converts in {home}; wait for it, or end it.") from None
        except OSError as error:
            raise UserError(f"Nothing can be written to {out} ({error.strerror}); give another folder.") from None
        draft = ConversionDraft(out, home)
        stack.callback(draft.abandon)
        yield draft


def _refuse(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists already; give a folder that does not, or remove it first.")


def _refuse_strange(home: Path) -> None:
    found = {path.name for path in home.iterdir()} if home.is_dir() else set()
    # A conversion writes the journal before it makes the folder, and renames the folder before the journal goes.
    if found - {LOCK, _JOURNAL, _FOLDER, f".{_JOURNAL}"} or (_FOLDER in found and _JOURNAL not in found):
        raise UserError(f"{home} was not made by a conversion; move it away, or give another folder.")
