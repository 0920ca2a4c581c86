"""Writes docs/configuration.md, the reference of all settings, from the schema and the code that reads it.

A key's bounds and unit are in its type, its explanation is the string literal under its field. Which files read it is found by
following types through their syntax trees. An attribute counts as read only where the expression before it is known to be of
the class that owns it: `engine.tp` is no reading of `ParallelConfig.tp`. Types are followed through annotations, attributes of
the code's own classes, assignments (also of tuples, and of either branch), loops over literal tuples and
`dataclasses.replace`. What cannot be followed does not count, so the answer errs on the strict side.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import reduce
from itertools import chain, groupby, pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import rlsys
from rlsys.config.bounds import limits_of
from rlsys.config.schema import REQUIRED, RunConfig, choices, schema_groups, variants

Read = tuple[str, str]
"""(class of the schema, field)"""
Types = dict[str, str]
"""Name -> name of its class."""
Locals = dict[str, set[str]]
"""Name -> the classes that its value may have."""

PACKAGE = Path(rlsys.__file__).resolve().parent
_CONFIG = PACKAGE / "config"
_CHECKS = {_CONFIG, PACKAGE / "cluster" / "planning", PACKAGE / "orchestrator" / "validate.py"}
FILE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
COMMAND = "python scripts/config_reference.py"
_CHOOSER = "config/compose.py"
"""Reads the `kind` of a group, and chooses its class by that."""
_MOST_FILES = 3
_INTRODUCTION = f"""\
# Configuration

Every key of a run: type, default, unit, meaning, and the code that reads it (files below `rlsys/`). Made from the schema
in `rlsys/config/`, and from the code that runs, by `{COMMAND}`. A number without a unit is a plain number, a share or a ratio.

A run's config is a YAML file in `configs/`, put together from the folders beside it; `KEY=VALUE` on the
command line wins over both, for example `rlsys train -c searchr1_tiny_cpu trainer.steps=5`. A key that is
not listed here is refused, and so is a value of another type.

Where a group of keys has a `kind` to choose, each kind has keys of its own, and a key of another kind is refused. The command
line stands above the file, and the file above what it builds on: where a kind is chosen above the place that sets keys of
another, those fall away with their kind. So `trainer.schedule.kind=pipelined` is enough over a file with an `async` schedule.
A run's own record may have keys of any kind; those of others than its own count for nothing.
"""


def render() -> str:
    """The whole page as Markdown."""
    readers = fields_read(running_code(), schema_classes(RunConfig))
    by_path = groupby(schema_groups(RunConfig()), key=lambda part: part[0])
    sections = [_section(path, [group for _, group in parts], readers) for path, parts in by_path]
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
            case ast.Assign(targets=[ast.Name(id=kind.__name__)]), ast.Expr(value=ast.Constant(value=str(text))):
                return _one_line(text)
    raise LookupError(f"{kind.__name__} is nowhere in {kind.__module__}")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _section(path: str, groups: Sequence[Any], readers: Mapping[Read, Sequence[str]]) -> str:
    """One group of keys, in each of its variants."""
    rows = {}
    for settings in groups:
        schema = type(settings)
        hints, annotated, about = (
            get_type_hints(schema),
            get_type_hints(schema, include_extras=True),
            explanations(schema),
        )
        for item in fields(schema):
            key, hint = f"{path}.{item.name}".lstrip("."), hints[item.name]
            if variants(hint) or key in rows:
                continue
            limits, by = limits_of(annotated[item.name]), readers.get((schema.__name__, item.name), ())
            rule = f"{limits.rule.capitalize()}." if limits.rule else ""
            said = f"{about.get(item.name) or kind_meaning(hint)} {rule}".strip()
            type_, default = _type(hint), getattr(settings, item.name)
            if item.name == "kind" and len(groups) > 1:
                default = reduce(getattr, path.split("."), RunConfig()).kind
                type_ = ", ".join(f"`{group.kind}`" for group in groups)
                said = " ".join(f"`{group.kind}`: {_one_line(type(group).__doc__)}" for group in groups)
            elif len(groups) > 1:
                said = f"With `{path}.kind={settings.kind}` alone. {said}"
            files = _files(by or (_CHOOSER,) * (get_origin(hint) is Literal))
            rows[key] = f"| `{key}` | {type_} | {_default(default)} | {limits.unit} | {_cell(said)} | {files} |"
    intro = inspect.cleandoc(groups[0].__doc__ or "")
    if len(groups) > 1:
        *above, name = path.split(".")
        intro = explanations(type(reduce(getattr, above, RunConfig())))[name]
    lines = [f"## {path or 'The run'}", "", intro]
    if rows:
        lines += [
            "",
            "| key | type | default | unit | meaning | read by |",
            "|---|---|---|---|---|---|",
            *rows.values(),
        ]
    return "\n".join(lines) + "\n"


def _files(files: Sequence[str]) -> str:
    """The first few of them."""
    shown = ", ".join(f"`{file}`" for file in files[:_MOST_FILES])
    return shown if len(files) <= _MOST_FILES else f"{shown} and {len(files) - _MOST_FILES} more"


def _type(hint: Any) -> str:
    """In the words of YAML."""
    if hint is type(None):
        return "null"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type(part) for part in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {_type(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"map of {' to '.join(_type(part) for part in get_args(hint))}"
    if choices(hint):
        return ", ".join(f"`{choice}`" for choice in choices(hint))
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


def schema_classes(root: type) -> dict[str, Types]:
    """Class name -> field -> name of the field's type, of a union names with | between, for `root` and all that it holds."""
    hints = get_type_hints(root)
    parts = {name: [part.__name__ for part in variants(hint).values()] for name, hint in hints.items()}
    found = {
        root.__name__: {name: "|".join(parts[name]) or getattr(hint, "__name__", "") for name, hint in hints.items()}
    }
    for part in chain.from_iterable(variants(hint).values() for hint in hints.values()):
        found |= schema_classes(part)
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
                found |= {(owner, node.attr) for owner in _classes_of(node.value, types, known)}
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
                for kind in _classes_of(inner.value, types, known):
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
        types.setdefault(target.id, set()).update(_classes_of(value, types, known))


def _classes_of(node: ast.expr, types: Locals, known: Mapping[str, Types]) -> set[str]:
    """Names of the classes that an expression's value may have; empty where they cannot be told."""
    match node:
        case ast.Name():
            return types.get(node.id, set())
        case ast.Attribute():
            owners = _classes_of(node.value, types, known)
            names = (known[owner][node.attr] for owner in owners if node.attr in known.get(owner, {}))
            return {one for name in names for one in name.split("|")}
        case ast.IfExp():
            return _classes_of(node.body, types, known) | _classes_of(node.orelse, types, known)
        case ast.Call(func=ast.Name(id="replace"), args=[first, *_]):
            return _classes_of(first, types, known)
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


def main() -> None:
    """Write docs/configuration.md."""
    FILE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
