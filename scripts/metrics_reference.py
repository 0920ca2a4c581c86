"""Writes the tables of docs/metrics.md from the metrics that each module declares: `python -m scripts.metrics_reference`.

The page's text is written by hand. The first table below a heading of `METRIC_TABLES` is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlsys.config.compose import PROJECT_CONFIGS
from rlsys.observe.metrics import Metric
from rlsys.orchestrator.run import METRIC_TABLES

PAGE = PROJECT_CONFIGS.parent / "docs" / "metrics.md"
COMMAND = "python -m scripts.metrics_reference"
_TABLE = re.compile(r"^(?:\|.*\n)+", re.MULTILINE)


def with_tables(page: str) -> str:
    """Return `page` with the current tables. Raises LookupError for a heading without a table."""
    for heading, metrics in METRIC_TABLES.items():
        before, found, after = page.partition(f"\n## {heading}\n")
        section, following, rest = after.partition("\n## ")
        section, tables = _TABLE.subn(lambda _, metrics=metrics: table(metrics), section, count=1)
        if not found or not tables:
            raise LookupError(f"{PAGE} has no table below {heading!r}.")
        page = before + found + section + following + rest
    return page


def table(metrics: Sequence[Metric]) -> str:
    rows = [
        f"| {' '.join(f'`{name}`' for name in one.names.split())} | {one.unit} | {one.meaning} | {one.elsewhere} |\n"
        for one in metrics
    ]
    return "".join(["| name | unit | meaning | elsewhere |\n", "|---|---|---|---|\n", *rows]).replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
