"""The page of a report: one HTML file that needs no network, or the same page for the live view, which asks its server.

`write_report` is what `rlsys report` does; `live_page` is what `rlsys watch` serves at its root.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlsys.errors import UserError
from rlsys.files import write_atomically
from rlsys.observe.run_folder import RunFolder
from rlsys.observe.samples import visible
from rlsys.report.embed import bundle, inline_json, packed, policy
from rlsys.report.model import build

REPORT = "report.html"
"""In the run's folder."""


def render(model: Mapping[str, Any], chunks: Mapping[int, str] = MappingProxyType({})) -> str:
    """The page that holds `model` and its `chunks` by their numbers, as `embed.packed` makes them."""
    names = ", ".join(run["name"] for run in model["runs"])
    data = f'<script type="application/json" id="model">{inline_json(model)}</script>'
    # After the script, so that the page is there before the browser has read them all.
    parts = (f'<script type="text/plain" id="chunk-{number}">{chunk}</script>' for number, chunk in chunks.items())
    return _page(names, data, "\n".join(parts), live=False)


def live_page(name: str) -> str:
    """The page without data: it asks `data.json`, `trajectories/N` and `events` beside it."""
    return _page(name, "", "", live=True)


def write_report(runs: Sequence[RunFolder], out: Path | None = None) -> Path:
    """Write the report over `runs` to `out`, by default into the folder of the first; returns its path."""
    if not runs:
        raise ValueError("A report is of one run at least.")
    path = out or runs[0].path / REPORT
    chunks: dict[int, str] = {}
    model = build(runs, lambda number, rows: chunks.update({number: packed(rows)}))
    try:
        write_atomically(path, render(model, chunks))
    except OSError as problem:
        raise UserError(f"{path} cannot be written ({problem.strerror}): give another file with --out.") from problem
    return path


def _page(name: str, data: str, chunks: str, live: bool) -> str:
    """The template with its marks filled, all at once: what is filled in is not looked at again."""
    static = files("rlsys.report") / "static"
    sources = {one.name: one.read_text(encoding="utf-8") for one in static.iterdir() if one.name.endswith(".js")}
    script = bundle(sources, "main.js")
    style = (static / "report.css").read_text(encoding="utf-8")
    parts = {
        "policy": html.escape(policy(script, style, live), quote=True),
        "title": html.escape(visible(name)),
        "style": style,
        "script": script,
        "data": data,
        "chunks": chunks,
    }
    template = (static / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{ (\w+) \}\}", lambda mark: parts[mark[1]], template)
