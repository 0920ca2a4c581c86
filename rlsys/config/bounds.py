"""Defines bounds and units of schema fields, and checks values against them. Pure.

Example: `steps: Annotated[Count, Unit("steps")]` is an integer of at least 1, counted in steps. The metadata classes
come from the package annotated-types. A type without a bound accepts every value; a type with a bound excludes infinity
and NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, Unit


@dataclass(frozen=True, slots=True)
class Or:
    """A value allowed outside of the bounds."""

    value: float
    meaning: str


Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
NotPositive = Annotated[float, Le(0)]
AboveOne = Annotated[float, Gt(1)]
Share = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
Tokens = Annotated[Count, Unit("tokens")]
RankCount = Annotated[Count, Unit("ranks")]
Steps = Annotated[Whole, Unit("steps")]
Seconds = Annotated[Positive, Unit("s")]

_COMPARISONS = {
    Ge: ("at least", operator.ge),
    Gt: ("above", operator.gt),
    Le: ("at most", operator.le),
    Lt: ("below", operator.lt),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds, exception and unit of a number."""

    bounds: tuple[tuple[type, float], ...] = ()
    """Comparison type and limit of each bound."""
    also: Or | None = None
    unit: str = ""
    """Unit; empty for a plain number, a share or a ratio."""

    @property
    def rule(self) -> str:
        """The bounds in words, such as "must be above 0"; empty without bounds."""
        if [kind for kind, _ in self.bounds] == [Ge, Le]:
            (_, low), (_, high) = self.bounds
            return f"must be from {low} to {high}"
        if self.bounds == ((Ge, 0),):
            return "must not be negative"
        words = " and ".join(f"{_COMPARISONS[kind][0]} {limit}" for kind, limit in self.bounds)
        besides = f", or {self.also.value} for {self.also.meaning}" if self.also else ""
        return f"must be {words}{besides}" if words else ""

    def hold(self, value: float) -> bool:
        if self.also and value == self.also.value:
            return True
        return math.isfinite(value) and all(_COMPARISONS[kind][1](value, limit) for kind, limit in self.bounds)


def limits_of(hint: Any) -> Limits:
    """Return the limits in an annotated type, including those inside `... | None`."""
    metadata = [
        *getattr(hint, "__metadata__", ()),
        *(part for arg in get_args(hint) for part in getattr(arg, "__metadata__", ())),
    ]
    return Limits(
        tuple(
            (type(part), getattr(part, type(part).__name__.lower())) for part in metadata if type(part) in _COMPARISONS
        ),
        next((part for part in metadata if isinstance(part, Or)), None),
        next((part.unit for part in metadata if isinstance(part, Unit)), ""),
    )


def out_of_range(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield key and error message for each number out of its bounds, also in nested dataclasses, and in lists and maps of
    them. Null is always allowed."""
    hints = get_type_hints(type(settings), include_extras=True)
    for item in fields(settings):
        value, key = getattr(settings, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from out_of_range(value, f"{key}.")
        elif isinstance(value, dict | list):
            named = value.items() if isinstance(value, dict) else enumerate(value)
            inner = [(f".{name}" if isinstance(value, dict) else f"[{name}]", each) for name, each in named]
            for place, each in inner:
                yield from out_of_range(each, f"{key}{place}.") if is_dataclass(each) else ()
        elif value is not None and (limits := limits_of(hints[item.name])).bounds and not limits.hold(value):
            yield key, f"{key}={value} {limits.rule}."
