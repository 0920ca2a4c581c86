"""The status of a run: what each stage does now, reported by whoever does it, and `status.json` for programs.

`show("waits for rollouts", "inference")` reports a stage, `with stage("saves a checkpoint", "actor.checkpoint"):` one that
ends with its body. Both reach the reporter that `reported_to` has bound to the current context (a run's `Progress`, which
feeds the progress line and `status.json`) and the log, and need no argument passed down: tasks and threads that asyncio
starts inherit the context. "waits for ..." is a wait and names its cause; any other text is work; an empty one ends what
the stage had reported. A name before a dot is the group: "critic" and "critic.values" are parts of one group.

Contract of the file: it is whole at any time, as new as `INTERVAL_S`, and written again at least every `HEARTBEAT_S` while
the process lives, so that one that was killed shows by the age of its file. It is best effort: on a disk error it
warns once, and the run goes on. How the run ended is written on a full disk too, over what is in the file (only
then may a kill leave it damaged). Times are seconds since the epoch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlsys.errors import Interrupted, root_cause
from rlsys.files import json_safe, parse_json, read_regular, write_atomically

STATUS = "status.json"
INTERVAL_S = 1.0
"""Between two looks at whether there is anything new to write."""
HEARTBEAT_S = 5.0
"""Between two writes of what has not changed."""
FINISHED, FAILED = "finished", "failed: "

WAIT_PREFIX = "waits"
Report = Callable[[str, str], None]
"""Takes the name of a stage and what it does now."""

_log = logging.getLogger(__name__)
_report: ContextVar[Report] = ContextVar("report", default=lambda _stage, _text: None)


def show(text: str, *stages: str) -> None:
    """Report that `stages` do `text`, until they report something else."""
    for name in stages:
        _log.log(logging.DEBUG if not text or text.startswith(WAIT_PREFIX) else logging.INFO, "%s: %s", name, text)
        _report.get()(name, text)


@contextmanager
def stage(text: str, *stages: str, span: AbstractContextManager[Any] | None = None) -> Iterator[Any]:
    """Report that `stages` do `text` while the body runs, and record its time as `span`; yields what the span does."""
    show(text, *stages)
    try:
        with span or nullcontext() as args:
            yield args
    finally:
        show("", *stages)


@contextmanager
def reported_to(report: Report) -> Iterator[None]:
    """Send what the body and the tasks that it starts report to `report`."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 group", "6 groups"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, slots=True)
class StageState:
    """The work or the wait of a group of workers."""

    text: str
    since: float


@dataclass(frozen=True, slots=True)
class Status:
    """One moment of a run. Figures that are not known yet are None."""

    step: int
    steps: int
    begun: float
    """Of this life of the run: a resumed run begins again."""
    at: float
    """When this was written."""
    states: Mapping[str, StageState]
    """By group."""
    em: float | None = None
    """Exact match of the last evaluation."""
    reward: float | None = None
    tokens_per_s: float | None = None
    ended: str | None = None
    """`FINISHED`, or `FAILED` and the reason; None while the run goes on."""

    def text(self) -> str:
        """The file's text."""
        row = {**asdict(self), "pid": os.getpid(), "host": socket.gethostname()}
        return json.dumps(json_safe(row), indent=2) + "\n"


class StatusFile:
    """Writes the file from a thread of its own, so that an event loop that hangs is told of as well."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._written: Status | None = None
        self._refused = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, look: Callable[[], Status]) -> None:
        """From now on write what `look` finds, as soon as it has changed; `look` is called from another thread."""
        self.write(look())
        self._thread = threading.Thread(target=self._run, args=(look,), name="status", daemon=True)
        self._thread.start()

    def end(self, last: Status) -> None:
        """Write `last`, and nothing after it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.write(last)
        if self._refused:
            self._write_in_place(replace(last, at=self._clock()))

    def write(self, status: Status) -> None:
        """Write `status` if it is new, or what is in the file is `HEARTBEAT_S` old."""
        before, now = self._written, self._clock()
        if before and replace(status, at=before.at) == before and now - before.at < HEARTBEAT_S:
            return
        status = replace(status, at=now)
        try:
            write_atomically(self._path, status.text())
        except OSError as problem:
            if not self._refused:
                _log.warning("%s could not be written (%s): the run goes on.", self._path, problem.strerror)
            self._refused = True
            return
        self._written, self._refused = status, False

    def _write_in_place(self, last: Status) -> None:
        """Write over what is in the file: a disk that has no room for a new one has that of the old."""
        with suppress(OSError), self._path.open("r+b") as file:
            file.write(last.text().encode())
            file.truncate()

    def _run(self, look: Callable[[], Status]) -> None:
        while not self._over.wait(INTERVAL_S):
            self.write(look())


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """Read the file of the run in `run_dir`; None without one, or with one that is damaged."""
    try:
        found = parse_json(read_regular(run_dir / STATUS))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def ending(error: BaseException | None) -> str:
    """Describe how a run ended that left with `error`, for `Status.ended`."""
    if error is None:
        return FINISHED
    cause = root_cause(error)
    if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt | Interrupted):
        return f"{FAILED}interrupted"
    return FAILED + (" ".join(str(cause).split()) or type(cause).__name__)
