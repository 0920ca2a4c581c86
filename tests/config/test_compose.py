"""Configs compose from files, groups and the command line; bad YAML and bad overrides are refused by their key."""

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
from rlsys.config.schema import (
    AsyncSchedule,
    Device,
    Dtype,
    OnUpdate,
    PipelinedSchedule,
    RunConfig,
    SequentialSchedule,
    TokenMode,
)
from rlsys.errors import Code
from tests.support.refusals import refused

NAME = "searchr1_tiny_cpu"


@pytest.mark.parametrize(
    ("override", "code", "key"),
    [
        ("trainer.stepz=5", "unknown", "trainer.stepz"),
        ("++algoritm.kl_coef=0", "unknown", "algoritm"),
        ("actor.parallel={tpp: 2}", "unknown", "actor.parallel.tpp"),
        ("trainer.steps=1.5", "wrong_type", "trainer.steps"),
        ("trainer.steps=null", "wrong_type", "trainer.steps"),
        ("model.recompute=maybe", "wrong_type", "model.recompute"),
        ("actor.parallel.pp_layers=[two]", "wrong_type", "actor.parallel.pp_layers[0]"),
        ("actor.parallel=3", "wrong_type", "actor.parallel"),
        ("cluster.placement=3", "wrong_type", "cluster.placement"),
        ("model.dtype=float64", "unknown", "model.dtype"),
        ("model=nope", "unknown", "model"),
        ("trainer.seed=${nowhere}", "malformed", "trainer.seed"),
        ("trainer.steps=[1", "malformed", "trainer.steps=[1"),
        ("trainer steps=3", "malformed", "trainer steps=3"),
        ("hydra.run.dir=there", "malformed", "hydra.run.dir=there"),
        ("trainer.steps=1,2", "unsupported", "trainer.steps"),
        ("~trainer.steps", "unsupported", "trainer.steps"),
        ("task.train_path=???", "missing", "task.train_path"),
    ],
)
def test_a_bad_override_is_refused_by_its_key(override: str, code: Code, key: str) -> None:
    with refused(code, key) as caught:
        load_config(NAME, [override])
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_answered_with_those_that_are_known(tmp_path: Path) -> None:
    with refused("unknown", "--config-name") as caught:
        load_config("searchr1_huge")
    assert NAME in str(caught.value)
    with refused("unknown", "optimizer") as caught:
        load_config(NAME, ["optimizer.lr=1"])
    assert "actor.optimizer.lr" in str(caught.value)
    with refused("not_found", "--config-name"):
        load_config(str(tmp_path / "no such.yaml"))


@pytest.mark.parametrize(
    ("yaml", "code", "key"),
    [
        ("defaults: [rlsys_schema, _self_]\ntrainer: {steps: 3}\n", "missing", "model.path"),
        ("defaults: [rlsys_schema, _self_]\ntrainer: {step: 3}\n", "unknown", "trainer.step"),
        ("defaults: [rlsys_schema, _self_]\ntrainer: {steps: many}\n", "wrong_type", "trainer.steps"),
        ("defaults: [rlsys_schema, _self_]\ntrainer: {steps: [}\n", "malformed", None),
        ("defaults: [rlsys_schema, other, _self_]\n", "not_found", None),
        ("defaults: 3\n", "malformed", None),
        ("trainer: {steps: 3}\n", "malformed", None),
        ("", "malformed", None),
    ],
)
def test_a_mistake_in_the_file_is_refused_by_its_key_or_the_file(
    tmp_path: Path, yaml: str, code: Code, key: str | None
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(yaml)
    with refused(code, key or file) as caught:
        load_config("bad", (), tmp_path)
    assert "\n" not in str(caught.value)


def test_values_arrive_typed_from_file_group_and_command_line() -> None:
    config = load_config(
        NAME, ["trainer.steps=7", "task.token_mode=append", "actor.parallel.pp_layers=[1,3]", 'name="a b"']
    )
    assert (config.trainer.steps, config.name) == (7, "a b")  # the command line
    assert config.task.token_mode is TokenMode.append
    assert config.actor.parallel.pp_layers == [1, 3]
    assert config.algorithm.n_samples == 8  # the file
    assert config.model.dtype is Dtype.float32  # its profile, which is applied globally
    assert config.cluster.placement == {"actor": "0", "inference": "1", "rollout": "2"}  # a group
    assert config.trainer.seed == 1234  # the schema
    # Nothing of it reaches the next.
    assert load_config("searchr1_qwen2.5_3b_1node").cluster.device is Device.gpu
    assert load_config(NAME).trainer.steps != 7


def test_a_config_of_ones_own_builds_on_the_projects_from_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "my configs" / "mine.v2.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [searchr1_tiny_cpu, override algorithm: rloo, _self_]\nname: mine\n")
    config = load_config(str(file), ["trainer.steps=3"])
    assert (config.name, config.trainer.steps, config.cluster.device) == ("mine", 3, Device.cpu)
    assert config.algorithm.baseline == "leave_one_out"


def test_the_tiny_run_of_these_tests_is_what_hydra_composes(
    tiny_run: Callable[..., RunConfig], files: list[str]
) -> None:
    overrides = ["algorithm=ppo", "cluster.placement={critic: 3}", "reward.terms={f1: 0.5}", "search.index=no"]
    assert tiny_run(*overrides) == load_config(NAME, [*files, *overrides])


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
