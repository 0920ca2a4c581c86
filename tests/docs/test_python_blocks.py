"""Python in the documents: it parses, what it imports is there, and calls of rlsys' own names have the right arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from typing import Any

from tests.docs.pages import PAGES

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def check(code: str) -> int:
    """Count the calls of names that are imported from rlsys; raises for one that could not be made."""
    tree, names, checked = ast.parse(code), dict[str, Any](), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlsys":
            module = importlib.import_module(node.module or "")
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in names:
                target = names[name]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if name in names:
                target = getattr(names[name], method)
            case _:
                continue
        if not (isinstance(target, type) and issubclass(target, BaseException)):  # They tell no signature.
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(target).bind(*[None] * len(node.args), **keywords)
            checked += 1
    return checked


def test_every_block_could_run() -> None:
    checked = [check(code) for page in PAGES for code in _BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert sum(checked) > 0
