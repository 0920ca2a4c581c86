"""Configs compose from files, groups and the command line; bad YAML and bad overrides are refused by their key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlsys.config.compose import load_config
from rlsys.config.schema import Device, Dtype, RunConfig, TokenMode
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
