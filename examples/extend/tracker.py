"""A tracker: the metrics of each step as a line of a CSV file in the run's folder.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu \
    'tracking.trackers=[{kind: examples.extend.tracker.Table, columns: [actor/entropy]}]'
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Table:
    """Writes `metrics.csv`. A tracker that raises is left out with a warning; the run continues."""

    def __init__(self, run_dir: Path, *, columns: list[str]) -> None:
        self._columns = columns
        self._file = (run_dir / "metrics.csv").open("a", newline="")
        self._writer = csv.writer(self._file)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the line of `step`; called once a step, and once an evaluation with its metrics."""
        if all(name in metrics for name in self._columns):
            self._writer.writerow([step, *(metrics[name] for name in self._columns)])
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
