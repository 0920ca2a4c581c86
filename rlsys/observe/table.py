"""The table at the end of a run: what was learned, what it cost, and whether the parts agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

DASH = "-"
NAME_WIDTH = 44
"""Of the first column, so that the three tables line up; all fit into 80 columns."""
STAGE_NAMES = {
    "step": "steps, wall time",
    "reward": "rewards",
    "logprob": "log-probs",
    "train": "training",
    "sync": "weight sync",
    "eval": "evaluation",
}
HOP_NAMES = {1: "one hop", 2: "two hops"}


def render_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print `summary` to `console`. A figure that is absent, null or NaN shows as a dash.

    Keys: em_before, em_after, em_before_by_hop, em_after_by_hop (hop -> EM), searches_before,
    searches_after, oracle_em, recall_at_3, weight_syncs, overlap_s, hf_engine_agreement,
    logprob_max_diff, first_ratio_max_dev, tokens_differing_share, cached_prompt_share, steps, seed,
    seconds (stage -> seconds).
    """
    console.print(Group(_learned(summary), Text(), _times(summary), Text(), _checks(summary)))


def _learned(summary: Mapping[str, Any]) -> Table:
    table = _table("Held-out questions", "", "before", "after", "change")
    _add_change(table, "exact match", summary.get("em_before"), summary.get("em_after"), "bold")
    before, after = summary.get("em_before_by_hop") or {}, summary.get("em_after_by_hop") or {}
    for hop in sorted({*before, *after}, key=int):
        name = HOP_NAMES.get(int(hop), f"{hop} hops")
        _add_change(table, f"  {name}", before.get(hop), after.get(hop))
    _add_change(table, "searches a question", summary.get("searches_before"), summary.get("searches_after"))
    return table


def _times(summary: Mapping[str, Any]) -> Table:
    seconds = dict(summary.get("seconds") or {})
    steps = summary.get("steps") or 0
    table = _table("Time by stage", "", "total", "a step")
    for stage, total in seconds.items():
        known = _number(total)
        each = None if known is None or not steps else known / steps
        table.add_row(STAGE_NAMES.get(stage, stage), _text(known, "{:.1f} s"), _text(each, "{:.2f} s"))
    overlap = _number(summary.get("overlap_s"))
    each = None if overlap is None or not steps else overlap / steps
    table.add_row("hidden behind rollout", _text(overlap, "{:.1f} s"), _text(each, "{:.2f} s"), style="green")
    return table


def _checks(summary: Mapping[str, Any]) -> Table:
    table = _table("Checks", "", "value")
    rows = [
        ("oracle EM (ceiling)", "oracle_em", "{:.3f}"),
        ("search recall@3", "recall_at_3", "{:.3f}"),
        ("HF and engine answer alike", "hf_engine_agreement", "{:.1%}"),
        ("log-prob, engine vs. trainer, max difference", "logprob_max_diff", "{:.2e}"),
        ("first update, max |ratio - 1|", "first_ratio_max_dev", "{:.2e}"),
        ("trained tokens that re-tokenising changed", "tokens_differing_share", "{:.2%}"),
        ("prompt tokens found in the prefix cache", "cached_prompt_share", "{:.1%}"),
        ("weight syncs", "weight_syncs", "{:.0f}"),
        ("steps", "steps", "{:.0f}"),
        ("seed", "seed", "{:.0f}"),
    ]
    for name, key, form in rows:
        table.add_row(name, _text(_number(summary.get(key)), form))
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column(first, min_width=NAME_WIDTH, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, min_width=8)
    return table


def _add_change(table: Table, name: str, before: Any, after: Any, style: str = "") -> None:
    old, new = _number(before), _number(after)
    change = None if old is None or new is None else new - old
    table.add_row(name, _text(old, "{:.3f}"), _text(new, "{:.3f}"), _text(change, "{:+.3f}"), style=style)


def _number(value: Any) -> float | None:
    if value is None or value != value:  # NaN is the one value that differs from itself
        return None
    return float(value)


def _text(value: float | None, form: str) -> str:
    return DASH if value is None else form.format(value)
