"""Writes docs/api.md, the reference of the Python API, from its signatures and docstrings.

A test checks that the file is up to date.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol

import rlsys
from rlsys.apps.api import arguments, retrievers
from scripts.markdown import filled

FILE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
COMMAND = "python -m scripts.api_reference"
_INTRODUCTION = f"""\
# Which classes does the Python API have?

This page lists every class of `from rlsys import ...` with its parameters, methods and properties.
[Python](how-to/python.md) shows how to use them. Parameters marked *by name* are keyword-only.

`{COMMAND}` writes this page from the code.
"""
_TYPES: Mapping[str, ModuleType] = {"Data": arguments, "Devices": arguments, "Documents": retrievers}
"""Type names in the signatures -> modules that explain them."""
_PAGE = re.compile(r"\bdocs/([\w-]+)\.md")


@dataclass(frozen=True, slots=True)
class Explained:
    """Parts of a docstring."""

    text: str
    """Text without the arguments."""
    arguments: dict[str, str]
    """Argument -> meaning."""


def render() -> str:
    """Return the whole page as Markdown."""
    parts = [_INTRODUCTION]
    for name in rlsys.__all__:
        parts += _class(getattr(rlsys, name))
    parts += ["## Types", "\n".join(_type(name, module) for name, module in _TYPES.items())]
    return filled("\n\n".join(part.strip() for part in parts)) + "\n"


def explain(documented: object) -> Explained:
    """Return the parsed docstring of a class, a function or a property."""
    text = inspect.getdoc(documented) or ""
    before, _, rest = text.partition("Args:\n")
    indented = re.match(r"(?:[ \t]+\S.*\n?|\n)*", rest)
    arguments = indented[0] if indented else ""
    found = re.findall(r"^(\w+): (.*(?:\n +.*)*)", textwrap.dedent(arguments), re.MULTILINE)
    after = rest[len(arguments) :]
    return Explained(_linked(before + after), {name: _joined(_linked(meaning)) for name, meaning in found})


def explained_fields(kind: type) -> dict[str, str]:
    """Return field -> the string literal under it, for `kind` and its base classes."""
    found: dict[str, str] = {}
    for base in reversed(_own(kind)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        found |= dict(_texts(tree.body))
    return found


def members(kind: type) -> dict[str, Any]:
    """Return the public methods and properties of `kind`, including inherited ones, in the order of the code."""
    return {
        name: member
        for base in reversed(_own(kind))
        for name, member in vars(base).items()
        if not name.startswith("_") and isinstance(member, FunctionType | classmethod | property)
    }


def _own(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.startswith("rlsys.")]


def _class(kind: type) -> list[str]:
    explained = explain(kind)
    meanings = explained_fields(kind) | explained.arguments
    parts = [f"## `{kind.__name__}`", explained.text]
    if Protocol not in kind.__bases__:
        parts += ["**Parameters**:", _parameters(kind, meanings)]
    found = members(kind)
    properties = {name: one for name, one in found.items() if isinstance(one, property)}
    if properties:
        parts += ["**Properties**:", "\n".join(_property(name, one) for name, one in properties.items())]
    for name in found:
        if name not in properties:
            parts += _method(kind, name)
    return parts


def _method(kind: type, name: str) -> list[str]:
    method = inspect.unwrap(getattr(kind, name))
    explained = explain(method)
    parts = [f"### `{kind.__name__}.{name}`", explained.text]
    listed = _parameters(method, explained.arguments)
    return [
        *parts,
        *(["**Parameters**:", listed] if listed else []),
        f"**Returns**: `{_returned(kind, getattr(kind, name))}`",
    ]


def _returned(kind: type, method: Callable[..., Any]) -> str:
    """Return the type that a caller gets: resolves `Self` and context managers."""
    said = str(inspect.signature(method).return_annotation)
    if hasattr(method, "__wrapped__"):  # A generator function wrapped by `contextmanager`.
        return said.replace("Iterator[", "AbstractContextManager[", 1)
    return kind.__name__ if said == "Self" else said


def _parameters(called: Callable[..., Any], meanings: Mapping[str, str]) -> str:
    return "\n".join(
        _item(one.name, _kind(one), meanings.get(one.name, ""))
        for one in inspect.signature(called).parameters.values()
        if one.name != "self"
    )


def _kind(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else f", default `{parameter.default!r}`"
    by_name = ", *by name*" if parameter.kind is parameter.KEYWORD_ONLY else ""
    return f"`{parameter.annotation}`{default}{by_name}"


def _property(name: str, read: property) -> str:
    assert read.fget is not None
    kind = inspect.signature(read.fget).return_annotation
    return _item(name, f"`{kind}`", _joined(explain(read).text))


def _type(name: str, module: ModuleType) -> str:
    tree = ast.parse(inspect.getsource(module))
    values = {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return _item(name, f"`{values[name]}`", dict(_texts(tree.body))[name])


def _texts(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the assignments and declarations in `body` with a string literal under them."""
    for node, below in pairwise(body):
        match node, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                yield name, _joined(_linked(inspect.cleandoc(text)))


def _item(name: str, kind: str, meaning: str) -> str:
    return f"* `{name}` ({kind})" + (f": {meaning}" if meaning else "")


def _joined(text: str) -> str:
    return " ".join(text.split())


def _linked(text: str) -> str:
    """Return `text` with links in place of page names."""
    return _PAGE.sub(r"[\1](\1.md)", text).strip()


def main() -> None:
    """Write docs/api.md."""
    FILE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
