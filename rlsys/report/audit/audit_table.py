"""Prints the audit of tokens to a terminal. Generated text is shown with every control character spelled out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlsys.config.schema import TokenMode
from rlsys.observe.samples import visible
from rlsys.report.audit.token_audit import Bias, Count, Example, TokenAudit

PLACES = {
    "tag": "at a tag",
    "broken": "bytes of no character",
    "unicode": "beside non-ASCII",
    "digit": "beside a digit",
    "space": "beside white space",
    "other": "elsewhere",
}


def render_audit(found: TokenAudit, console: Console) -> None:
    """Print `found`."""
    for sentence in sentences(found):
        console.print(Text(sentence))
    if found.total.stretches:
        turns = {f"turn {number + 1}": count for number, count in found.by_turn.items()}
        places = {PLACES[place]: count for place, count in found.by_place.items()}
        console.print(Text(), _counts("By turn", turns, of_all=True))
        console.print(_counts("By kind of place", places, of_all=False))
        console.print(Text("Most frequent, as it was first", style="italic"))
        for example in found.examples:
            console.print(*_example(example), sep="\n")
    if found.bias is not None:
        console.print(Text(), _bias("Log-ratio of stretches, nats", found.bias))
    if found.bias_same_version is not None and found.bias_same_version != found.bias:
        console.print(Text(), _bias("Of them, drawn by the trained policy itself", found.bias_same_version))


def sentences(found: TokenAudit) -> Iterator[str]:
    """What was found, in words."""
    total, affected = found.total, found.affected
    if found.mode == TokenMode.append:
        yield "task.token_mode=append trains on the drawn tokens: this is what re-tokenising their text would change."
    yield (
        f"{found.trajectories:,} trajectories, {total.turns:,} turns: {total.drawn_differing:,} of {total.drawn:,} drawn "
        f"tokens ({_share(total.drawn_differing, total.drawn)}) are not what re-tokenising their text gives, and "
        f"{total.trained_differing:,} of its {total.trained:,} tokens "
        f"({_share(total.trained_differing, total.trained)}) were not drawn."
    )
    if found.bias is not None:
        yield (
            f"{found.after_change:,} more come after such tokens: {affected['tokens']:.2%} of the trained tokens of text "
            f"have no log-prob to compare, in {affected['turns']:.1%} of turns, {affected['trajectories']:.1%} of trajectories and "
            f"{affected['steps']:.0%} of steps."
        )
    if found.crossing:
        yield f"{found.crossing:,} stretches have a token across the edge of their turn, which is not trained."
    if found.special_lost:
        yield f"{found.special_lost:,} special tokens were drawn that the text does not hold."
    if found.unknown_turns:
        yield f"Of {found.unknown_turns:,} turns it is not known which tokens were drawn: they are left out."
    if found.bias is not None and found.bias.differing.mean is not None and found.bias.same.mean_abs is not None:
        yield (
            f"A stretch that differs has a log-ratio of {found.bias.differing.mean:+.2f} nats on average, where the "
            f"numerics of one and the same token come to {found.bias.same.mean_abs:.1e}."
        )


def _share(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.2%}"


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="italic")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _counts(title: str, rows: Mapping[str, Count], *, of_all: bool) -> Table:
    """`of_all`: the counts hold tokens that do not differ too."""
    table = _table(title, "", "turns", "stretches", "drawn", "other", "trained", "other")
    for name, row in rows.items():
        drawn, trained = (f"{row.drawn:,}", f"{row.trained:,}") if of_all else ("", "")
        others = f"{row.drawn_differing:,}", f"{row.trained_differing:,}"
        table.add_row(name, f"{row.turns:,}", f"{row.stretches:,}", drawn, others[0], trained, others[1])
    return table


def _bias(title: str, bias: Bias) -> Table:
    table = _table(title, "", "stretches", "mean", "mean |.|", "mean exp", "max |.|")
    rows = {"tokens differ": bias.differing, "same, after a change": bias.after_change, "same": bias.same}
    for name, row in rows.items():
        forms = ((row.mean, "+.1e"), (row.mean_abs, ".1e"), (row.exp_mean, ".4g"), (row.largest, ".1e"))
        table.add_row(name, f"{row.count:,}", *("-" if value is None else format(value, form) for value, form in forms))
    return table


def _example(one: Example) -> Iterator[Text]:
    ratio = "" if one.log_ratio is None else f", {one.log_ratio:+.2f} nats"
    yield Text(f"{one.count:,} x {PLACES[one.place]}{ratio}: {_tokens(one.drawn)}  ->  {_tokens(one.again)}")
    yield Text(f"    {_shown(one.before)}[{_shown(''.join(one.again))}]{_shown(one.after)}", style="dim")


def _tokens(pieces: Sequence[str]) -> str:
    """Texts of tokens, a dot for one that is part of a character which a later one completes."""
    return " | ".join(_shown(piece) if piece else "." for piece in pieces)


def _shown(text: str) -> str:
    return visible(text).replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣")
