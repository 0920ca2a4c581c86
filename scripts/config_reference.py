"""Writes docs/configuration.md, the reference of all keys, from the schema and the code that reads them.

A key's bounds and unit are in its type; its explanation is the string literal under its field. The files that read a
key are found by following types through the syntax trees. An attribute counts as read only if the expression before it
is known to have the class that owns it: `engine.tp` does not read `ParallelConfig.tp`. Types are followed through
annotations, attributes of the code's own classes, assignments (also of tuples, and of either branch), loops over
literal tuples, maps of groups and `dataclasses.replace`. Other reads do not count, so the result may miss files but
never adds one. A file that calls a function of config/derived.py counts as a reader of the keys that the function reads.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import reduce
from itertools import chain, groupby, pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import rlsys
from rlsys.config.bounds import limits_of
from rlsys.config.custom import REQUIRED
from rlsys.config.schema import RunConfig, choices, group_of_map, is_custom, own_class, schema_groups, variants

Read = tuple[str, str]
"""(class of the schema, field)"""
Types = dict[str, str]
"""Attribute -> name of its class."""
Locals = dict[str, set[str]]
"""Local name -> classes that its value may have."""

PACKAGE = Path(rlsys.__file__).resolve().parent
_CONFIG = PACKAGE / "config"
_ESTIMATES = {PACKAGE / "cluster" / "planning", PACKAGE / "apps" / "planner"}
_CHECKS = {_CONFIG, PACKAGE / "orchestrator" / "validate.py", *_ESTIMATES}
FILE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
COMMAND = "python scripts/config_reference.py"
_RETURNS = "()"
"""Name under which the types that functions of `_DERIVED` return stand beside the classes."""
_DERIVED = "config/derived.py"
"""File of functions that compute facts from keys for other files."""
_CHOOSER = "config/compose.py"
"""File that reads the `kind` of a group and selects its class."""
_MOST_FILES = 3
_INTRODUCTION = f"""\
# Which keys does a config have?

This page lists every key of a run with its type, default, unit, meaning and the files below `rlsys/` that
read it. A number without a unit is a plain number, a share or a ratio. `{COMMAND}`
writes this page from the schema in `rlsys/config/` and the code.

A run's config is a YAML file in `configs/`, composed from files in the folders beside it. `KEY=VALUE` on the
command line overrides both, for example `rlsys train -c searchr1_tiny_cpu trainer.steps=5`. A key that is not
listed here and a value of another type are refused.

Some groups of keys have a `kind`, and each kind has its own keys. A key of another kind than the chosen one
is refused. The command line overrides the file, and the file overrides the files that it builds on. If one
of them chooses another kind than what it overrides, the keys of the old kind are dropped: over a file with an
`async` schedule, `trainer.schedule.kind=pipelined` is enough, or shorter `trainer.schedule=pipelined`. A key
that every engine or every optimiser has, such as `actor.optimizer.lr`, keeps its value. Where
`package.module.attribute` is a kind, a function or class [of your own](extending.md) takes the place of a
built-in one, and its parameters are the keys. The config.yaml of a run folder may contain keys of other kinds
than the chosen one; they are ignored.
"""


def render() -> str:
    """Return the whole page as Markdown."""
    readers = fields_read(running_code(), schema_classes(RunConfig))
    by_path = groupby(schema_groups(RunConfig()), key=lambda part: part[0])
    sections = [_section(path, [group for _, group in parts], readers) for path, parts in by_path]
    return "\n".join([_INTRODUCTION, *sections])


def explanations(schema: type) -> dict[str, str]:
    """Return field name -> the string literal under it, on one line; for a field of a base class, the literal there."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for base in filter(is_dataclass, schema.__bases__):
        found |= explanations(base)
    for statement, following in pairwise(body.body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                found[statement.target.id] = _one_line(text)
    return found


def kind_meaning(kind: Any) -> str:
    """Return the text under the definition of an enumeration, which explains its choices; empty for other types."""
    if not (inspect.isclass(kind) and issubclass(kind, StrEnum)):
        return ""
    body = ast.parse(inspect.getsource(sys.modules[kind.__module__])).body
    for statement, following in pairwise(body):
        match statement, following:
            case ast.Assign(targets=[ast.Name(id=kind.__name__)]), ast.Expr(value=ast.Constant(value=str(text))):
                return _one_line(text)
    raise LookupError(f"{kind.__name__} has no explanation in {kind.__module__}")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _section(path: str, groups: Sequence[Any], readers: Mapping[Read, Sequence[str]]) -> str:
    """Return the section of one group of keys, with all its variants."""
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
            limits, by = limits_of(annotated[item.name]), _readers(schema, item.name, readers)
            rule = f"{limits.rule.capitalize()}." if limits.rule else ""
            said = f"{about.get(item.name) or kind_meaning(hint)} {rule}".strip()
            type_, default = _type(hint), getattr(settings, item.name)
            if item.name == "kind" and len(groups) > 1:
                default = reduce(getattr, path.split("."), cast("Any", RunConfig())).kind
                type_ = ", ".join(f"`{kind}`" for group in groups for kind in _kinds(group))
                said = " ".join(f"`{'`, `'.join(_kinds(group))}`: {_one_line(type(group).__doc__)}" for group in groups)
                if own := _own_variant(path):
                    type_, said = (
                        f"{type_}, `package.module.attribute`",
                        f"{said} `package.module.attribute`: {_one_line(own.__doc__)}",
                    )
            elif len(groups) > 1:
                said = f"{_only_with(path, item.name, groups)} {said}".strip()
            files = _files(by or (_CHOOSER,) * (get_origin(hint) is Literal))
            values = _default(default)
            if item.name != "kind" and len(groups) > 1:
                values = _defaults_by_kind(item.name, groups)
            rows[key] = f"| `{key}` | {type_} | {values} | {limits.unit} | {_cell(said)} | {files} |"
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


def _own_variant(path: str) -> type | None:
    """Return the class of components from outside of the package for the group `path`; None if it takes none."""
    *above, name = path.split(".")
    return own_class(get_type_hints(type(reduce(getattr, above, RunConfig())))[name])


def _readers(schema: type, name: str, readers: Mapping[Read, Sequence[str]]) -> list[str]:
    """Return the files that read a field of `schema`, as its own or as that of a base class."""
    return [*dict.fromkeys(file for each in schema.__mro__ for file in readers.get((each.__name__, name), ()))]


def _kinds(group: Any) -> tuple[str, ...]:
    return get_args(get_type_hints(type(group))["kind"])


def _defaults_by_kind(name: str, groups: Sequence[Any]) -> str:
    """Return the default of a key, with the kind if kinds have different defaults."""
    of_kind = {_kinds(group)[0]: _default(getattr(group, name)) for group in groups if hasattr(group, name)}
    if len({*of_kind.values()}) == 1:
        return next(iter(of_kind.values()))
    return ", ".join(f"{default} (`{kind}`)" for kind, default in of_kind.items())


def _only_with(path: str, name: str, groups: Sequence[Any]) -> str:
    """Return the sentence that names the kinds of a group that have the key; empty if all have it."""
    kinds = [kind for group in groups if hasattr(group, name) for kind in _kinds(group)]
    if len(kinds) == sum(len(_kinds(group)) for group in groups):
        return ""
    return f"Only with `{path}.kind={'` or `'.join(kinds)}`."


def _files(files: Sequence[str]) -> str:
    """Return the first `_MOST_FILES` files, and the number of further files."""
    shown = ", ".join(f"`{file}`" for file in files[:_MOST_FILES])
    return shown if len(files) <= _MOST_FILES else f"{shown} and {len(files) - _MOST_FILES} more"


def _type(hint: Any) -> str:
    """Return the type in YAML's terms."""
    if hint is type(None):
        return "null"
    if is_custom(hint):
        return "components"
    if is_dataclass(hint):
        return "group of keys"
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
    """Return class name -> field -> name of the field's type, for `root`, its bases and all classes in it; members of a
    union, and the values of a literal, joined by |; of a map of groups, the class of the groups."""
    hints = get_type_hints(root)
    groups = {name: [*variants(hint).values(), *filter(None, [group_of_map(hint)])] for name, hint in hints.items()}
    parts = {name: [part.__name__ for part in found] for name, found in groups.items()}
    found = {
        root.__name__: {
            name: "|".join(parts[name] or _literals(hint)) or getattr(hint, "__name__", "")
            for name, hint in hints.items()
        }
    }
    bases = [base for base in root.__bases__ if is_dataclass(base)]
    for part in chain(bases, *groups.values()):
        found |= schema_classes(part)
    return found


def _literals(hint: Any) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def running_code() -> dict[str, str]:
    """Return file below rlsys/ -> its source, without schema, checks and estimates, which do not use the values.

    config/derived.py comes last; running code calls it.
    """
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if not _CHECKS & {file, *file.parents}]
    return {
        file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8") for file in [*files, PACKAGE / _DERIVED]
    }


def fields_read(sources: Mapping[str, str], schema: Mapping[str, Types]) -> dict[Read, tuple[str, ...]]:
    """Return field of `schema` -> files that read it, in order; `sources` maps the files of a package to their code."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    known = {name: dict(attributes) for name, attributes in schema.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name not in schema]
    if _DERIVED in trees:
        known[_RETURNS] = {function.name: _annotated(function.returns) for _, function in _functions(trees[_DERIVED])}
    for _ in range(3):  # An attribute's type may depend on another class.
        for defined in classes:
            known.setdefault(defined.name, {}).update(_attributes(defined, known))
    found: dict[Read, dict[str, None]] = defaultdict(dict)
    for file, tree in trees.items():
        for owner, name in _reads(tree, known):
            if name in schema.get(owner, {}):
                found[owner, name][file] = None
    for kind, name, file in _component_parameters(trees):
        for owner in (each for each, types in schema.items() if kind in types.get("kind", "").split("|")):
            found[owner, name][file] = None
    for read, callers in _read_through(trees, known).items():
        if read in found:
            found[read].update(dict.fromkeys(callers))
            del found[read][_DERIVED]
    return {read: tuple(files) for read, files in found.items()}


def _component_parameters(trees: Mapping[str, ast.AST]) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, parameter, file) of the functions in tables from the kind of a component to its function."""
    for file, tree in trees.items():
        functions = {function.name: function for _, function in _functions(tree)}
        tables = (
            node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
        )
        for table in tables:
            assert isinstance(table.value, ast.Dict)
            for kind, function in zip(table.value.keys, table.value.values, strict=True):
                if isinstance(kind, ast.Constant) and isinstance(function, ast.Name) and function.id in functions:
                    for argument in functions[function.id].args.kwonlyargs:
                        yield str(kind.value), argument.arg, file


def _read_through(trees: Mapping[str, ast.AST], known: Mapping[str, Types]) -> dict[Read, list[str]]:
    """Return each read in config/derived.py -> the files that call its function, also through another function there.

    Reads whose function is called by no file are left out.
    """
    if _DERIVED not in trees:
        return {}
    functions = {function.name: function for _, function in _functions(trees[_DERIVED])}
    found: dict[Read, dict[str, None]] = defaultdict(dict)
    for file, tree in trees.items():
        called = _names(tree) & functions.keys() if file != _DERIVED and _imports_derived(tree) else set()
        while inner := {name for one in called for name in _names(functions[one]) & functions.keys()} - called:
            called |= inner
        for name in called:
            for read in _reads(ast.Module([functions[name]], []), known):
                found[read][file] = None
    return {read: list(files) for read, files in found.items()}


def _imports_derived(tree: ast.AST) -> bool:
    module = f"{PACKAGE.name}.{_DERIVED.removesuffix('.py').replace('/', '.')}"
    return any(isinstance(node, ast.ImportFrom) and node.module == module for node in ast.walk(tree))


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _reads(tree: ast.AST, known: Mapping[str, Types]) -> set[Read]:
    """Return (class, attribute) of all attributes that the functions of a file read."""
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
    """Yield (class name, function) of outermost functions and methods."""
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
    """Return the types of a class's attributes, from annotations, properties and assignments to `self`."""
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
    """Return the types of the parameters, including those of inner functions."""
    types: Locals = {"self": {owner}}
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.annotation is not None:
            types[node.arg] = {*_annotated(node.annotation).split("|")}
    return types


def _bind(function: ast.AST, types: Locals, known: Mapping[str, Types]) -> None:
    """Add the types of assigned names, and of loop variables over a literal."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            _bind_one(node.targets[0], node.value, types, known)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            types[node.target.id] = {*_annotated(node.annotation).split("|")}
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            _bind_one(node.optional_vars, node.context_expr, types, known)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple):
            for each in node.iter.elts:
                _bind_one(node.target, each, types, known)
        elif isinstance(node, ast.For | ast.comprehension):
            match node.iter, node.target:
                case ast.Call(func=ast.Attribute(value=groups, attr="items")), ast.Tuple(elts=[_, group]):
                    _bind_one(group, groups, types, known)
                case ast.Call(func=ast.Attribute(value=groups, attr="values")), group:
                    _bind_one(group, groups, types, known)


def _bind_one(target: ast.expr, value: ast.expr, types: Locals, known: Mapping[str, Types]) -> None:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for inner, part in zip(target.elts, value.elts, strict=True):
            _bind_one(inner, part, types, known)
    elif isinstance(target, ast.Name):
        types.setdefault(target.id, set()).update(_classes_of(value, types, known))


def _classes_of(node: ast.expr, types: Locals, known: Mapping[str, Types]) -> set[str]:
    """Return the names of the classes that an expression's value may have; empty if unknown."""
    match node:
        case ast.Name():
            return types.get(node.id, set())
        case ast.Attribute():
            owners = _classes_of(node.value, types, known)
            names = (known[owner][node.attr] for owner in owners if node.attr in known.get(owner, {}))
            return {one for name in names for one in name.split("|")}
        case ast.Call(func=ast.Attribute(value=groups, attr="get")):  # Of a map of groups.
            return _classes_of(groups, types, known)
        case ast.IfExp():
            return _classes_of(node.body, types, known) | _classes_of(node.orelse, types, known)
        case ast.Call(func=ast.Name(id="replace"), args=[first, *_]):
            return _classes_of(first, types, known)
        case ast.Call(func=ast.Name(id=name)) if name in known:
            return {name}
        case ast.Call(func=ast.Name(id=name)):
            return {*known.get(_RETURNS, {}).get(name, "").split("|")}
        case _:
            return set()


def _annotated(annotation: ast.expr | None) -> str:
    """Return the classes named by an annotation, joined by |, without None."""
    match annotation:
        case ast.Name():
            return annotation.id
        case ast.Constant(value=str(name)):
            return name
        case ast.BinOp():
            return "|".join(filter(None, (_annotated(annotation.left), _annotated(annotation.right))))
        case _:
            return ""


def main() -> None:
    """Write docs/configuration.md."""
    FILE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
