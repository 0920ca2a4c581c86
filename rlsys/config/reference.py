"""The reference of all settings, rendered from the schema: docs/configuration.md.

Pure but for `main`, which writes the file. A key's explanation is the string literal under its field.
A test holds that the file is up to date.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rlsys.config.ranges import BOUNDS
from rlsys.config.readers import Read, fields_read, running_code, schema_classes
from rlsys.config.schema import REQUIRED, RunConfig
from rlsys.config.units import unit_of

FILE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
COMMAND = "python -m rlsys.config.reference"
_MOST_FILES = 3
_INTRODUCTION = f"""\
# Configuration

Every key of a run: type, default, unit, meaning, and the code that reads it (files below `rlsys/`). Made from the schema
in `rlsys/config/`, and from the code that runs, by `{COMMAND}`. A number without a unit is a plain number, a share or a ratio.

A run's config is a YAML file in `configs/`, put together from the folders beside it; `KEY=VALUE` on the
command line wins over both, for example `rlsys train -c searchr1_tiny_cpu trainer.steps=5`. A key that is
not listed here is refused, and so is a value of another type.
"""


def render() -> str:
    """The whole page as Markdown."""
    readers = fields_read(running_code(), schema_classes(RunConfig))
    sections = [_section(path, settings, readers) for path, settings in _sections(RunConfig())]
    return "\n".join([_INTRODUCTION, *sections])


def explanations(schema: type) -> dict[str, str]:
    """Field name -> the string literal under it, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in pairwise(body.body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                found[statement.target.id] = _one_line(text)
    return found


def kind_meaning(kind: Any) -> str:
    """What a kind of choice is about, and what each choice means where that is written under it; empty for no choice."""
    if not (inspect.isclass(kind) and issubclass(kind, StrEnum)):
        return ""
    body = ast.parse(inspect.getsource(sys.modules[kind.__module__])).body
    for statement, following in pairwise(body):
        match statement, following:
            case ast.ClassDef(name=kind.__name__), _:
                return f"{_one_line(ast.get_docstring(statement))} {_choices(statement)}".strip()
            case ast.Assign(targets=[ast.Name(id=kind.__name__)]), ast.Expr(value=ast.Constant(value=str(text))):
                return _one_line(text)
    raise LookupError(f"{kind.__name__} is nowhere in {kind.__module__}")


def _choices(kind: ast.ClassDef) -> str:
    """The members that have a meaning of their own, each with it."""
    found = []
    for statement, following in pairwise(kind.body):
        match statement, following:
            case ast.Assign(value=ast.Constant(value=str(name))), ast.Expr(value=ast.Constant(value=str(text))):
                found.append(f"`{name}`: {_one_line(text)}")
    return " ".join(found)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _sections(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The schema's parts in reading order, as they are by default, each with its dotted place."""
    yield path, settings
    for item in fields(settings):
        part = getattr(settings, item.name)
        if is_dataclass(part):
            yield from _sections(part, f"{path}.{item.name}".lstrip("."))


def _section(path: str, settings: Any, readers: Mapping[Read, Sequence[str]]) -> str:
    schema = type(settings)
    hints, about = get_type_hints(schema), explanations(schema)
    rows = []
    for item in fields(schema):
        if not is_dataclass(hints[item.name]):
            key = f"{path}.{item.name}".lstrip(".")
            rule = BOUNDS[key].rule.capitalize() + "." if key in BOUNDS else ""
            said = about.get(item.name) or kind_meaning(hints[item.name])
            text = _cell(f"{said} {rule}".strip())
            default = _default(getattr(settings, item.name))
            unit = unit_of(key) if _is_number(hints[item.name]) else ""
            by = _files(readers.get((schema.__name__, item.name), ()))
            rows.append(f"| `{key}` | {_type(hints[item.name])} | {default} | {unit} | {text} | {by} |")
    lines = [f"## {path or 'The run'}", "", inspect.cleandoc(schema.__doc__ or "")]
    if rows:
        lines += [
            "",
            "| key | type | default | unit | meaning | read by |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    return "\n".join(lines) + "\n"


def _is_number(hint: Any) -> bool:
    """Whether a value of this type may be a number, or a list of them."""
    return hint in (int, float) or any(_is_number(part) for part in get_args(hint))


def _files(files: Sequence[str]) -> str:
    """The first few of them."""
    shown = ", ".join(f"`{file}`" for file in files[:_MOST_FILES])
    return shown if len(files) <= _MOST_FILES else f"{shown} and {len(files) - _MOST_FILES} more"


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
