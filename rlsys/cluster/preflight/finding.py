"""What a look at one thing found. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How it is."""

    ok = "ok"
    wrong = "wrong"
    """The run would not start, or would not end well."""
    note = "note"
    """Worth to know; the run can start."""
    unknown = "unknown"
    """It cannot be seen from here."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    what: str
    state: State
    found: str
    fix: str = ""
    """What to do; never empty where it is wrong, unless `found` says it already."""


def ok(what: str, found: str) -> Finding:
    """As it should be."""
    return Finding(what, State.ok, found)


def wrong(what: str, found: str, fix: str = "") -> Finding:
    """To be mended before anything starts."""
    return Finding(what, State.wrong, found, fix)


def note(what: str, found: str, fix: str = "") -> Finding:
    """Worth to know."""
    return Finding(what, State.note, found, fix)


def unknown(what: str, found: str, fix: str = "") -> Finding:
    """Not to be seen from here, with how it can be."""
    return Finding(what, State.unknown, found, fix)


def is_right(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong, as far as could be seen."""
    return all(finding.state is not State.wrong for finding in findings)
