"""Reads a page window by window, and finds text in it. Pure.

The units of a window are whatever `spans` divides the page into: tokens of the policy, or words.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter

Spans = Callable[[str], Sequence[tuple[int, int]]]
"""Text -> character range of each of its units, in order."""
CONTEXT = 6
"""Share of a result that stands before a found text, and again after it, as a divisor."""


def words(text: str) -> list[tuple[int, int]]:
    """Return the character range of each word."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def window(page: str, spans: Spans, unit: str, *, start: int, most: int) -> str:
    """Return the units of `page` from number `start` on, below a line that says which they are: at most `most` in all.

    `unit` is the name of the units in the plural. Raises ValueError if the page ends before `start`.
    """
    units = spans(page)
    if start >= max(len(units), 1):
        raise ValueError(f"the page has {len(units)} {unit}, so start must be below {len(units)}")
    end = min(len(units), start + most)
    above = f"{unit} {start} to {end} of {len(units)}:\n"
    end = min(end, max(start + 1, start + most - len(spans(above))))
    return f"{unit} {start} to {end} of {len(units)}:\n{_part(page, units, start, end)}"


def find(page: str, spans: Spans, unit: str, *, text: str, start: int, most: int) -> str:
    """Return the places of `page` where `text` stands from unit number `start` on, with what stands around them.

    Case and white space make no difference. As many places are shown as fit in `most` units.
    """
    units = spans(page)
    after = units[start][0] if start < len(units) else len(page)
    pattern = re.compile(r"\s+".join(map(re.escape, text.split())), re.IGNORECASE)
    places = [bisect_right(units, found.start(), key=itemgetter(0)) - 1 for found in pattern.finditer(page, after)]
    shown, left, around = "", most, most // CONTEXT
    for number, place in enumerate(places):
        near = _part(page, units, max(0, place - around), min(len(units), place + around))
        line = f"{unit} {place}: ... {' '.join(near.split())} ...\n"
        left -= len(spans(line))
        if left < 0 and number:
            return f"{shown}{len(places) - number} more from {unit} {place} on."
        shown += line
    return shown.strip()


def _part(page: str, units: Sequence[tuple[int, int]], start: int, end: int) -> str:
    return page[units[start][0] : units[end - 1][1]] if start < end else ""
