"""The rows of metrics.jsonl, as `trackers.JsonlTracker` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
"""File of a run."""


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
