"""A conversion: files that are known before the first is written, each written whole by one of several processes.

Invariants: a file is written once, also when a conversion is killed and started again; what a file holds does
not depend on how many processes there are; whoever waits for a process that dies gets RunError; a process ends
with the one that started it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from rlsys.errors import Interrupted, RunError, UserError
from rlsys.weights.convert.draft import Draft, claim

OnBytes = Callable[[int, int], None]
"""Called with the bytes that are written, and those of the whole; first with what was there before."""
GOES_ON = "the same command goes on where this one stopped."
_LOOK_EVERY_S = 0.2
_WORTH_BYTES = 4 * 10**9
"""A process takes the time to start in which another writes about so much."""


@dataclass(frozen=True, slots=True)
class Job:
    """One file to write."""

    name: str
    """Within the folder; no other job's."""
    nbytes: int
    """About as long as it will be."""


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
    kept: int
    """Of these, files that an earlier conversion had written."""
    nbytes: int
    notes: tuple[str, ...]
    """Sentences for the user."""


def run(conversion: Conversion, out: Path, processes: int | None = None, show: OnBytes | None = None) -> Outcome:
    """Make the folder `out`, which must not exist.

    At most `processes` write (None: one for each core, if there is enough to do); with one, none is started.
    Raises UserError for what the user gave, RunError if a file cannot be written, Interrupted; after all of
    them the same call goes on with the files that are missing.
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


def _finished(conversion: Conversion, draft: Draft, processes: int | None, show: OnBytes | None) -> Outcome:
    """Write what is missing in the draft."""
    jobs = conversion.jobs(draft.folder)
    waiting = [job for job in jobs if job.name not in draft.finished()]
    total = sum(job.nbytes for job in jobs)
    crowd = min(processes or _worth(waiting), len(waiting))
    with _shown(draft.folder, total, show):
        (_alone if crowd <= 1 else _together)(conversion, draft, waiting, crowd)
    notes = conversion.finish(draft.folder, draft.finished())
    return Outcome(len(jobs), len(jobs) - len(waiting), total, tuple(notes))


def _worth(jobs: Sequence[Job]) -> int:
    return min(len(os.sched_getaffinity(0)), 1 + sum(job.nbytes for job in jobs) // _WORTH_BYTES)


def _alone(conversion: Conversion, draft: Draft, jobs: Sequence[Job], _crowd: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job in jobs:
            draft.finish(job.name, conversion.write(job.name, draft.folder))
    finally:
        torch.set_num_threads(threads)


def _together(conversion: Conversion, draft: Draft, jobs: Sequence[Job], crowd: int) -> None:
    # The largest first, so that no process has a large one left at the end.
    waiting = sorted(jobs, key=lambda job: job.nbytes)
    with _workers(conversion, draft.folder, crowd) as workers:
        busy: dict[Connection, str] = {}
        for pipe in workers:
            busy[pipe] = _give(pipe, waiting)
        while busy:
            answering = wait(list(busy))
            for pipe in [pipe for pipe in busy if pipe in answering]:
                draft.finish(busy.pop(pipe), _answer(pipe))
                if waiting:
                    busy[pipe] = _give(pipe, waiting)


def _give(pipe: Connection, waiting: list[Job]) -> str:
    name = waiting.pop().name
    try:
        pipe.send(name)
    except OSError:
        raise _died() from None
    return name


def _answer(pipe: Connection) -> Any:
    try:
        receipt, error = pipe.recv()
    except (EOFError, OSError):
        raise _died() from None
    if error is not None:
        raise error
    return receipt


def _died() -> RunError:
    return RunError(
        f"A process of the conversion was ended (is there too little memory? use fewer processes); {GOES_ON}"
    )


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
        while True:
            show(min(bytes_in(folder), total), total)
            if end.wait(_LOOK_EVERY_S):
                return

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
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total
