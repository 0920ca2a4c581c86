"""The API's arguments as settings: what a person would type for `rlsys train`, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rlsys.apps.api.arguments import Given, compose_settings, of_batch, of_devices, of_reward, quoted
from rlsys.config.compose import load_config
from rlsys.errors import Code
from tests.support.refusals import refused

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
ODD = st.text(st.sampled_from("a/ .,:=\\'\"${}[]()%#&~+-0null"), max_size=12)
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)


@given(TEXT | ODD | NUMBER | st.booleans() | st.none() | st.lists(NUMBER | ODD, max_size=3))
@example("\\${")
@example("a\\\\${b}\\")
def test_any_value_comes_back_from_hydra_and_omegaconf_as_it_was(value: Any) -> None:
    parsed = OverridesParser.create().parse_override(f"key={quoted(value)}").value()
    found = OmegaConf.to_container(OmegaConf.create({"key": parsed}))
    assert isinstance(found, dict)
    assert found["key"] == value
    assert type(found["key"]) is type(value)


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("trainer.steps", "trainer.steps=4"),
        ("trainer.steps", "trainer={steps: 9}"),
        ("model.path", "model={path: b}"),
        ("cluster.placement.actor", "++cluster.placement={actor: 0-3}"),
    ],
)
def test_a_setting_that_is_given_twice_is_refused_also_by_a_section_around_it(key: str, override: str) -> None:
    with refused("conflict", "mine"):
        compose_settings("x", [Given("mine", {key: 1})], [override])


def test_settings_of_one_run_alone_are_not_handed_on() -> None:
    search = Given("search_backend", {"search.url": "http://a:1", "search.token_env": "T"}, passing=True)
    made = compose_settings("x", [Given("name", {"name": "n"}), search], ["search.timeout_s=77"])
    assert made.lasting == ("name=n", "search.timeout_s=77")
    assert made.overrides == ("name=n", "search.url='http://a:1'", "search.token_env=T", "search.timeout_s=77")


@pytest.mark.parametrize("batch", [8.0, True, 0])
def test_a_batch_that_is_no_count_is_refused(batch: Any) -> None:
    with refused("out_of_range", "batch_size"):
        of_batch(batch, 4)


@pytest.mark.parametrize(
    ("devices", "actor", "inference", "rollout"),
    [
        ([5, 4], "4-5", "4-5", "4-5"),
        (3, "0", "1", "2"),
        ([0, 2, 3, 6], "0,2", "3", "6"),
        (16, "0-7", "8-9", "10-15"),
    ],
)
def test_devices_are_dealt_to_the_groups(devices: Any, actor: str, inference: str, rollout: str) -> None:
    config = load_config("searchr1_qwen2.5_3b_1node", [f"{k}={quoted(v)}" for k, v in of_devices(devices).items()])
    assert config.cluster.placement == {"actor": actor, "inference": inference, "rollout": rollout}
    assert (config.trainer.schedule.kind == "sequential") == (config.cluster.mode == "collocated")


@pytest.mark.parametrize("devices", [0, True, [0, 0], [-1], ["0"], "gpu"])
def test_devices_that_are_none_are_refused(devices: Any) -> None:
    with refused("out_of_range", "devices"):
        of_devices(devices)


def test_a_reward_has_terms_and_keys() -> None:
    given_ = {"exact_match": 1.0, "format": 0.5, "structure_score": 0.3, "tests.support.tiny_models.even_tokens": 0.1}
    overrides = [f"{k}={quoted(v)}" for k, v in of_reward(given_ | {"judge": {"retries": 2}}).items()]
    reward = load_config("searchr1_tiny_cpu", overrides).reward
    assert reward.terms == {"exact_match": 1.0, "format": 0.5, "tests.support.tiny_models.even_tokens": 0.1}
    assert (reward.structure_score, reward.judge.retries) == (0.3, 2)
    assert of_reward({"terms": {"f1": 1}}) == {"reward.terms.f1": 1}


@pytest.mark.parametrize(
    ("reward", "code", "key"),
    [
        ({"exact_match": "much"}, "unknown", ": exact_match"),
        ({"judge": 3}, "wrong_type", ": judge"),
        (["exact_match"], "wrong_type", ""),
        ({"judge": {"uri": "x"}}, "unknown", ": judge.uri"),
    ],
)
def test_a_reward_that_is_none_is_refused(reward: Any, code: Code, key: str) -> None:
    with refused(code, "reward_config" + key):
        of_reward(reward)
