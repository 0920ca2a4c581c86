"""Findings of the preflight, each as a row of a table for people and as plain data for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


class FindingState(StrEnum):
    """State of one thing."""

    ok = "ok"
    wrong = "wrong"  # The run would not start, or would not end well.
    note = "note"  # Worth to know; the run can start.
    unknown = "unknown"  # It cannot be seen from here.


_STYLE = {"ok": "green", "wrong": "bold red", "note": "yellow", "unknown": "cyan"}
_NARROW = 56  # Columns below which a table of three is no table any more.


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    what: str
    state: FindingState
    found: str
    fix: str = ""  # What to do; never empty where it is wrong, unless `found` says it already.


def ok(what: str, found: str) -> Finding:
    """A thing that is as it should be."""
    return Finding(what, FindingState.ok, found)


def wrong(what: str, found: str, fix: str = "") -> Finding:
    """A thing to be mended before anything starts."""
    return Finding(what, FindingState.wrong, found, fix)


def note(what: str, found: str, fix: str = "") -> Finding:
    """A thing worth to know."""
    return Finding(what, FindingState.note, found, fix)


def unknown(what: str, found: str, fix: str = "") -> Finding:
    """A thing not to be seen from here, with how it can be."""
    return Finding(what, FindingState.unknown, found, fix)


def is_right(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong, as far as could be seen."""
    return all(finding.state is not FindingState.wrong for finding in findings)


def as_data(name: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain data, which `--json` prints."""
    rows = [{**asdict(finding), "state": str(finding.state)} for finding in findings]
    return {"config": name, "right": is_right(findings), "findings": rows}


def show(name: str, findings: Sequence[Finding], console: Console) -> None:
    """Print a row for each thing, with what to do below what was found, and a sentence at the end."""
    table = Table(title=f"rlsys doctor --for {name}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("what", overflow="fold", max_width=22)
    table.add_column("found", overflow="fold")
    for finding in findings:
        mark = Text(str(finding.state), _STYLE[finding.state])
        told = Text(finding.found)
        if finding.fix:
            told.append(f"\n-> {finding.fix}", "bold")
        if console.width < _NARROW:
            console.print(mark, finding.what, highlight=False)
            console.print(told)
        table.add_row(mark, Text(finding.what), told)
    if console.width >= _NARROW:
        console.print(table)
    console.print(verdict(name, findings), markup=False, highlight=False)


def verdict(name: str, findings: Sequence[Finding]) -> str:
    """Sum the findings up in one sentence."""
    wrong = [finding.what for finding in findings if finding.state is FindingState.wrong]
    hidden = sum(finding.state is FindingState.unknown for finding in findings)
    if wrong:
        things = "1 thing is" if len(wrong) == 1 else f"{len(wrong)} things are"
        return f"{things} to be mended before {name} can run: {', '.join(dict.fromkeys(wrong))}."
    if hidden:
        return f"{name} can run as far as it is seen from here; {hidden} could not be looked at (unknown)."
    return f"{name} can run here."
