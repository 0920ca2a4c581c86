"""Records the faults of a run: which part failed, why, what was lost, and how long the run took to recover.

A row of faults.jsonl is written when a fault begins, and another when it ends:

    {"fault": 3, "event": "began", "time": 1700000000.0, "step": 7, "part": "engine 1", "kind": "died", "detail": "..."}
    {"fault": 3, "event": "recovered", "time": 1700000012.5, "step": 7, "detail": "restarted at version 7"}

`time` is in seconds since the epoch. A fault without a second row was not over when the run ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rlsys.config.schema import ClusterConfig
from rlsys.observe.metrics import Metric
from rlsys.observe.records import LineLog

FAULTS = "faults.jsonl"
"""File name within a run folder."""
KILLED_BY = "RLSYS_KILLED_BY"
"""Environment variable of a driver that is started again when it is killed: the signal that killed its predecessor."""
FAULT_METRICS = (
    Metric("faults/began", "count", "faults since the start of this process"),
    Metric("faults/recovered", "count", "of these, faults from which the run has recovered"),
    Metric("faults/given_up", "count", "of these, parts that the run goes on without"),
    Metric("faults/recovery_s", "s", "longest recovery since the start of this process"),
)


class FaultKind(StrEnum):
    """Kind of a failure."""

    died = "died"
    """A process ended."""
    hung = "hung"
    """A process lives but makes no progress."""
    unreachable = "unreachable"
    """A service does not answer."""


class Outcome(StrEnum):
    """End of a fault."""

    recovered = "recovered"
    """The part works again."""
    given_up = "given_up"
    """The run goes on without the part, or ends."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure of one part."""

    number: int
    part: str
    """Name of the part: "engine 1", "actor rank 0", "search server"."""
    kind: FaultKind
    began_s: float
    """Seconds since the epoch."""


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


class FaultLog:
    """Appends faults to a run's file, and counts them."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.step = 0
        """Step under which faults are recorded."""
        self._log, self._clock = LineLog(path), clock
        self._began = 0
        self._ended = dict.fromkeys(Outcome, 0)
        self._longest_s = 0.0

    def begin(self, part: str, kind: FaultKind, detail: str) -> Fault:
        """Record that `part` has failed; `detail` is one sentence with the cause and the work that was lost."""
        self._began += 1
        fault = Fault(self._began, part, kind, self._clock())
        self._append(fault.number, "began", fault.began_s, detail, part=part, kind=kind)
        return fault

    def end(self, fault: Fault, outcome: Outcome, detail: str) -> None:
        """Record how `fault` ended."""
        now = self._clock()
        self._ended[outcome] += 1
        if outcome is Outcome.recovered:
            self._longest_s = max(self._longest_s, now - fault.began_s)
        self._append(fault.number, outcome, now, detail)

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name."""
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
