"""Python in the documents: it parses, what it imports is there, and calls of rlsys' own names have the right arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from typing import Any, get_type_hints

import pytest

from tests.docs.pages import PAGES
from tests.support.paths import PROJECT

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks() -> list[tuple[str, str]]:
    """(page, code) of every block."""
    return [
        (page.relative_to(PROJECT).as_posix(), code)
        for page in PAGES
        for code in _BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def imported(tree: ast.Module) -> dict[str, Any]:
    """Name -> what it is, of everything that is imported from rlsys."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rlsys":
            module = importlib.import_module(node.module)
            found |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return found


def check(code: str) -> int:
    """How many calls of rlsys' own names, and of methods of what they return, there are; raises where one could not be made."""
    tree = ast.parse(code)
    names, checked = imported(tree), 0
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=variable)], value=ast.Call(func=made)):
                if (kind := returned(made, names)) is not None:
                    names[variable] = kind
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (target := called(node.func, names)) is None:
            continue
        if isinstance(target, type) and issubclass(target, BaseException):
            continue  # Built-in types tell no signature.
        keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
        method = isinstance(node.func, ast.Attribute) and not inspect.ismethod(target)
        inspect.signature(target).bind(*[None] * (len(node.args) + method), **keywords)
        checked += 1
    return checked


def called(function: ast.expr, names: dict[str, Any]) -> Any:
    """What a call calls; None for what is not rlsys' own. Methods are those of the class."""
    match function:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in names:
            return getattr(names[name], attribute)
    return None


def returned(function: ast.expr, names: dict[str, Any]) -> Any:
    """The class of what a call returns; None where that is not told."""
    target = called(function, names)
    if target is None or isinstance(target, type):
        return target
    kind = get_type_hints(target).get("return")
    return kind if isinstance(kind, type) and kind.__module__.startswith("rlsys.") else None


def test_every_block_could_run() -> None:
    assert blocks()
    for page, code in blocks():
        assert check(code) > 0 or "import ToolError" in code or "rlsys" not in code, page


def test_what_could_not_run_is_seen() -> None:
    assert check("from rlsys import SearchR1Trainer\nSearchR1Trainer('model', None, devices=8)") == 1
    with pytest.raises(TypeError, match="steps"):
        check("from rlsys import SearchR1Trainer\ntrainer = SearchR1Trainer('m', None)\ntrainer.train('f', steps=3)")
    with pytest.raises(TypeError, match="gpus"):
        check("from rlsys import SearchR1Trainer\nSearchR1Trainer('model', None, gpus=8)")
    with pytest.raises(AttributeError, match="SearchR1Teacher"):
        check("from rlsys import SearchR1Teacher")
