"""Reports the current activity of each stage to the progress line and to `status.json`.

    show("waits for rollouts", "inference")                     # until the stage reports something else
    with stage("saves a checkpoint", "actor.checkpoint"): ...   # until the body ends

Both write to the log and to the reporter that `reported_to` binds to the current context: a run's `Progress`. No
argument needs passing down, because asyncio tasks and threads inherit the context. Text that starts with "waits" is a
wait and names its cause; any other text is work; an empty text clears the stage. The part of a stage's name before a
dot is the worker group: "critic" and "critic.values" are parts of one group.

Contract of `status.json`: it is complete at any time, at most `INTERVAL_S` out of date, and rewritten at least every
`HEARTBEAT_S` while the process lives, so an old file means a dead process. Best effort: after a disk error, the run
continues with one warning. The end of the run is recorded even on a full disk, by overwriting the file in place; only
during that write can a kill damage the file. Times are seconds since the epoch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlsys.errors import Interrupted, root_cause
from rlsys.files import json_safe, parse_json, read_regular, write_atomically

STATUS = "status.json"
INTERVAL_S = 1.0
"""Interval of checks for a changed status."""
HEARTBEAT_S = 5.0
"""Interval of writes of an unchanged status."""
FINISHED, FAILED = "finished", "failed: "

WAIT_PREFIX = "waits"
Report = Callable[[str, str], None]
"""Receives the name of a stage and its current activity."""

_log = logging.getLogger(__name__)
_report: ContextVar[Report] = ContextVar("report", default=lambda _stage, _text: None)


def show(text: str, *stages: str) -> None:
    """Report the activity `text` for `stages`, until these stages report another activity."""
    for name in stages:
        _log.log(logging.DEBUG if not text or text.startswith(WAIT_PREFIX) else logging.INFO, "%s: %s", name, text)
        _report.get()(name, text)


@contextmanager
def stage(text: str, *stages: str, span: AbstractContextManager[Any] | None = None) -> Iterator[Any]:
    """Report the activity `text` for `stages` while the body runs; also enters `span` and yields its value."""
    show(text, *stages)
    try:
        with span or nullcontext() as args:
            yield args
    finally:
        show("", *stages)


@contextmanager
def reported_to(report: Report) -> Iterator[None]:
    """Send all reports of the body, and of tasks started in it, to `report`."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 group", "6 groups"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, slots=True)
class StageState:
    """Current activity of a group of processes."""

    text: str
    since: float


@dataclass(frozen=True, slots=True)
class Status:
    """Snapshot of a run. Metrics not known yet are None."""

    step: int
    steps: int
    begun: float
    """Start time of this process; a resume resets it."""
    at: float
    """Time of writing."""
    states: Mapping[str, StageState]
    """Activity by group."""
    em: float | None = None
    """Exact match of the last evaluation."""
    reward: float | None = None
    tokens_per_s: float | None = None
    ended: str | None = None
    """`FINISHED`, or `FAILED` followed by the reason; None while the run is active."""

    def text(self) -> str:
        """Return the content of status.json."""
        row = {**asdict(self), "pid": os.getpid(), "host": socket.gethostname()}
        return json.dumps(json_safe(row), indent=2) + "\n"


class StatusFile:
    """Writes status.json from a background thread, so that a hung event loop is reported too."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._written: Status | None = None
        self._refused = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, look: Callable[[], Status]) -> None:
        """Start the thread that writes the result of `look` whenever it changes; `look` must be thread-safe."""
        self.write(look())
        self._thread = threading.Thread(target=self._run, args=(look,), name="status", daemon=True)
        self._thread.start()

    def end(self, last: Status) -> None:
        """Stop the thread and write `last`."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.write(last)
        if self._refused:
            self._write_in_place(replace(last, at=self._clock()))

    def write(self, status: Status) -> None:
        """Write `status` if it has changed or the file is `HEARTBEAT_S` old."""
        before, now = self._written, self._clock()
        if before and replace(status, at=before.at) == before and now - before.at < HEARTBEAT_S:
            return
        status = replace(status, at=now)
        try:
            write_atomically(self._path, status.text())
        except OSError as problem:
            if not self._refused:
                _log.warning("%s could not be written (%s): the run continues.", self._path, problem.strerror)
            self._refused = True
            return
        self._written, self._refused = status, False

    def _write_in_place(self, last: Status) -> None:
        """Overwrite the existing file, which works on a full disk."""
        with suppress(OSError), self._path.open("r+b") as file:
            file.write(last.text().encode())
            file.truncate()

    def _run(self, look: Callable[[], Status]) -> None:
        while not self._over.wait(INTERVAL_S):
            self.write(look())


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """Read status.json of the run in `run_dir`; None if it is missing or damaged."""
    try:
        found = parse_json(read_regular(run_dir / STATUS))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def ending(error: BaseException | None) -> str:
    """Return the value of `Status.ended` for a run that ended with `error`, or with success if `error` is None."""
    if error is None:
        return FINISHED
    cause = root_cause(error)
    if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt | Interrupted):
        return f"{FAILED}interrupted"
    return FAILED + (" ".join(str(cause).split()) or type(cause).__name__)


PLAIN_INTERVAL_S = 10.0
"""Interval of plain progress lines within a step; a new step always prints a line."""
REFRESH_PER_S = 4.0
SHOWN_WAIT_S = 1.0
"""Shortest wait whose duration is shown; shorter ones are normal and would flicker."""


class Progress:
    """Shows the progress line and writes status.json while the `with` body runs; see the module's contract."""

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        status: StatusFile | None = None,
    ) -> None:
        """`status` is written while the body runs, and at its end with the outcome."""
        self.console = console or Console()
        self._clock = clock
        self._start = clock()
        self._epoch = time.time() - self._start
        """Zero of `clock`, in seconds since the epoch."""
        self._figures = Status(step=0, steps=0, begun=self._epoch + self._start, at=0.0, states={})
        """Current status without `states`."""
        self._parts: dict[str, dict[str, StageState]] = {}
        """Group -> reporting part -> its state, with `since` in time of `clock`."""
        self._file = status
        self._lock = threading.Lock()
        self._printed_step = -1
        self._printed_at = float("-inf")
        self._live: Live | None = None
        self._reporting: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> Self:
        self._reporting = reported_to(lambda stage, text: self.update(states={stage: text}))
        self._reporting.__enter__()
        if self.console.is_terminal:
            refresh, render = REFRESH_PER_S, self._render
            self._live = Live(console=self.console, get_renderable=render, refresh_per_second=refresh, transient=True)
            self._live.start()
        if self._file is not None:
            self._file.begin(self.status)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._reporting.__exit__(None, None, None)
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._file is not None:
            self._file.end(replace(self.status(), ended=ending(error)))

    def update(
        self,
        *,
        step: int | None = None,
        steps: int | None = None,
        em: float | None = None,
        reward: float | None = None,
        tokens_per_s: float | None = None,
        states: Mapping[str, str] | None = None,
    ) -> None:
        """Update the given values. `em`: exact match of the last evaluation. `states`: stage name -> activity."""
        given: dict[str, Any] = {"step": step, "steps": steps, "em": em, "reward": reward, "tokens_per_s": tokens_per_s}
        now = self._clock()
        with self._lock:
            self._figures = replace(self._figures, **{name: given[name] for name in given if given[name] is not None})
            for part, text in (states or {}).items():
                reported = self._parts.setdefault(part.partition(".")[0], {})
                if not text:
                    reported.pop(part, None)
                elif part not in reported or reported[part].text != text:
                    reported[part] = StageState(text, now)
        if self._live is None and not self.console.is_terminal:
            self._print_plain(now)

    def warn(self, sentence: str) -> None:
        """Print a warning above the progress line."""
        self.notice(f"Warning: {sentence}")

    def notice(self, sentence: str) -> None:
        """Print a sentence above the progress line, in the colour of warnings."""
        self.console.print(sentence, style="yellow", highlight=False, markup=False)

    def line(self) -> str:
        """Return step, metrics and group activities in one line of plain text."""
        with self._lock:
            now = self._clock()
            parts = [self._step(), *self._measured(), _duration(now - self._start)]
            parts += [f"{group}: {_with_wait(state, now)}" for group, state in self._shown()]
        return " | ".join(parts)

    def status(self) -> Status:
        """Return the current status, with times in seconds since the epoch. Thread-safe."""
        with self._lock:
            states = {group: replace(state, since=self._epoch + state.since) for group, state in self._shown()}
            return replace(self._figures, at=self._epoch + self._clock(), states=states)

    def _shown(self) -> list[tuple[str, StageState]]:
        """Return the state of each active group, in the order of their first reports."""
        return [(group, _shown_of(parts.values())) for group, parts in self._parts.items() if parts]

    def _step(self) -> str:
        return f"step {self._figures.step}/{self._figures.steps}"

    def _measured(self) -> list[str]:
        """Format the known metrics."""
        figures = self._figures
        shown = (
            ("EM", figures.em, ".3f"),
            ("reward", figures.reward, ".3f"),
            ("tokens/s", figures.tokens_per_s, ",.0f"),
        )
        return [f"{name} {value:{form}}" for name, value, form in shown if value is not None]

    def _print_plain(self, now: float) -> None:
        step = self._figures.step
        if step == self._printed_step and now - self._printed_at < PLAIN_INTERVAL_S:
            return
        self._printed_step, self._printed_at = step, now
        self.console.print(Text(self.line()), soft_wrap=True)

    def _render(self) -> RenderableType:
        with self._lock:
            figures, now = self._figures, self._clock()
            head = Table.grid(padding=(0, 2))
            head.add_row(
                Text(self._step(), style="bold"),
                ProgressBar(total=max(figures.steps, 1), completed=figures.step, width=20),
                *map(Text, self._measured()),
                Text(_duration(now - self._start), style="dim"),
            )
            body = Table.grid(padding=(0, 2))
            for group, state in self._shown():
                style = "yellow" if state.text.startswith(WAIT_PREFIX) else ""
                text = Text(_with_wait(state, now), style=style, no_wrap=True, overflow="ellipsis")
                body.add_row(Text(group, style="cyan"), text)
        area = Table.grid()
        area.add_row(head)
        area.add_row(body)
        return area


def _shown_of(states: Collection[StageState]) -> StageState:
    """Return the latest work of a group's parts; if all of them wait, the latest wait."""
    working = [state for state in states if not state.text.startswith(WAIT_PREFIX)]
    return max(working or states, key=lambda state: state.since)


def _with_wait(state: StageState, now: float) -> str:
    waited = now - state.since
    long = state.text.startswith(WAIT_PREFIX) and waited >= SHOWN_WAIT_S
    return f"{state.text} ({waited:.0f} s)" if long else state.text


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
