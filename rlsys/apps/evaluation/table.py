"""The table of an evaluation, in 80 columns: shares in percent, each above its 95 % interval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlsys.apps.evaluation.sets import title_of
from rlsys.apps.evaluation.summary import SetFigures, overall
from rlsys.observe.samples import visible
from rlsys.orchestrator.evaluation.intervals import Estimate

NOTE = "in percent, with 95 % intervals; the average weighs every set alike"


def render_table(sets: Sequence[SetFigures]) -> RenderableType:
    """A row a set, one for each number of hops, and the average of several sets; chances of several answers below."""
    below = overall(sets)
    parts: list[RenderableType] = [_scores(sets, below)]
    if sets[0].pass_at:
        parts += [Text(), _chances([*sets, *below])]
    parts.append(Text(NOTE, "dim"))
    failed = sum(one.search_errors for one in sets)
    if failed:
        parts.append(Text(f"{failed} searches failed: these figures are not those of the whole search.", "red"))
    return Group(*parts)


def _scores(sets: Sequence[SetFigures], below: Sequence[SetFigures]) -> Table:
    table = _table("", "asked", "EM", "F1", "sub-EM", "finished", "searches", "tokens")
    for line, style in _lines(sets, below):
        shares = [_share(value) for value in (line.em, line.f1, line.sub_em)]
        finished = _percent(line.finished.mean)
        name = Text(visible(line.name), overflow="fold")
        table.add_row(
            name,
            str(line.questions),
            *shares,
            finished,
            f"{line.searches:.2f}",
            f"{line.tokens:.0f}",
            style=style,
        )
    return table


def _lines(sets: Sequence[SetFigures], below: Sequence[SetFigures]) -> Iterator[tuple[SetFigures, str]]:
    """Rows with their titles and styles."""
    for row in sets:
        yield _named(row, title_of(row.name)), ""
        for hop in row.by_hop:
            yield _named(hop, f"  {hop.name} {'hop' if hop.name == '1' else 'hops'}"), "dim"
    for row in below:
        yield row, "bold"


def _chances(rows: Sequence[SetFigures]) -> Table:
    table = _table("One of k answers is right", *(f"pass@{k}" for k in rows[0].pass_at))
    for row in rows:
        table.add_row(Text(visible(title_of(row.name))), *map(_share, row.pass_at.values()))
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _share(value: Estimate) -> Text:
    interval = f"{_percent(value.low)}-{_percent(value.high)}"
    return Text.assemble(f"{_percent(value.mean)}\n", (interval, "dim"), justify="right")


def _percent(share: float) -> str:
    """At most four characters, so that a row fits."""
    text = f"{share * 100:.1f}"
    return "100" if text == "100.0" else text


def _named(row: SetFigures, name: str) -> SetFigures:
    return replace(row, name=name)
