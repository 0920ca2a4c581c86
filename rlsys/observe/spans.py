"""Records spans of work, and derives stage times, idle shares, overlap and device utilisation from them.

Contract: a span covers work, never waiting, so time without a span is idle. The stage of a span is its name up to the
first dot ("train.accumulate" belongs to "train"); `args["step"]` is the step that the span belongs to, if any. Each
worker records into its own `Tracer`; the driver collects each span once, with `drain`.

Times are ns since the epoch, so spans of different machines align as well as the machines' clocks. Everything below
`Tracer` is a pure function of spans.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlsys.data.trajectory import Trajectory
from rlsys.files import write_atomically
from rlsys.observe.metrics import Metric

BATCH_METRICS = (
    Metric(
        "batch/fill/<group>",
        "share",
        "sample tokens in the micro-batches of actor, critic or inference group, relative to the token budget; above 1 "
        "only if one sample exceeds it",
    ),
    Metric("batch/padding/<group>", "share", "padding among the tokens that the worker group computed"),
    Metric(
        "perf/actor_tflops",
        "10^12/s",
        "operations that the model needs to train the step's tokens, per second of training",
    ),
    Metric(
        "mfu/actor",
        "share",
        "rate of these operations relative to the peak of the actor's devices (dense bfloat16, from the data sheet); "
        "lower in the first step of a launch, in which a GPU's kernels are compiled",
        "S",
    ),
)
Arg = str | int | float | bool | list[str]
Interval = tuple[int, int]
"""Start and end, ns."""

HIDDEN_SPANS = {
    "actor": ("train.accumulate", "train.apply"),
    "critic": ("values.compute", "train.accumulate", "train.apply"),
    "inference": ("logprob.compute",),
}
"""Worker group -> span names of work that can overlap generation."""
ROLLOUT_GROUP, ROLLOUT_SPAN = "rollout", "rollout.group"
GENERATE_SPAN, SEARCH_SPAN = "generate.turns", "search.queries"
"""Names of the spans derived from episodes; see `episode_spans`."""
TOOL_STAGE = "tool"
"""Stage of the spans of tools, which are derived from episodes too."""
QUESTIONS = "questions"
"""Span argument with the uids of the questions whose samples a call processed."""
PEAK_TFLOPS = {
    **{"GB200": 2500.0, "B200": 2250.0, "B100": 1750.0, "GH200": 989.0},
    **{"H200 NVL": 835.0, "H200": 989.0, "H100 NVL": 835.0, "H100 PCIe": 756.0, "H100": 989.0},
    **{"H800 PCIe": 756.0, "H800": 989.0, "H20": 148.0},
    **{"A100": 312.0, "A800": 312.0, "A40": 149.7, "A30": 165.0, "A10": 125.0, "RTX A6000": 154.8},
    **{"L40S": 362.05, "L40": 181.05, "L20": 119.5, "L4": 121.0},
}
"""Words of a device name -> peak dense bfloat16 TFLOPS, from the vendors' data sheets; figures with sparsity are
halved. The first entry whose words all occur in the name applies."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work."""

    name: str
    start_ns: int
    end_ns: int
    group: str
    """Worker group: rollout, inference, actor, critic, driver."""
    lane: str
    """Row within the group, such as one rank."""
    args: Mapping[str, Arg] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """Name up to its first dot."""
        return self.name.partition(".")[0]


class Tracer:
    """Records the spans of one process. Safe for threads and concurrent tasks."""

    def __init__(self, group: str, clock: Callable[[], int] | None = None) -> None:
        """`clock` returns ns since the epoch; the default is monotonic within the process."""
        self._group = group
        self._clock = clock or _steady_clock()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._running: dict[int, Span] = {}

    @contextmanager
    def span(self, name: str, lane: str | None = None, **args: Arg) -> Iterator[dict[str, Arg]]:
        """Record the body as a span, also when it raises. Yields the args, which the body may extend."""
        known = dict(args)
        begun = Span(name, self._clock(), 0, self._group, lane or "main", known)
        with self._lock:
            self._running[id(begun)] = begun
        try:
            yield known
        except BaseException as error:
            known["error"] = type(error).__name__
            raise
        finally:
            with self._lock:
                del self._running[id(begun)]
                self._spans.append(replace(begun, end_ns=self._clock()))

    def running(self) -> list[Span]:
        """Return unfinished spans as if they ended now; `drain` returns each again once it has ended."""
        now = self._clock()
        with self._lock:
            return [replace(span, end_ns=now) for span in self._running.values()]

    def now(self) -> int:
        """Return the tracer's time, ns since the epoch."""
        return self._clock()

    def drain(self) -> list[Span]:
        """Return and forget the spans that ended since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals`, disjoint and in order; drops empty and reversed intervals."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common_intervals(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two results of `merge_intervals`."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def without_intervals(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return `intervals` minus `taken`, disjoint and in order; both arguments must be results of `merge_intervals`."""
    if not intervals:
        return []
    edges = [intervals[0][0], *(edge for interval in taken for edge in interval), intervals[-1][1]]
    gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return common_intervals(intervals, gaps)


def episode_spans(
    whole: Interval, lane: str, args: Mapping[str, Arg], trajectories: Sequence[Trajectory]
) -> list[Span]:
    """Derive the spans of one prompt group's episodes within the interval `whole`.

    `GENERATE_SPAN` covers the time in which an episode generated; `SEARCH_SPAN` covers the time in which an episode
    searched and none generated; "tool.NAME" covers the time in which an episode waited for this tool alone. Turns without
    a start time, and turns before `whole` (partial episodes), contribute nothing.
    """
    spent: dict[str, list[Interval]] = {GENERATE_SPAN: [], SEARCH_SPAN: []}
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns if turn.began_ns):
        middle = turn.began_ns + round(turn.generate_s * 1e9)
        spent[GENERATE_SPAN].append((turn.began_ns, middle))
        waited = f"{TOOL_STAGE}.{turn.tool}" if turn.tool else SEARCH_SPAN
        spent.setdefault(waited, []).append((middle, middle + round(turn.tool_s * 1e9)))
    spans, taken = list[Span](), list[Interval]()
    for name, intervals in spent.items():
        within = merge_intervals((max(start, whole[0]), min(end, whole[1])) for start, end in intervals)
        spans += [Span(name, start, end, ROLLOUT_GROUP, lane, args) for start, end in without_intervals(within, taken)]
        taken = merge_intervals([*taken, *within])
    return spans


def overlap_seconds(spans: Iterable[Span], window: Interval) -> float:
    """Return the seconds of `window` in which training or scoring ran while prompt groups rolled out.

    Simultaneous work of several groups or ranks counts once.
    """
    found = list(spans)
    hidden = _clipped((span for span in found if span.name in HIDDEN_SPANS.get(span.group, ())), window)
    rolled = _clipped((span for span in found if (span.group, span.name) == (ROLLOUT_GROUP, ROLLOUT_SPAN)), window)
    return _covered(common_intervals(merge_intervals(hidden), merge_intervals(rolled)))


def stage_seconds(spans: Iterable[Span], window: Interval | None = None) -> dict[str, float]:
    """Return stage -> seconds (within `window`, if given) in which at least one worker was in the stage.

    Stages overlap, so the sum may exceed the wall time.
    """
    intervals: dict[str, list[Interval]] = defaultdict(list)  # Intervals, because the spans of a whole run are many.
    for span in spans:
        intervals[span.stage] += _clipped([span], window) if window else [(span.start_ns, span.end_ns)]
    return {stage: _covered(found) for stage, found in sorted(intervals.items())}


def idle_share(spans: Iterable[Span], window: Interval) -> dict[str, float]:
    """Return group -> share of `window`, 0 to 1, in which none of its lanes worked. Omits groups without spans."""
    start, end = window
    if end <= start:
        raise ValueError(f"The window {window} is empty: its end must come after its start.")
    length = (end - start) / 1e9
    return {
        group: 1.0 - _covered(_clipped(found, window)) / length for group, found in _by(spans, lambda span: span.group)
    }


def peak_flops(device_names: Iterable[str]) -> float | None:
    """Return the summed dense bfloat16 peak of devices in FLOP/s; `device_names` are as the driver reports them.

    None if any device is not in `PEAK_TFLOPS` (such as a CPU), or if there are no devices.
    """
    peaks = [_peak_tflops(name) for name in device_names]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) * 1e12 if known and len(known) == len(peaks) else None


def utilisation_figures(flops: float, seconds: float, peak: float | None) -> dict[str, float]:
    """Return the actor's TFLOPS and MFU over the `seconds` in which it trained; empty for 0 seconds.

    `flops`: operations that the model needs. `peak`: FLOP/s of all the actor's devices; None omits the MFU.
    """
    if seconds <= 0:
        return {}
    rate = flops / seconds
    return {"perf/actor_tflops": rate / 1e12, **({"mfu/actor": rate / peak} if peak else {})}


def batch_figures(spans: Iterable[Span], window: Interval) -> dict[str, float]:
    """Return the fill and padding of micro-batches as shares, by worker group, for the calls that ended in `window`.

    `batch/fill`: sample tokens / token budget; a single long sample may exceed 1, and an empty micro-batch, which keeps
    ranks in step, counts as 0. `batch/padding`: padding tokens / computed tokens. Omits groups without such calls.
    """
    calls = [span for span in spans if "budget" in span.args and window[0] < span.end_ns <= window[1]]
    figures: dict[str, float] = {}
    for group, found in _by(calls, lambda span: span.group):
        tokens, room, budget = (_total(found, name) for name in ("tokens", "room", "budget"))
        figures |= {f"batch/fill/{group}": tokens / budget, f"batch/padding/{group}": 1.0 - tokens / room}
    return figures


def is_of_episode(span: Span) -> bool:
    """True for the spans that are derived from episodes, whose time is part of other spans."""
    return span.name in (GENERATE_SPAN, SEARCH_SPAN) or span.stage == TOOL_STAGE


def write_chrome_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write `spans` as a Chrome trace (ui.perfetto.dev, chrome://tracing): a process per group, a thread per lane.

    Viewers draw the events of a thread as a stack. Spans of a lane that overlap without nesting, such as concurrent
    episodes, therefore go to further threads of the same name. Times are relative to the first span.
    """
    origin = min((span.start_ns for span in spans), default=0)
    events: list[dict[str, Any]] = []
    for process, (group, of_group) in enumerate(_by(spans, lambda span: span.group), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": group}})
        rows = [(lane, row) for lane, of_lane in _by(of_group, lambda span: span.lane) for row in _rows(of_lane)]
        for thread, (lane, row) in enumerate(rows, start=1):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}})
            events.extend(_event(span, process, thread, origin) for span in row)
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_ns": str(origin)}}
    write_atomically(path, json.dumps(trace, separators=(",", ":")))


def _steady_clock() -> Callable[[], int]:
    # Wall time may jump back when the clock is set, and a span must not end before it starts.
    offset = time.time_ns() - time.perf_counter_ns()
    return lambda: time.perf_counter_ns() + offset


def _clipped(spans: Iterable[Span], window: Interval) -> list[Interval]:
    return [(max(span.start_ns, window[0]), min(span.end_ns, window[1])) for span in spans]


def _covered(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of `intervals`, in seconds."""
    return sum(end - start for start, end in merge_intervals(intervals)) / 1e9


def _by(spans: Iterable[Span], key: Callable[[Span], str]) -> list[tuple[str, list[Span]]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[key(span)].append(span)
    return sorted(found.items())


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Assign spans to rows, first fit, so that two spans of a row are disjoint or nested."""
    rows: list[list[Span]] = []
    open_ends: list[list[int]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        for row, ends in zip(rows, open_ends, strict=True):
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                row.append(span)
                ends.append(span.end_ns)
                break
        else:
            rows.append([span])
            open_ends.append([span.end_ns])
    return rows


def _event(span: Span, process: int, thread: int, origin: int) -> dict[str, Any]:
    times = {"ts": (span.start_ns - origin) / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3}
    place = {"ph": "X", "name": span.name, "cat": span.stage, "pid": process, "tid": thread}
    return {**place, **times, "args": dict(span.args)}


def _total(spans: Iterable[Span], name: str) -> float:
    return sum(float(value) for span in spans if isinstance(value := span.args[name], int))


def _peak_tflops(device_name: str) -> float | None:
    words = set(re.findall(r"\w+", device_name.upper()))
    return next((peak for name, peak in PEAK_TFLOPS.items() if words.issuperset(name.upper().split())), None)
