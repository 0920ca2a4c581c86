"""The progress of a run: a live area on a terminal, sparse plain lines where output goes to a file, and `status.json`.

Contract: `update` is cheap and may be called as often as one likes. What it is not given it keeps. A state is what a
group does, or begins with "waits for" and names the cause, without figures, which would begin the wait anew; it then
shows how long that has lasted, so that a stuck group can be seen at once.

Several parts of a run may report for one group, each under a name of its own: "critic" and "critic.values" are the same
group. A group shows what was begun last of what it does; it waits where all of its parts wait. An empty text is
the end of what a part has to report.

While the live area is up, whatever is printed or logged through `console` (or through `sys.stdout` and
`sys.stderr`) appears above it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlsys.observe.status import WAIT_PREFIX, StageState, Status, StatusFile, ending, reported_to

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
