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


PLAIN_INTERVAL_S = 10.0
"""Between plain lines of one step; a new step always gets a line."""
REFRESH_PER_S = 4.0
SHOWN_WAIT_S = 1.0
"""A shorter wait is the pipeline's normal breathing and would only flicker."""


class Progress:
    """A context manager around the run; see the module's contract."""

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        status: StatusFile | None = None,
    ) -> None:
        """`status` is written from the beginning of the run to its end, and then says how it ended."""
        self.console = console or Console()
        self._clock = clock
        self._start = clock()
        self._epoch = time.time() - self._start
        """The clock's zero, in seconds since the epoch."""
        self._figures = Status(step=0, steps=0, begun=self._epoch + self._start, at=0.0, states={})
        """Without its states."""
        self._parts: dict[str, dict[str, StageState]] = {}
        """Group -> part that reports for it -> its state, `since` by the clock."""
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
        """Take over what is given. `em` is the last evaluation's; `states` is part -> what its group does."""
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

    def line(self) -> str:
        """The step, the figures and the groups in one line of plain text."""
        with self._lock:
            now = self._clock()
            parts = [self._step(), *self._measured(), _duration(now - self._start)]
            parts += [f"{group}: {_with_wait(state, now)}" for group, state in self._shown()]
        return " | ".join(parts)

    def status(self) -> Status:
        """Everything at this moment, in seconds since the epoch; from any thread."""
        with self._lock:
            states = {group: replace(state, since=self._epoch + state.since) for group, state in self._shown()}
            return replace(self._figures, at=self._epoch + self._clock(), states=states)

    def _shown(self) -> list[tuple[str, StageState]]:
        """The state of each group, in the order in which they were first heard of."""
        return [(group, _shown_of(parts.values())) for group, parts in self._parts.items() if parts]

    def _step(self) -> str:
        return f"step {self._figures.step}/{self._figures.steps}"

    def _measured(self) -> list[str]:
        """The figures that are known, as text."""
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
    """Choose what a group does, if a part of it does something; else the wait that began last, when all else was done."""
    working = [state for state in states if not state.text.startswith(WAIT_PREFIX)]
    return max(working or states, key=lambda state: state.since)


def _with_wait(state: StageState, now: float) -> str:
    waited = now - state.since
    long = state.text.startswith(WAIT_PREFIX) and waited >= SHOWN_WAIT_S
    return f"{state.text} ({waited:.0f} s)" if long else state.text


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
