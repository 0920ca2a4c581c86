"""Records the faults of a run: which part failed, why, what was lost, and how long the run took to recover.

Also records which engines joined and left on purpose, which are no faults.

A row of faults.jsonl is written when a fault begins, and another when it ends:

    {"fault": 3, "event": "began", "time": 1700000000.0, "step": 7, "part": "engine 1", "kind": "died", "detail": "..."}
    {"fault": 3, "event": "recovered", "time": 1700000012.5, "step": 7, "detail": "restarted at version 7"}

    {"event": "joined", "time": 1700000020.0, "step": 8, "part": "engine 2", "detail": "with weight version 7 in 31 s"}

`time` is in seconds since the epoch. A fault without a second row was not over when its process ended. Each process of a
resumed run numbers its faults from 1. Details are untrusted: they may quote logs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from rlsys.config.schema import ClusterConfig
from rlsys.files import limited_lines, open_regular
from rlsys.observe.metrics import Metric
from rlsys.observe.records import LineLog, read_object
from rlsys.observe.samples import visible

FAULTS = "faults.jsonl"
"""File name within a run folder."""
_BEGAN = "began"
KILLED_BY = "RLSYS_KILLED_BY"
"""Environment variable of a driver that is started again when it is killed: the signal that killed its predecessor."""
KILLED_AT = "RLSYS_KILLED_AT"
"""Environment variable of such a driver: when its predecessor was killed, in seconds since the epoch."""
FAULT_METRICS = (
    Metric("faults/began", "count", "faults since the start of this process"),
    Metric("faults/recovered", "count", "of these, faults from which the run has recovered"),
    Metric("faults/given_up", "count", "of these, parts that the run goes on without"),
    Metric("faults/recovery_s", "s", "longest recovery since the start of this process"),
)


class FaultKind(StrEnum):
    died = "died"
    """A process ended."""
    hung = "hung"
    """A process lives but makes no progress."""
    unreachable = "unreachable"
    """A service does not answer."""
    displaced = "displaced"
    """Its machine has left the cluster."""


_SAID = {
    FaultKind.died: "died",
    FaultKind.hung: "hangs",
    FaultKind.unreachable: "does not answer",
    FaultKind.displaced: "has lost its machine",
}
"""Kind -> words for the terminal."""


class Outcome(StrEnum):
    recovered = "recovered"
    """The part works again."""
    given_up = "given_up"
    """The run goes on without the part, or ends."""


class Change(StrEnum):
    """Change of the engines of a run that is no fault."""

    joined = "joined"
    left = "left"


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """One engine that joined or left, as read from a run's file."""

    part: str
    change: Change
    step: int
    at_s: float
    """Seconds since the epoch."""
    detail: str


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure of one part."""

    number: int
    part: str
    """Name of the part: "engine 1", "actor rank 0", "search server"."""
    kind: FaultKind
    began_s: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class RecordedFault:
    """One failure as read from a run's file."""

    part: str
    kind: str
    step: int
    began_s: float
    """Seconds since the epoch."""
    detail: str
    outcome: Outcome | None = None
    """None if the fault is not over, or was not when its process ended."""
    ended_s: float | None = None
    """Seconds since the epoch."""
    ending: str = ""
    """Detail of the end."""

    @property
    def recovery_s(self) -> float | None:
        """Seconds until the part worked again; None if it does not."""
        return self.ended_s - self.began_s if self.ended_s is not None and self.outcome is Outcome.recovered else None


def read_fault_row(line: bytes) -> dict[str, Any] | None:
    """Parse a row of faults.jsonl; None if it is damaged."""
    row = read_object(line)
    if row is None or type(row.get("step")) is not int:
        return None
    event, at = row.get("event"), row.get("time")
    if event in [*Change]:
        texts: tuple[str, ...] = ("event", "detail", "part")
    else:
        texts = ("event", "detail", "part", "kind") if event == _BEGAN else ("event", "detail")
        if type(row.get("fault")) is not int or event not in [_BEGAN, *Outcome]:
            return None
    whole = all(isinstance(row.get(name), str) for name in texts)
    return row if whole and isinstance(at, int | float) and not isinstance(at, bool) and math.isfinite(at) else None


def faults_of(rows: Iterable[Mapping[str, Any]]) -> tuple[RecordedFault, ...]:
    """Pair the rows of faults.jsonl, given in file order; ends without a beginning are left out."""
    found: list[RecordedFault] = []
    open_at: dict[int, int] = {}
    for row in rows:
        number, detail = row.get("fault", -1), row["detail"]
        if row["event"] == _BEGAN:
            open_at[number] = len(found)
            found.append(RecordedFault(row["part"], row["kind"], row["step"], row["time"], detail))
        elif (place := open_at.pop(number, None)) is not None:
            outcome = Outcome(row["event"])
            found[place] = replace(found[place], outcome=outcome, ended_s=row["time"], ending=detail)
    return tuple(found)


def changes_of(rows: Iterable[Mapping[str, Any]]) -> tuple[RecordedChange, ...]:
    """Return the engines that joined and left, in file order."""
    return tuple(
        RecordedChange(row["part"], Change(row["event"]), row["step"], row["time"], row["detail"])
        for row in rows
        if row["event"] in [*Change]
    )


def read_faults(path: Path) -> tuple[RecordedFault, ...]:
    """Return the faults in a file, without damaged rows, for the driver of the run. Raises OSError."""
    with open_regular(path) as file:
        rows = map(read_fault_row, limited_lines(file))
        return faults_of(row for row in rows if row is not None)


def fault_summary(faults: Iterable[RecordedFault]) -> dict[str, Any]:
    """Return the number of faults by outcome, and median and maximum of the seconds to recover (None without any)."""
    listed = list(faults)
    recoveries = [fault.recovery_s for fault in listed if fault.recovery_s is not None]
    return {
        "count": len(listed),
        "recovered": len(recoveries),
        "given_up": sum(fault.outcome is Outcome.given_up for fault in listed),
        "recovery_p50_s": median(recoveries) if recoveries else None,
        "recovery_max_s": max(recoveries, default=None),
    }


class Restarts:
    """Allows `limit` restarts of one part within any `window_s` seconds."""

    def __init__(self, cluster: ClusterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._window_s, self._clock = cluster.restarts, cluster.restart_window_s, clock
        self._taken: deque[float] = deque()

    def take(self) -> bool:
        """Count a restart; False if it would exceed the limit, and is not counted."""
        now = self._clock()
        while self._taken and now - self._taken[0] >= self._window_s:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return False
        self._taken.append(now)
        return True

    def give_back(self) -> None:
        """Undo the last `take`, if it is within the window."""
        if self._taken:
            self._taken.pop()


class FaultLog:
    """Appends faults to a run's file, and counts them."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """`say` gets one printable line when a fault begins, and one when it ends."""
        self.step = 0
        """Step under which faults are recorded."""
        self._log, self._clock, self._say = LineLog(path), clock, say
        self._began = 0
        self._ended = dict.fromkeys(Outcome, 0)
        self._longest_s = 0.0

    def begin(self, part: str, kind: FaultKind, detail: str, at_s: float | None = None) -> Fault:
        """Record that `part` has failed, at `at_s` or now; `detail` is one sentence with the cause and what was lost."""
        self._began += 1
        fault = Fault(self._began, part, kind, self._clock() if at_s is None else at_s)
        self._append(fault.number, _BEGAN, fault.began_s, detail, part=part, kind=kind)
        self._say(visible(f"Fault in step {self.step}: {part} {_SAID[kind]}: {detail}"))
        return fault

    def end(self, fault: Fault, outcome: Outcome, detail: str) -> None:
        """Record how `fault` ended."""
        now = self._clock()
        self._ended[outcome] += 1
        if outcome is Outcome.recovered:
            self._longest_s = max(self._longest_s, now - fault.began_s)
        self._append(fault.number, outcome, now, detail)
        end = "works again" if outcome is Outcome.recovered else "was given up"
        self._say(visible(f"{fault.part} {end} after {now - fault.began_s:.1f} s: {detail}"))

    def note(self, part: str, change: Change, detail: str) -> None:
        """Record that an engine has joined or left on purpose; `detail` continues the sentence."""
        row = {"event": change, "time": self._clock(), "step": self.step, "part": part, "detail": detail}
        self._log.append(row)
        self._say(visible(f"In step {self.step}, {part} {change} {detail}."))

    def metrics(self) -> dict[str, float]:
        return {
            "faults/began": self._began,
            "faults/recovered": self._ended[Outcome.recovered],
            "faults/given_up": self._ended[Outcome.given_up],
            "faults/recovery_s": self._longest_s,
        }

    def close(self) -> None:
        """Close the file; idempotent."""
        self._log.close()

    def _append(self, number: int, event: str, at_s: float, detail: str, **facts: str) -> None:
        self._log.append({"fault": number, "event": event, "time": at_s, "step": self.step, **facts, "detail": detail})
