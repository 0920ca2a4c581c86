"""What the episodes of an engine are at, and what those of several all wait for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SEARCH = "search"
"""As a name of what is awaited; the others are the names of tools."""


@dataclass(frozen=True, slots=True)
class Doing:
    """A moment of one engine's episodes."""

    busy: bool
    """The engine generates, or holds requests back for a while."""
    awaited: Mapping[str, int]
    """What is outside the engine, by name -> episodes that wait for it."""


def common_wait(found: Iterable[Doing]) -> str:
    """What all that goes on waits for, in words; empty where an engine is busy, or nothing is awaited."""
    awaited: set[str] = set()
    for doing in found:
        if doing.busy:
            return ""
        awaited.update(name for name, episodes in doing.awaited.items() if episodes)
    return " and ".join(sorted(awaited))
