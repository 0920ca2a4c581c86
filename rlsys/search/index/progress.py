"""How far a build is: a bar on a terminal, a line now and then elsewhere; both with rate and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

OnProgress = Callable[[str, int, int], None]
"""Called with the stage, what of it is done and how much it is; first with what was done before."""
_LINE_EVERY_S = 10.0


@contextmanager
def shown(console: Console, unit: str = "passages") -> Iterator[OnProgress]:
    """Shows on `console` what it is called with."""
    if not console.is_terminal:
        yield Lines(lambda line: console.print(line, highlight=False, soft_wrap=True), unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, int] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                # What was done before is no work of this run, so the rate leaves it out.
                tasks[stage] = bar.add_task(f"{stage} {unit}", total=total, completed=done)
            bar.update(tasks[stage], completed=done)  # type: ignore[arg-type]

        yield show


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Passages a second."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s")


class Lines:
    """Progress as lines of text, at most one every ten seconds and one at the end of each stage."""

    def __init__(self, write: Callable[[str], None], unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._unit = unit
        self._clock = clock
        self._stage = ""
        self._started = (0.0, 0)
        self._written = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See OnProgress."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._started, self._written = stage, (now, done), now
            if done < total:
                where = f", continuing after {done:,}" if done else ""
                self._write(f"{stage}: {total:,} {self._unit}{where}")
        elif done == total or now - self._written >= _LINE_EVERY_S:
            self._written = now
            began, before = self._started
            rate = (done - before) / max(now - began, 1e-9)
            left = f", {(total - done) / rate:,.0f} s left" if rate and done < total else ""
            self._write(f"{stage}: {done:,} of {total:,} {self._unit}, {rate:,.0f}/s{left}")
