"""No dead options: every key of the schema is read by the code that runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlsys.config.schema import RunConfig
from scripts.config_reference import Read, fields_read, running_code, schema_classes


def leaves(schema: type) -> set[Read]:
    classes = schema_classes(schema)
    return {(owner, name) for owner, types in classes.items() for name, kind in types.items() if kind not in classes}


def test_every_key_is_read_outside_of_the_config_package() -> None:
    unread = leaves(RunConfig) - fields_read(running_code(), schema_classes(RunConfig)).keys()
    assert not unread


@dataclass
class Inner:
    """Part of a planted schema."""

    used: int = 1
    name: str = ""


@dataclass
class Planted:
    """A planted schema, of which `Inner.name` is read nowhere."""

    inner: Inner = field(default_factory=Inner)
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
"""
    assert leaves(Planted) - fields_read({"code.py": code}, schema_classes(Planted)).keys() == {("Inner", "name")}


def test_a_key_added_to_the_schema_is_unread_until_something_reads_it() -> None:
    classes = schema_classes(RunConfig)
    classes["TrainerConfig"]["entropy_bonus"] = "float"
    added = ("TrainerConfig", "entropy_bonus")
    assert added not in fields_read(running_code(), classes)
    reader = "def use(config: RunConfig) -> float:\n    return config.trainer.entropy_bonus\n"
    assert fields_read(running_code() | {"new.py": reader}, classes)[added] == ("new.py",)
