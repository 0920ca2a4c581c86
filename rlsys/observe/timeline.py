"""timeline.jsonl: what every group worked on, and when; a row a step, on disk as soon as the step is over.

A row is {"step", "window", "spans"}: the step's start and end in ns since the epoch, and the spans that ended since the row
before, each as [name, start_ns, end_ns, group, lane, args]. The last row of a run has no step: what ended after its last one.

Beside the traced spans there are two kinds that are derived from episodes, in the lane of their group of rollouts:
"generate.turns", when an engine generated for one of them, and "search.queries", when none did and one of them searched.
Rewards and what else waits are neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.data.trajectory import Trajectory
from rlsys.files import parse_json
from rlsys.observe.lines import LineLog
from rlsys.observe.spans import ROLLOUT_GROUP, Arg, Interval, Span, merge_intervals, without_intervals

TIMELINE = "timeline.jsonl"
GENERATE_SPAN, SEARCH_SPAN = "generate.turns", "search.queries"


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """One step."""

    step: int
    window: Interval
    spans: tuple[Span, ...]
    """That touch the window, by start; not cut to it. Includes work for other steps."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is written at the end of a step, or of the run, which has neither step nor window."""

    step: int | None
    window: Interval | None
    spans: tuple[Span, ...]


class TimelineLog:
    """Appends rows to a run's timeline. A resumed run appends to the same file, from `position` on."""

    def __init__(self, run_dir: Path, position: int | None = None) -> None:
        self._lines = LineLog(run_dir / TIMELINE, position)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._lines.position

    def append(self, step: int | None, window: Interval | None, spans: Iterable[Span]) -> None:
        """Write what ended since the last row; `window` is that of `step`."""
        listed = [[one.name, one.start_ns, one.end_ns, one.group, one.lane, one.args] for one in spans]
        self._lines.append({"step": step, "window": window, "spans": listed})

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()


class EpisodeSpans:
    """The spans that are derived from episodes, until somebody takes them."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, whole: Interval, lane: str, args: Mapping[str, Arg], trajectories: Sequence[Trajectory]) -> None:
        """Derive those of a group of rollouts, which took `whole`."""
        self._spans += episode_spans(whole, lane, args, trajectories)

    def drain(self) -> list[Span]:
        """Those added since the last call."""
        spans, self._spans = self._spans, []
        return spans


def episode_spans(
    whole: Interval, lane: str, args: Mapping[str, Arg], trajectories: Sequence[Trajectory]
) -> list[Span]:
    """When somebody of a group generated, and when nobody did and somebody searched, within `whole`.

    Turns whose begin is not known, or that were taken before (a resumed run goes on with them), are in none.
    """
    generated: list[Interval] = []
    searched: list[Interval] = []
    for turn in (turn for one in trajectories for turn in one.turns if turn.began_ns):
        middle = turn.began_ns + round(turn.generate_s * 1e9)
        generated.append(_within((turn.began_ns, middle), whole))
        searched.append(_within((middle, middle + round(turn.tool_s * 1e9)), whole))
    generating = merge_intervals(generated)
    searching = without_intervals(merge_intervals(searched), generating)
    return [
        Span(name, start, end, ROLLOUT_GROUP, lane, args)
        for name, found in ((GENERATE_SPAN, generating), (SEARCH_SPAN, searching))
        for start, end in found
    ]


def steps_of(rows: Iterable[Row]) -> tuple[StepTimeline, ...]:
    """The steps of a timeline's rows, which come in order."""
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


def read_row(line: bytes) -> Row | None:
    """A row; None for one that is damaged."""
    try:
        row: dict[str, Any] = parse_json(line)
        step, window = row["step"], row["window"] and (row["window"][0], row["window"][1])
        spans = tuple(Span(*fields) for fields in row["spans"])
    except (ValueError, TypeError, LookupError):
        return None
    whole = all(isinstance(figure, int) for figure in (*(window or ()), 0 if step is None else step))
    return Row(step, window, spans) if whole and all(map(_is_span, spans)) else None


def _is_span(span: Span) -> bool:
    texts = isinstance(span.name, str) and isinstance(span.group, str) and isinstance(span.lane, str)
    return texts and isinstance(span.start_ns, int) and isinstance(span.end_ns, int) and isinstance(span.args, dict)


def _within(interval: Interval, whole: Interval) -> Interval:
    return max(interval[0], whole[0]), min(interval[1], whole[1])
