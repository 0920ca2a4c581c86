"""The pins fit together, and the check would see it if they did not."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from packaging.version import Version

from tests.support.paths import PROJECT

DOCKER = PROJECT / "docker"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_pins", DOCKER / "check_pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_pins"] = module  # A dataclass looks its module up.
    spec.loader.exec_module(module)
    return module


def test_all_pins_fit_together(check: ModuleType) -> None:
    record = check.json.loads(check.RECORD.read_text())
    assert list(check.find_problems(record)) == []


def toy(check: ModuleType, pins: dict[str, str], requires: dict[str, list[str]], **options: object) -> list[str]:
    pinned = check.PinnedSet("toy", (), "3.12", "Dockerfile.gpu", **options)
    return list(check.unfit(pinned, {name: Version(version) for name, version in pins.items()}, requires))


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        (["B == 2.0rc1"], []),
        (["b<1.5"], ["toy: a needs b<1.5, and b==2.0rc1 is pinned."]),
        (["c"], ["toy: a needs c, and no c is pinned."]),
        (['c; sys_platform == "win32"'], []),
        (['c; extra == "all"'], []),
        (["b[fast]"], ["toy: b needs c>3; extra == 'fast', and no c is pinned."]),
    ],
)
def test_a_requirement_is_met_or_told(check: ModuleType, needs: list[str], told: list[str]) -> None:
    """By hand: a==1 needs something, b==2.0rc1 needs c with its extra `fast` alone."""
    requires = {"a==1": needs, "b==2.0rc1": ["c>3; extra == 'fast'"]}
    assert toy(check, {"a": "1", "b": "2.0rc1"}, requires) == told


def test_unknown_requirements_are_told_and_those_of_what_is_installed_alone_are_not_followed(check: ModuleType) -> None:
    (told,) = toy(check, {"a": "2"}, {"a==1": []})
    assert "requirements of a==2 are not in requires.json" in told
    assert toy(check, {"a": "1"}, {"a==1": ["c"]}, alone=("a",)) == []
