"""The rows of metrics.jsonl, as `trackers.JsonlTracker` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsys.files import limited_lines, open_regular, parse_json

METRICS = "metrics.jsonl"
"""File of a run."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file by step, for the run that writes it and goes on with it.

    A line that is no row of a step, such as one cut short by a crash, is left out without a word; `run_folder.open_run`
    says what it leaves out. Where a resumed run has repeated a step, its later row counts. Raises OSError.
    """
    rows: dict[int, dict[str, Any]] = {}
    with open_regular(path) as file:
        for line in limited_lines(file):
            try:
                row = parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict) and type(row.get("step")) is int:
                rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]
