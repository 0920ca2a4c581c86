"""Describes the metrics of a run: each module that produces some declares them as a tuple of `Metric`.

docs/metrics.md is made from the declarations (`python -m scripts.metrics_reference`). A run writes unit and meaning of
its metrics to units.json, where the report reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

UNITS = "units.json"
"""File in a run's folder: name of a metric -> [unit, meaning]."""
_VARIABLE = re.compile(r"(<\w+>|\{[\w,]+\}|\.\.\.)")
_MARKUP = re.compile(r"`|\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, or several that one sentence explains."""

    names: str
    """Names, separated by spaces: `<x>` stands for one part of a name, `{a,b}` for a or b, `...` for several parts."""
    unit: str
    meaning: str
    """Markdown, with links relative to docs/."""
    elsewhere: str = ""
    """Name in Search-R1 or veRL (S) and in RLinf (R), as Markdown; a letter alone means the same name."""

    def covers(self, name: str) -> bool:
        return any(_pattern(one).fullmatch(name) for one in self.names.split())

    @property
    def text(self) -> str:
        """Meaning without markup."""
        return _MARKUP.sub(r"\1", self.meaning)


def explained(names: Iterable[str], metrics: Sequence[Metric]) -> dict[str, list[str]]:
    """Return the unit and the meaning of each name that one of `metrics` covers; the first one counts."""
    found = {name: next((one for one in metrics if one.covers(name)), None) for name in sorted(names)}
    return {name: [one.unit, one.text] for name, one in found.items() if one is not None}


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Return the regular expression of the names that `name` stands for; a run with many engines has thousands of names."""
    words = {"<": lambda _: "[^/]+", "{": lambda part: f"({part[1:-1].replace(',', '|')})", ".": lambda _: ".+"}
    parts = _VARIABLE.split(name)
    read = (words[part[0]](part) if place % 2 else re.escape(part) for place, part in enumerate(parts))
    return re.compile("".join(read))
