"""Tests of the architecture: the dependency table, the sizes of modules and functions, and forbidden words."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import rlsys
from tests.support.paths import PROJECT

PACKAGE = Path(rlsys.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FUNCTION, LONGEST_TEST_FILE = 60, 400
MOST_ROOMS = 16
MOST_LEVELS = 2
"""Largest number of levels of sub-packages below a room."""
ARROWS = {
    "errors": set(),
    "files": {"errors"},
    "components": {"errors"},
    "config": {"components", "errors", "files"},
    "algorithms": {"config", "errors"},
    "data": {"algorithms", "config", "errors", "files"},
    "weights": {"config", "errors", "files"},
    "observe": {"data", "config", "errors", "files"},
    "search": {"components", "errors", "files"},
    "rollout": {"search", "weights", "data", "config", "components", "errors", "files"},
    "trainer": {"observe", "weights", "data", "algorithms", "config", "errors", "files"},
    "cluster": {"rollout", "search", "observe", "weights", "data", "algorithms", "config", "errors", "files"},
    "orchestrator": {
        *("cluster", "trainer", "rollout", "search", "observe", "weights", "data", "algorithms", "config"),
        *("components", "errors", "files"),
    },
    "train": {"orchestrator", "observe", "config", "errors"},
    "report": {"rollout", "search", "observe", "data", "algorithms", "config", "errors", "files"},
    "apps": {
        *("report", "train", "orchestrator", "cluster", "trainer", "rollout", "search", "observe", "weights"),
        *("data", "config", "errors", "files"),
    },
}
"""Room -> rooms that it may import, inside functions too. The table in docs/architecture.md has the same content."""
HOME = {
    "megatron.core": {"trainer", "weights"},
    "sglang": {"rollout"},
    "ray": {"cluster"},
    "faiss": {"search"},
    "fastapi": {"apps", "report", "search"},
    "hydra": {"config"},
    "mcp": {"rollout", "search"},
}
"""Library -> the only rooms that may import it, inside functions too."""
PURE = ("algorithms", "data", "orchestrator.pipeline", "orchestrator.rewards", "rollout.agent")
HEAVY = ("ray", "megatron", "sglang", "transformer_engine")
"""Libraries that the pure packages must not load, either directly or through other modules."""


def module_name(file: Path) -> str:
    parts = ("rlsys", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imported(nodes: Iterator[ast.AST], package: str) -> set[str]:
    """Return the full names of imported modules; for `from a import b` both a and a.b."""
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
    """Yield the nodes that run on import: no function bodies and no imports for the type checker."""
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
def imported_anywhere(module: str) -> frozenset[str]:
    """Return the full names that `module` imports anywhere, also within functions."""
    return frozenset(imported(ast.walk(tree_of(module)), package_of(module)))


@cache
def imported_on_import(module: str) -> frozenset[str]:
    """Return the full names that importing `module` itself imports."""
    return frozenset(imported(at_module_level(tree_of(module)), package_of(module)))


@cache
def loads(module: str) -> frozenset[str]:
    """Return the names outside rlsys that importing `module` loads, directly or through rlsys."""
    seen, waiting, outside = set(), [module], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        waiting += [parent for parent in parents(current) if parent not in seen]
        for name in imported_on_import(current):
            if name in MODULES:
                waiting.append(name)
            elif not name.startswith("rlsys."):
                outside.add(name)
    return frozenset(outside)


def parents(module: str) -> list[str]:
    """Return the packages whose `__init__` runs before the module."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def belongs(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


@pytest.mark.parametrize("library", HOME)
def test_a_library_is_imported_only_by_its_rooms(library: str) -> None:
    users = set()
    for module in MODULES:
        if any(belongs(name, library) for name in imported_anywhere(module)):
            users.add(module)
    outsiders = {module for module in users if room_of(module) not in HOME[library]}
    assert outsiders == set()
    assert users, f"nothing imports {library}: the rule is out of date"


@pytest.mark.parametrize("package", PURE)
def test_a_pure_package_loads_nothing_heavy(package: str) -> None:
    modules = [module for module in MODULES if belongs(module, f"rlsys.{package}")]
    assert modules
    for module in modules:
        heavy = {name for name in loads(module) if any(belongs(name, library) for library in HEAVY)}
        assert heavy == set(), module


def test_an_answer_of_a_megatron_process_loads_no_megatron_in_the_driver() -> None:
    """Unpickling an answer imports the module of its class. Megatron imports W&B too, which makes temporary folders."""
    # Imported here: the other tests of this file read the code and import none of it.
    from rlsys.cluster.worker_group import STAGES
    from rlsys.trainer.actor import Actor, Critic
    from rlsys.trainer.log_prob import LogProbWorker

    called = {name for name in STAGES if not name.startswith(("sleep", "wake"))}
    answers: dict[type, str] = {}
    for worker in (Actor, Critic, LogProbWorker):
        for name, method in inspect.getmembers(worker, inspect.isfunction):
            if name in called:
                waiting = [get_type_hints(method)["return"]]
                while waiting:
                    hint = waiting.pop()
                    waiting += get_args(hint)
                    if getattr(hint, "__module__", "").startswith("rlsys."):
                        answers[hint] = hint.__module__
    assert {kind.__name__ for kind in answers} >= {"WriteStats", "OptimizerStep", "Accumulated", "LogProbs"}
    for module in answers.values():
        assert {name for name in loads(module) if belongs(name, "megatron")} == set(), module


def test_the_command_line_starts_without_heavy_libraries() -> None:
    """`rlsys --help` stays quick, and `rlsys doctor` can report that one of these libraries is missing."""
    needless = {"torch", "transformers", "httpx", "aiohttp", "faiss", *HEAVY}
    assert {name for name in loads("rlsys.apps.cli.main") if any(belongs(name, each) for each in needless)} == set()


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def neighbours(module: str) -> frozenset[str]:
    """Return the modules of rlsys that `module` imports anywhere, also within functions."""
    return frozenset(name for name in imported_anywhere(module) if name in MODULES) - {module, "rlsys"}


def test_rooms_are_those_of_the_table_and_few() -> None:
    rooms = {room_of(module) for module in MODULES if module != "rlsys"}
    assert rooms == set(ARROWS)
    assert len(rooms) <= MOST_ROOMS


def test_packages_are_not_nested_deeply() -> None:
    packages = {module for module, file in MODULES.items() if file.name == "__init__.py"}
    # The stand-ins have the same layout as the packages that they replace.
    deep = {name for name in packages if name.count(".") > 1 + MOST_LEVELS and ".cpu_standins." not in name}
    assert deep == set()


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_what_the_table_says(room: str) -> None:
    found = {
        (module, name)
        for module in MODULES
        if room_of(module) == room
        for name in neighbours(module)
        if room_of(name) not in ARROWS[room] | {room}
    }
    assert found == set()


def test_the_dependency_table_has_no_cycle_and_no_unused_arrow() -> None:
    used = {(room_of(module), room_of(name)) for module in MODULES for name in neighbours(module)}
    rooms = list(ARROWS)
    for room, targets in ARROWS.items():
        assert all(rooms.index(target) < rooms.index(room) for target in targets), room
    idle = {(room, target) for room, targets in ARROWS.items() for target in targets} - used
    assert {(room, target) for room, target in idle if target not in ("errors", "files")} == set()


def test_no_sub_packages_import_each_other() -> None:
    packages = {name for name in (package_of(module) for module in MODULES) if name.count(".") >= 2}

    def home(module: str) -> str:
        return max((name for name in packages if belongs(module, name)), key=len, default="")

    arrows = {(home(module), home(name)) for module in MODULES for name in neighbours(module)}
    both = {(a, b) for a, b in arrows if a < b and (b, a) in arrows and a and b}
    assert both == set()


def test_heavy_imports_are_found_through_a_chain() -> None:
    """Proves that `loads` finds a heavy import, in a module that may have one."""
    assert any(belongs(name, "ray") for name in loads("rlsys.orchestrator.run"))
    assert not any(belongs(name, "ray") for name in loads("rlsys.apps.cli.main")), "a plan would wait for Ray"


def test_modules_have_no_import_cycle() -> None:
    arrows = {}
    for module in MODULES:
        arrows[module] = {name for name in imported_on_import(module) if name in MODULES} - {module, "rlsys"}
    while arrows:
        leaves = {module for module, targets in arrows.items() if not targets & set(arrows)}
        assert leaves, f"a circle within {sorted(arrows)}"
        arrows = {module: targets for module, targets in arrows.items() if module not in leaves}


def test_functions_are_short() -> None:
    long = {}
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
                    long[f"{module}:{node.name}"] = lines
    assert long == {}


def test_test_files_are_short() -> None:
    lengths = {str(file): len(file.read_text().splitlines()) for file in Path(__file__).parent.rglob("*.py")}
    assert {file: length for file, length in lengths.items() if length > LONGEST_TEST_FILE} == {}


def test_no_module_imports_from_a_test_file() -> None:
    """Except scripts/models_reference.py, which documents the cases in the tests' tables."""
    folders = ("bench", "examples", "scripts", "tests")
    files = [file for folder in folders for file in (PROJECT / folder).rglob("*.py")]
    names = {file: ".".join(file.relative_to(PROJECT).with_suffix("").parts) for file in files}
    tests = {name for file, name in names.items() if file.name.startswith("test_")}
    assert len(tests) > 100
    found = {}
    for file, name in names.items():
        taken = imported(ast.walk(ast.parse(file.read_text())), name.rpartition(".")[0]) & tests
        if taken and name != "scripts.models_reference":
            found[name] = taken
    assert found == {}


def test_every_module_has_a_docstring() -> None:
    assert [
        module for module in MODULES if package_of(module) != module and not ast.get_docstring(tree_of(module))
    ] == []


def test_the_code_has_no_todo_marks() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [str(file) for file in FILES if marks.search(file.read_text())] == []
