"""Reads and writes the record files of a run: metrics.jsonl, timeline.jsonl, summary.json.

A row of metrics.jsonl is {"step", "time" in seconds since the epoch, flat keys}; docs/metrics.md lists the keys.

A row of timeline.jsonl is {"step", "window", "spans"}. `window` is the step's start and end in ns since the epoch.
`spans` lists the spans that ended since the previous row, each as [name, start_ns, end_ns, group, lane, args]. The last
row of a run has step null and holds the spans that ended after the last step.

Besides traced spans, a row has three kinds of spans derived from episodes, in the lane of their prompt group.
"generate.turns" covers the time in which an engine generates for an episode of the prompt group. "search.queries"
covers the time in which an episode of the group searches and none generates. "tool.NAME" covers the time in which an
episode waits for this tool and none generates or searches. Reward scoring and other waits are in no such span.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.errors import disk_error
from rlsys.files import json_safe, limited_lines, open_regular, parse_json, write_atomically
from rlsys.observe.spans import Interval, Span

METRICS, TIMELINE, SUMMARY = "metrics.jsonl", "timeline.jsonl", "summary.json"
"""File names within a run folder."""


class LineLog:
    """Appends rows to a JSON Lines file, unbuffered.

    A resumed run truncates the file to the checkpointed `position`, because the run repeats the steps of later rows. A
    line cut short by a crash is terminated, so that the next row starts on its own line. A line cut short by a full
    disk is removed. Rows are ASCII, so that a cut never splits a character.
    """

    def __init__(self, path: Path, position: int | None = None) -> None:
        """`position`: byte offset to truncate the file to; None keeps all of it. Raises RunError on a disk error."""
        self._path = path
        with self._in_one_sentence():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            self._end = self._file.tell()
            if position is not None and position < self._end:
                self._file.truncate(position)
                self._end = position
        if self._end > 0 and os.pread(self._file.fileno(), 1, self._end - 1) != b"\n":
            self._write(b"\n")

    @property
    def position(self) -> int:
        """Byte offset of the end of the file. Calls fsync first, so these bytes survive a machine crash.

        Raises RunError on a disk error.
        """
        with self._in_one_sentence():
            os.fsync(self._file.fileno())
        return self._end

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row, NaN and infinity as null. Raises RunError on a disk error."""
        self._write(json.dumps(json_safe(dict(row)), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        begun = self._end
        with self._in_one_sentence():
            try:
                while line:
                    written = self._file.write(line)
                    self._end, line = self._end + written, line[written:]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(begun)
                    self._end = begun
                raise

    @contextmanager
    def _in_one_sentence(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise disk_error(problem, self._path) from problem


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file by step, for the driver that resumes the run. Raises OSError.

    Silently skips lines that are no row of a step, such as a line cut short by a crash; `run_folder.open_run` reports
    such lines. If a step was repeated, the later row wins.
    """
    rows: dict[int, dict[str, Any]] = {}
    with open_regular(path) as file:
        for line in limited_lines(file):
            if (row := read_step_row(line)) is not None:
                rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def read_object(line: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for anything else."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_step_row(line: bytes) -> dict[str, Any] | None:
    """Parse a JSON object with an integer "step"; None for anything else."""
    row = read_object(line)
    return row if row is not None and type(row.get("step")) is int else None


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` atomically, NaN as null, keys sorted at every level so that two runs can be compared by diff."""
    text = json.dumps(json_safe(summary), indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_atomically(path, text + "\n")


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Time window of a step, and the spans that overlap it, not cut to the window and sorted by start.

    Some of these spans are work for other steps.
    """

    step: int
    window: Interval
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """Parsed row of timeline.jsonl; the last row of a run has neither step nor window."""

    step: int | None
    window: Interval | None
    spans: tuple[Span, ...]


def timeline_row(step: int | None, window: Interval | None, spans: Iterable[Span]) -> dict[str, Any]:
    """Return a timeline row for a `LineLog`; `spans` are all spans that ended since the previous row."""
    listed = [[span.name, span.start_ns, span.end_ns, span.group, span.lane, span.args] for span in spans]
    return {"step": step, "window": window, "spans": listed}


def read_timeline_row(line: bytes) -> TimelineRow | None:
    """Parse a timeline row; None if it is damaged."""
    try:
        row: dict[str, Any] = parse_json(line)
        step, window = row["step"], row["window"] and (row["window"][0], row["window"][1])
        spans = tuple(Span(*fields) for fields in row["spans"])
    except (ValueError, TypeError, LookupError):
        return None
    whole = all(isinstance(figure, int) for figure in (*(window or ()), 0 if step is None else step))
    return TimelineRow(step, window, spans) if whole and all(map(_is_span, spans)) else None


def _is_span(span: Span) -> bool:
    texts = isinstance(span.name, str) and isinstance(span.group, str) and isinstance(span.lane, str)
    return texts and isinstance(span.start_ns, int) and isinstance(span.end_ns, int) and isinstance(span.args, dict)


def steps_of(rows: Iterable[TimelineRow]) -> tuple[StepTimeline, ...]:
    """Group the spans of timeline rows, given in file order, by the steps that they overlap."""
    listed = list(rows)
    waiting = sorted((span for row in listed for span in row.spans), key=lambda span: -span.start_ns)
    steps: list[StepTimeline] = []
    touching: list[Span] = []
    for row in listed:
        if row.step is None or row.window is None:
            continue
        start, end = row.window
        while waiting and waiting[-1].start_ns < end:
            touching.append(waiting.pop())
        touching = [span for span in touching if span.end_ns > start]
        steps.append(StepTimeline(row.step, row.window, tuple(touching)))
    return tuple(steps)
