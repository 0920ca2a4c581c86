"""Which fields of the schema code reads, and where, by following types through its syntax trees.

An attribute counts as read only where the expression before it is known to be of the class that owns it:
`engine.tp` is no reading of `ParallelConfig.tp`. Types are followed through annotations, attributes of the
code's own classes, assignments (also of tuples, and of either branch), loops over literal tuples and
`dataclasses.replace`. What cannot be followed does not count, so the answer errs on the strict side.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

Read = tuple[str, str]
"""(class of the schema, field)"""
Types = dict[str, str]
"""Name -> name of its class."""
Locals = dict[str, set[str]]
"""Name -> the classes that its value may have."""

PACKAGE = Path(__file__).resolve().parents[1]
_CONFIG = PACKAGE / "config"
_CHECKS = {_CONFIG, PACKAGE / "cluster" / "planning", PACKAGE / "orchestrator" / "validate.py"}


def schema_classes(root: type) -> dict[str, Types]:
    """Class name -> field -> name of the field's type, for `root` and all that it holds."""
    hints = get_type_hints(root)
    found = {root.__name__: {item.name: getattr(hints[item.name], "__name__", "") for item in fields(root)}}
    for item in fields(root):
        if is_dataclass(hints[item.name]):
            found |= schema_classes(hints[item.name])
    return found


def running_code() -> dict[str, str]:
    """File below rlsys/ -> its source, without schema, checks and estimates: they use no value.

    What follows from a config is, because the running code asks there.
    """
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if not _CHECKS & {file, *file.parents}]
    return {
        file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8")
        for file in [*files, _CONFIG / "derived.py"]
    }


def fields_read(sources: Mapping[str, str], schema: Mapping[str, Types]) -> dict[Read, tuple[str, ...]]:
    """Field of `schema` -> the files that read it, in their order; `sources` is the code of one package by file."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    known = {name: dict(attributes) for name, attributes in schema.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name not in schema]
    for _ in range(3):  # an attribute's type may hang on that of another class
        for defined in classes:
            known.setdefault(defined.name, {}).update(_attributes(defined, known))
    found: dict[Read, dict[str, None]] = defaultdict(dict)
    for file, tree in trees.items():
        for owner, name in _reads(tree, known):
            if name in schema.get(owner, {}):
                found[owner, name][file] = None
    return {read: tuple(files) for read, files in found.items()}


def _reads(tree: ast.AST, known: Mapping[str, Types]) -> set[Read]:
    """Attributes that the functions of a file read, each with the class that owns it."""
    found: set[Read] = set()
    for of_class, function in _functions(tree):
        types = _parameters(function, of_class)
        for _ in range(2):
            _bind(function, types, known)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found |= {(owner, node.attr) for owner in _type(node.value, types, known)}
    return found


def _functions(tree: ast.AST) -> Iterable[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Outermost functions and methods, each with the name of its class."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        owner, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield owner, child
            elif isinstance(child, ast.ClassDef):
                waiting.append((child.name, child))
            else:
                waiting.append((owner, child))


def _attributes(node: ast.ClassDef, known: Mapping[str, Types]) -> Types:
    """Types of a class's attributes, from annotations, properties and what its methods assign to `self`."""
    found: Types = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = _annotated(statement.annotation)
        if isinstance(statement, ast.FunctionDef) and statement.decorator_list:
            found[statement.name] = _annotated(statement.returns)
    for _, method in _functions(node):
        types = _parameters(method, node.name)
        _bind(method, types, known)
        for inner in ast.walk(method):
            if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Attribute):
                for kind in _type(inner.value, types, known):
                    found.setdefault(inner.targets[0].attr, kind)
    return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> Locals:
    """Types of the parameters, also of those of functions within."""
    types: Locals = {"self": {owner}}
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.annotation is not None:
            types[node.arg] = {_annotated(node.annotation)}
    return types


def _bind(function: ast.AST, types: Locals, known: Mapping[str, Types]) -> None:
    """Add the types of names that are assigned, or looped over a literal."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            _bind_one(node.targets[0], node.value, types, known)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            types[node.target.id] = {_annotated(node.annotation)}
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            _bind_one(node.optional_vars, node.context_expr, types, known)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple):
            for each in node.iter.elts:
                _bind_one(node.target, each, types, known)


def _bind_one(target: ast.expr, value: ast.expr, types: Locals, known: Mapping[str, Types]) -> None:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for inner, part in zip(target.elts, value.elts, strict=True):
            _bind_one(inner, part, types, known)
    elif isinstance(target, ast.Name):
        types.setdefault(target.id, set()).update(_type(value, types, known))


def _type(node: ast.expr, types: Locals, known: Mapping[str, Types]) -> set[str]:
    """Names of the classes that an expression's value may have; empty where they cannot be told."""
    match node:
        case ast.Name():
            return types.get(node.id, set())
        case ast.Attribute():
            owners = _type(node.value, types, known)
            return {known[owner][node.attr] for owner in owners if node.attr in known.get(owner, {})}
        case ast.IfExp():
            return _type(node.body, types, known) | _type(node.orelse, types, known)
        case ast.Call(func=ast.Name(id="replace"), args=[first, *_]):
            return _type(first, types, known)
        case ast.Call(func=ast.Name(id=name)) if name in known:
            return {name}
        case _:
            return set()


def _annotated(annotation: ast.expr | None) -> str:
    """The class named by an annotation; of `X | None` X."""
    match annotation:
        case ast.Name():
            return annotation.id
        case ast.Constant(value=str(name)):
            return name
        case ast.BinOp():
            return _annotated(annotation.left)
        case _:
            return ""
