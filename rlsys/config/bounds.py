"""Bounds and units that stand beside the fields of the schema, and the one check that reads them. Pure.

`steps: Annotated[Count, Unit("steps")]` is a whole number from 1 on, counted in steps. The metadata are those of the
package annotated-types; a type without a bound is not checked here. Infinity and NaN are within no bound.
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
    """A value that is allowed besides those within the bounds."""

    value: float
    meaning: str


Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
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
    """What a number may be."""

    bounds: tuple[tuple[type, float], ...] = ()
    """Kind of comparison and the number that is compared with."""
    also: Or | None = None
    unit: str = ""
    """Empty for what is a plain number, a share or a ratio."""

    @property
    def rule(self) -> str:
        """In words; empty without bounds."""
        if [kind for kind, _ in self.bounds] == [Ge, Le]:
            (_, low), (_, high) = self.bounds
            return f"must be from {low} to {high}"
        if self.bounds == ((Ge, 0),):
            return "must not be negative"
        words = " and ".join(f"{_COMPARISONS[kind][0]} {limit}" for kind, limit in self.bounds)
        besides = f", or {self.also.value} for {self.also.meaning}" if self.also else ""
        return f"must be {words}{besides}" if words else ""

    def hold(self, value: float) -> bool:
        """Whether `value` is within them."""
        if self.also and value == self.also.value:
            return True
        return math.isfinite(value) and all(_COMPARISONS[kind][1](value, limit) for kind, limit in self.bounds)


def limits_of(hint: Any) -> Limits:
    """The limits in a type with its metadata, `... | None` included."""
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
    """A key and a sentence for each number of a dataclass, or of those in it, that is out of its bounds; null never is."""
    hints = get_type_hints(type(settings), include_extras=True)
    for item in fields(settings):
        value, key = getattr(settings, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from out_of_range(value, f"{key}.")
        elif value is not None and (limits := limits_of(hints[item.name])).bounds and not limits.hold(value):
            yield key, f"{key}={value} {limits.rule}."
