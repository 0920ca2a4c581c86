"""The dependency arrows, the sizes, and the words that code may not hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rlsys

PACKAGE = Path(rlsys.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION = 500, 60
HOME = {
    "megatron.core": {"megatron", "weights", "checkpoint"},
    "sglang": {"rollout"},
    "ray": {"cluster"},
    "faiss": {"search"},
    "fastapi": {"chat", "search", "watch"},
    "hydra": {"config"},
}
"""Library -> the only packages that import it, anywhere in a file."""
PURE = ("algorithms", "pipeline", "reward", "agent")
HEAVY = ("ray", "megatron", "sglang", "transformer_engine")
"""What the pure packages must not even load through others."""


def module_name(file: Path) -> str:
    parts = ("rlsys", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def imported(nodes: Iterator[ast.AST], package: str) -> set[str]:
    """Full names that import statements ask for; of `from a import b` both a and a.b."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*up, *([node.module] if node.module else [])])
            names |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return names


def at_module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, nothing for the type checker alone."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_module_level(child)


def package_of(module: str) -> str:
    is_package = MODULES[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


@cache
def loads(module: str) -> frozenset[str]:
    """Names outside of rlsys that importing `module` loads, directly or through rlsys."""
    seen, waiting, outside = set(), [module], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        waiting += [parent for parent in parents(current) if parent not in seen]
        tree = ast.parse(MODULES[current].read_text())
        for name in imported(at_module_level(tree), package_of(current)):
            if name in MODULES:
                waiting.append(name)
            elif not name.startswith("rlsys."):
                outside.add(name)
    return frozenset(outside)


def parents(module: str) -> list[str]:
    """Packages whose `__init__` runs first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def belongs(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


@pytest.mark.parametrize("library", HOME)
def test_a_library_is_imported_only_at_home(library: str) -> None:
    users = set()
    for module, file in MODULES.items():
        names = imported(ast.walk(ast.parse(file.read_text())), package_of(module))
        if any(belongs(name, library) for name in names):
            users.add(module)
    strangers = {module for module in users if module.split(".")[1] not in HOME[library]}
    assert strangers == set()
    assert users, f"nothing imports {library}: the rule is out of date"


@pytest.mark.parametrize("package", PURE)
def test_a_pure_package_loads_nothing_heavy(package: str) -> None:
    modules = [module for module in MODULES if belongs(module, f"rlsys.{package}")]
    assert modules
    for module in modules:
        heavy = {name for name in loads(module) if any(belongs(name, library) for library in HEAVY)}
        assert heavy == set(), module


def test_algorithms_know_nothing_of_rlsys_but_its_settings() -> None:
    for module, file in MODULES.items():
        if belongs(module, "rlsys.algorithms"):
            names = imported(ast.walk(ast.parse(file.read_text())), package_of(module))
            own = {name for name in names if belongs(name, "rlsys")}
            assert all(belongs(name, "rlsys.config") or belongs(name, "rlsys.algorithms") for name in own)


def test_heavy_imports_are_seen_through_a_chain() -> None:
    """The walk above finds what it forbids where it is allowed."""
    assert any(belongs(name, "ray") for name in loads("rlsys.session"))
    assert not any(belongs(name, "ray") for name in loads("rlsys.cli.main")), "a plan would wait for Ray"


def test_no_modules_import_each_other_in_a_circle() -> None:
    arrows = {}
    for module, file in MODULES.items():
        names = imported(at_module_level(ast.parse(file.read_text())), package_of(module))
        arrows[module] = {name for name in names if name in MODULES} - {module, "rlsys"}
    while arrows:
        leaves = {module for module, targets in arrows.items() if not targets & set(arrows)}
        assert leaves, f"a circle within {sorted(arrows)}"
        arrows = {module: targets for module, targets in arrows.items() if module not in leaves}


def test_files_are_short() -> None:
    long = {
        str(file): count for file in FILES if (count := len(file.read_text().splitlines())) > LONGEST_FILE
    }
    assert long == {}


def test_functions_are_short() -> None:
    long = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
                    long[f"{file}:{node.name}"] = lines
    assert long == {}


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(file)
        for file in FILES
        if file.name != "__init__.py" and not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert silent == []


def test_nothing_is_left_to_do_later() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [str(file) for file in FILES if marks.search(file.read_text())] == []
