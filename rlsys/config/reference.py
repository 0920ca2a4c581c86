"""The reference of all settings, rendered from the schema: docs/configuration.md.

Pure but for `main`, which writes the file. A key's explanation is the string literal under its field.
A test holds that the file is up to date.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rlsys.config.ranges import BOUNDS
from rlsys.config.schema import REQUIRED, RunConfig

FILE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
COMMAND = "python -m rlsys.config.reference"
_INTRODUCTION = f"""\
# Configuration

Every key of a run, its type and its default. Made from the schema in `rlsys/config/` by `{COMMAND}`.

A run's config is a YAML file in `configs/`, put together from the folders beside it; `KEY=VALUE` on the
command line wins over both, for example `rlsys train -c searchr1_tiny_cpu trainer.steps=5`. A key that is
not listed here is refused, and so is a value of another type.
"""


def render() -> str:
    """The whole page as Markdown."""
    sections = [_section(path, settings) for path, settings in _sections(RunConfig())]
    return "\n".join([_INTRODUCTION, *sections])


def explanations(schema: type) -> dict[str, str]:
    """Field name -> the string literal under it, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                found[statement.target.id] = " ".join(text.split())
    return found


def _sections(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The schema's parts in reading order, as they are by default, each with its dotted place."""
    yield path, settings
    for item in fields(settings):
        part = getattr(settings, item.name)
        if is_dataclass(part):
            yield from _sections(part, f"{path}.{item.name}".lstrip("."))


def _section(path: str, settings: Any) -> str:
    schema = type(settings)
    hints, about = get_type_hints(schema), explanations(schema)
    rows = []
    for item in fields(schema):
        if not is_dataclass(hints[item.name]):
            key = f"{path}.{item.name}".lstrip(".")
            rule = BOUNDS[key].rule.capitalize() + "." if key in BOUNDS else ""
            text = _cell(f"{about.get(item.name, '')} {rule}".strip())
            default = _default(getattr(settings, item.name))
            rows.append(f"| `{key}` | {_type(hints[item.name])} | {default} | {text} |")
    lines = [f"## {path or 'The run'}", "", inspect.cleandoc(schema.__doc__ or "")]
    if rows:
        lines += ["", "| key | type | default | |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _type(hint: Any) -> str:
    """In the words of YAML."""
    if hint is type(None):
        return "null"
    if isinstance(hint, UnionType):
        return " or ".join(_type(part) for part in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {_type(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"map of {' to '.join(_type(part) for part in get_args(hint))}"
    if issubclass(hint, StrEnum):
        return ", ".join(f"`{member}`" for member in hint)
    return {str: "text", bool: "true or false", int: "integer", float: "number"}[hint]


def _default(value: Any) -> str:
    if value == REQUIRED:
        return "required"
    if isinstance(value, float):
        return f"`{value!r}`"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1024**2 and value % 1024**2 == 0:
        return f"`{value}` ({value // 1024**2} MiB)"
    return f"`{_cell(json.dumps(value))}`"


def _cell(text: str) -> str:
    return re.sub(r"\|", r"\\|", text)


def main() -> None:
    """Write docs/configuration.md."""
    FILE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
