"""Keys that belong to one kind: who may set them, what falls away, what old records say of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsys.config.compose import as_dict, load_config, typed
from rlsys.config.schema import AsyncSchedule, OnUpdate, PipelinedSchedule, RunConfig, SequentialSchedule
from rlsys.errors import Code
from tests.support.refusals import refused

ASYNC = {"kind": "async", "max_staleness": 4, "on_update": "continue"}
FOUR = AsyncSchedule("async", 4, OnUpdate("continue"))
Composed = Callable[..., Any]


@pytest.fixture
def composed(tmp_path: Path) -> Composed:
    """The schedule of `mine`, a file over `beneath`, with overrides."""

    def compose(mine: dict[str, Any], beneath: dict[str, Any], *overrides: str) -> Any:
        files = {"beneath": ("searchr1_tiny_cpu", beneath), "mine": ("beneath", mine)}
        for name, (base, schedule) in files.items():
            tree = {"defaults": [base, "_self_"], "trainer": {"schedule": schedule}}
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        return load_config("mine", overrides, tmp_path).trainer.schedule

    return compose


@pytest.mark.parametrize(
    ("mine", "beneath", "overrides", "expected"),
    [
        (ASYNC, {}, (), FOUR),
        (ASYNC, {}, ("trainer.schedule.kind=pipelined",), PipelinedSchedule()),
        ({}, ASYNC, ("trainer.schedule={kind: sequential}",), SequentialSchedule()),
        ({"kind": "sequential"}, ASYNC, ("trainer.schedule.kind=async",), FOUR),
        (ASYNC, {}, ("trainer.schedule.max_staleness='2'",), AsyncSchedule("async", 2, FOUR.on_update)),
        ({"max_staleness": 2}, {"kind": "async"}, (), AsyncSchedule("async", 2)),
    ],
)
def test_a_kind_takes_its_own_keys_and_leaves_others_beneath_it(
    composed: Composed, mine: dict[str, Any], beneath: dict[str, Any], overrides: tuple[str, ...], expected: Any
) -> None:
    assert composed(mine, beneath, *overrides) == expected


STALENESS, KIND = "trainer.schedule.max_staleness", "trainer.schedule.kind"


@pytest.mark.parametrize(
    ("mine", "beneath", "overrides", "code", "key"),
    [
        ({}, {}, (f"{STALENESS}=4",), "conflict", STALENESS),
        (ASYNC, {}, ("trainer.schedule={kind: sequential, max_staleness: 4}",), "conflict", STALENESS),
        ({"kind": "pipelined", "max_staleness": 4}, {}, (), "conflict", STALENESS),
        ({"max_staleness": 4}, {"kind": "pipelined"}, (), "conflict", STALENESS),
        ({}, {}, (f"{KIND}=asnyc",), "unknown", KIND),
        ({}, {}, ("trainer.schedule=async",), "wrong_type", "trainer.schedule"),
    ],
)
def test_keys_of_other_kinds_are_refused(
    composed: Composed, mine: dict[str, Any], beneath: dict[str, Any], overrides: tuple[str, ...], code: Code, key: str
) -> None:
    with refused(code, key):
        composed(mine, beneath, *overrides)


def test_a_record_of_a_run_is_no_config_to_begin_from(tmp_path: Path) -> None:
    (tmp_path / "record.yaml").write_text(yaml.safe_dump(as_dict(RunConfig())))
    with refused("malformed", tmp_path / "record.yaml"):
        load_config("record", (), tmp_path)


@dataclass
class Plain:
    """One field of each plain type."""

    whole: int = 1
    number: float = 1.0
    text: str = ""
    truth: bool = False


@given(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5))
@settings(max_examples=50)
def test_plain_values_are_taken_as_omegaconf_takes_them(value: Any) -> None:
    for name, hint in (("whole", int), ("number", float), ("text", str), ("truth", bool)):
        try:
            merged: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Plain), {name: value}))
        except OmegaConfBaseException:
            with refused("wrong_type", "key"):
                typed(value, hint, "key")
        else:
            expected, got = getattr(merged, name), typed(value, hint, "key")
            assert (got, type(got)) == (expected, type(expected)) or got != got
