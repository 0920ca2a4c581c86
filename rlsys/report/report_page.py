"""Renders the report page: one self-contained HTML file, or the live page, which fetches its data from the server.

Untrusted text is data, never markup: JSON is written without "<", and larger parts are gzip in base64, unpacked on
demand. The page's content security policy allows only the package's own script and style, by hash. If text did end up
in the markup, the browser would not run it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlsys.errors import UserError
from rlsys.files import json_safe, write_atomically
from rlsys.observe.run_folder import RunFolder
from rlsys.observe.samples import visible
from rlsys.report.run_model import build

REPORT = "report.html"  # File name within the run folder.
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w]+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) (\w+))", re.MULTILINE)


def render(model: Mapping[str, Any], chunks: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return the page with `model` and its `chunks`: chunk number -> result of `packed`."""
    names = ", ".join(run["name"] for run in model["runs"])
    data = f'<script type="application/json" id="model">{inline_json(model)}</script>'
    # After the script, so that the page shows before the browser has read all chunks.
    parts = (f'<script type="text/plain" id="chunk-{number}">{chunk}</script>' for number, chunk in chunks.items())
    return _page(names, data, "\n".join(parts), live=False)


def live_page(name: str) -> str:
    """Return the page without data; it fetches `data.json`, `trajectories/N` and `events` relative to its address."""
    return _page(name, "", "", live=True)


def write_report(runs: Sequence[RunFolder], out: Path | None = None) -> Path:
    """Write the report on `runs` to `out`, by default into the first run's folder; return the path."""
    path = out or runs[0].path / REPORT
    chunks: dict[int, str] = {}
    model = build(runs, lambda number, rows: chunks.update({number: packed(rows)}))
    try:
        write_atomically(path, render(model, chunks))
    except OSError as problem:
        sentence = f"{path} cannot be written ({problem.strerror}): choose another file with --out."
        raise UserError(sentence, code="denied", key=str(path)) from problem
    return path


def _page(name: str, data: str, chunks: str, live: bool) -> str:
    """Fill the template's placeholders in one pass; inserted text is not scanned for placeholders."""
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


def compressed(value: Any) -> bytes:
    """Return `value` as gzipped JSON; deterministic."""
    return gzip.compress(_json(value).encode(), compresslevel=6, mtime=0)


def packed(value: Any) -> str:
    """Return `compressed(value)` in base64."""
    return base64.b64encode(compressed(value)).decode()


def inline_json(value: Any) -> str:
    """Return `value` as JSON that is safe inside a script element."""
    return _json(value).replace("<", "\\u003c")


def bundle(modules: Mapping[str, str], main: str) -> str:
    """Bundle module `main` and its imports into one script, each module in its own scope.

    `modules`: file name -> source. The only form of import is `import { a, b } from "./name.js";`. Raises ValueError
    for any other form, a missing module or name, and an import cycle.
    """
    names: dict[str, set[str]] = {}
    parts: list[str] = []

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in names:
            return
        if name not in modules or name in above:
            raise ValueError(f"{name} is imported by {above[-1]}: it is missing, or imports that again.")
        source = modules[name]
        for wanted, other in _IMPORT.findall(source):
            add(other, (*above, name))
            if unknown := set(wanted.split(", ")) - names[other]:
                raise ValueError(f"{name} imports {', '.join(sorted(unknown))}, which {other} does not export.")
        exported = _EXPORT.findall(source)
        body = _EXPORT.sub("", _IMPORT.sub(r'const { \1 } = modules["\2"];', source))
        if re.search(r"^(import|export)\b", body, re.MULTILINE) or "</script" in body:
            raise ValueError(f"{name} holds an import, export or closing tag that cannot be put into a page.")
        names[name] = set(exported)
        parts.append(f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {", ".join(exported)} }};\n}})();\n')

    add(main, ())
    return '"use strict";\n(() => {\nconst modules = {};\n' + "".join(parts) + "})();\n"


def policy(script: str, style: str, live: bool) -> str:
    """Return the content security policy for `script` and `style`; `live` pages may also fetch from their origin."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style))
    sources = "script-src 'sha256-{}'; style-src 'sha256-{}'".format(*hashes)
    connect = "'self'" if live else "'none'"
    return f"default-src 'none'; {sources}; connect-src {connect}; base-uri 'none'; form-action 'none'"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError):  # Sanitising first would double the time of the normal case.
        return json.dumps(json_safe(value), separators=(",", ":"), allow_nan=False)
