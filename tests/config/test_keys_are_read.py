"""No dead options: every key of the schema is read by the code that runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlsys.config.schema import RunConfig
from scripts.config_reference import Read, fields_read, running_code, schema_classes


def leaves(schema: type) -> set[Read]:
    """Every key but those that choose a class, which the reader of the schema asks for."""
    classes = schema_classes(schema)
    parts = {*classes, "Literal"}
    return {
        (owner, name)
        for owner, types in classes.items()
        for name, kind in types.items()
        if not parts & {*kind.split("|")}
    }


def test_every_key_is_read_outside_of_the_config_package() -> None:
    unread = leaves(RunConfig) - fields_read(running_code(), schema_classes(RunConfig)).keys()
    assert not unread


@dataclass
class Inner:
    """Part of a planted schema."""

    used: int = 1
    name: str = ""


@dataclass
class Left:
    """One kind."""

    kind: Literal["left"] = "left"
    left: int = 1


@dataclass
class Right:
    """Another kind."""

    kind: Literal["right"] = "right"
    right: int = 1


@dataclass
class Planted:
    """A schema of which nobody reads `Inner.name` and `Right.right`."""

    inner: Inner = field(default_factory=Inner)
    choice: Left | Right = field(default_factory=Left)
    name: str = ""


def test_a_key_that_nothing_reads_is_found() -> None:
    code = """
class Keeper:
    def __init__(self, config: Planted, path: Path) -> None:
        self._config = config
        config.inner.name = "written, not read"

    def work(self) -> None:
        inner, text = replace(self._config.inner, name="given"), self._config.name
        print(inner.used, self.path.name, other.inner.name)
        print(self._config.choice.left)
"""
    assert leaves(Planted) - fields_read({"code.py": code}, schema_classes(Planted)).keys() == {
        ("Inner", "name"),
        ("Right", "right"),
    }
