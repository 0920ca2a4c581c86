"""All that is public is exported and explained."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import rlsys
import rlsys.apps.api

FILES = sorted(Path(rlsys.apps.api.__file__).parent.glob("*.py"))
LIKE_ANOTHER = "See `SearchBackend`"
"""How the text of a method begins that explains no parameters of its own."""


def unexplained(code: str) -> Iterator[str]:
    """Public classes, functions, methods, properties, fields and parameters of methods that no text explains."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield from () if ast.get_docstring(node) else [node.name]
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in unexplained_members(node))


def unexplained_members(kind: ast.ClassDef) -> Iterator[str]:
    above = explained_arguments(kind)
    below = {id(node) for node, text in pairwise(kind.body) if is_text(text)}
    for node in kind.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_") and not name.isupper():
                yield from () if id(node) in below or name in above else [name]
            case ast.FunctionDef(name="__init__"):
                yield from (name for name in parameters(node) if name not in above)
            case ast.FunctionDef(name=name) if not name.startswith("_"):
                text = ast.get_docstring(node) or ""
                yield from () if text else [name]
                if not text.startswith(LIKE_ANOTHER) and not kind.name.startswith("_"):
                    known = explained_arguments(node)
                    yield from (f"{name}({one})" for one in parameters(node) if one not in known)


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def parameters(function: ast.FunctionDef) -> list[str]:
    every = [*function.args.args, *function.args.kwonlyargs]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


def explained_arguments(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Those of its "Args:", and those that the text names."""
    text = ast.get_docstring(node) or ""
    found = {line.strip().partition(":")[0] for line in text.partition("Args:\n")[2].splitlines()}
    return found | set(text.partition("Args:\n")[0].split("`")[1::2])


def test_everything_public_is_exported_and_explained() -> None:
    assert rlsys.__all__ == rlsys.apps.api.__all__
    for name in rlsys.__all__:
        assert inspect.getdoc(getattr(rlsys, name)), name
        assert name in dir(rlsys)
    found = [f"{file.stem}: {name}" for file in FILES for name in unexplained(file.read_text())]
    assert found == []
    with pytest.raises(AttributeError, match="has no attribute 'SearchR2Trainer'"):
        _ = rlsys.SearchR2Trainer


CODE = '''
class Silent:
    count: int
    told: int
    """Of something."""

class Told:
    """Something.

    Args:
        first: the first.
    """

    first: int
    second: int

    def __init__(self, first: int, third: int) -> None: ...

    @property
    def size(self) -> int: ...

    def grow(self, by: int, *, to: int) -> None:
        """Grow `by` so much."""

    def serving(self, log_dir: str) -> None:
        """See `SearchBackend`."""

def _own() -> None: ...

def make() -> None: ...
'''


def test_what_is_not_explained_is_seen() -> None:
    assert list(unexplained(CODE)) == [
        "Silent", "Silent.count", "Told.second", "Told.third", "Told.size", "Told.grow(to)", "make",
    ]  # fmt: skip
