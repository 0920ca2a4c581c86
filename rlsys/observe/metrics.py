"""metrics.jsonl: one line a step, on disk as soon as it is known.

A row is {"step", "time", flat keys}, "time" in seconds since the epoch. docs/metrics.md lists the keys with their
units. A figure that is NaN or infinite is written as null.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlsys.observe.lines import LineLog


class MetricsLog:
    """Appends rows to a file. A resumed run appends to the same file, from `position` on."""

    def __init__(
        self, path: Path, position: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._lines = LineLog(path, position)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._lines.position

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one row and flush it."""
        self._lines.append({"step": step, "time": self._clock(), **metrics})

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file by step. A line cut short by a crash is left out; where a resumed run
    has repeated a step, its later row counts.
    """
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]
