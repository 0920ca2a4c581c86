"""Findings as a table for people, and as plain data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlsys.cluster.preflight.finding import Finding, State, is_right

_STYLE = {State.ok: "green", State.wrong: "bold red", State.note: "yellow", State.unknown: "cyan"}
_NARROW = 56
"""Columns below which a table of three is no table any more."""


def as_data(name: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "config": name,
        "right": is_right(findings),
        "findings": [{**asdict(finding), "state": str(finding.state)} for finding in findings],
    }


def show(name: str, findings: Sequence[Finding], console: Console) -> None:
    """A row for each thing, with what to do below what was found, and a sentence at the end."""
    if console.width < _NARROW:
        for finding in findings:
            console.print(Text(str(finding.state), _STYLE[finding.state]), finding.what, highlight=False)
            console.print(_told(finding))
    else:
        console.print(_table(name, findings))
    console.print(verdict(name, findings), markup=False, highlight=False)


def verdict(name: str, findings: Sequence[Finding]) -> str:
    """One sentence."""
    wrong = [finding.what for finding in findings if finding.state is State.wrong]
    hidden = sum(finding.state is State.unknown for finding in findings)
    if wrong:
        things = "1 thing is" if len(wrong) == 1 else f"{len(wrong)} things are"
        return f"{things} to be mended before {name} can run: {', '.join(dict.fromkeys(wrong))}."
    if hidden:
        return f"{name} can run as far as it is seen from here; {hidden} could not be looked at (unknown)."
    return f"{name} can run here."


def _table(name: str, findings: Sequence[Finding]) -> Table:
    table = Table(title=f"rlsys doctor --for {name}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("what", overflow="fold", max_width=22)
    table.add_column("found", overflow="fold")
    for finding in findings:
        mark = Text(str(finding.state), _STYLE[finding.state])
        table.add_row(mark, Text(finding.what), _told(finding))
    return table


def _told(finding: Finding) -> Text:
    told = Text(finding.found)
    if finding.fix:
        told.append(f"\n-> {finding.fix}", "bold")
    return told
