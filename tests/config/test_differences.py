"""A run that goes on learns as before; its place and speed may change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml

from rlsys.config.compose import KeyDifference, as_dict, differences
from rlsys.config.schema import RunConfig

TinyRun = Callable[..., RunConfig]


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.kl_coef=0.5",
        "actor.optimizer.lr=1e-7",
        "critic.value_clip=0.1",
        "trainer.prompts_per_step=16",
        "task.tags.search=find",
        "reward.terms={exact_match: 2.0}",
        "rollout.sampling.temperature=0.7",
        "search.topk=5",
    ],
)
def test_settings_that_a_run_learns_by_must_stay(tiny_run: TinyRun, setting: str) -> None:
    key, _, value = setting.partition("=")
    key += ".exact_match" if value.startswith("{") else ""
    assert [one.key for one in differences(as_dict(tiny_run()), tiny_run(setting))] == [key]


def test_settings_of_place_and_speed_may_change(tiny_run: TinyRun) -> None:
    changed = tiny_run(
        "trainer.steps=99",
        "actor.parallel.tp=2",
        "actor.micro_batch_tokens=4096",
        "cluster.placement={actor: '0-1', inference: '2', rollout: '3'}",
        "search.url=http://127.0.0.1:9000",
        "eval.interval=9",
        "checkpoint.keep_last=1",
        "tracking.wandb=false",
        "model.recompute=true",
        "task.train_path=elsewhere.jsonl",
        "resume=auto",
    )
    assert differences(as_dict(tiny_run()), changed) == []


@pytest.mark.parametrize("shape", ["actor.optimizer.decay=cosine", "critic.optimizer.warmup_fraction=0.1"])
def test_the_end_must_stay_where_the_rate_knows_it(tiny_run: TinyRun, shape: str) -> None:
    before = as_dict(tiny_run(shape))
    assert [one.key for one in differences(before, tiny_run(shape, "trainer.steps=99"))] == ["trainer.steps"]


def test_a_key_that_came_or_went_is_compared_with_its_default(tiny_run: TinyRun) -> None:
    before = as_dict(tiny_run("search.enabled=true"))
    del before["task"]["tools"], before["search"]["enabled"], before["algorithm"]["kl_coef"]
    before["algorithm"]["old_key"] = 1
    found = differences(before, tiny_run("search.enabled=false", "algorithm.kl_coef=0.5"))
    assert [one.key for one in found] == ["algorithm.kl_coef", "algorithm.old_key", "search.enabled"]
    assert found[2] == KeyDifference("search.enabled", True, False)


def test_a_config_read_back_from_a_file_is_the_same(tiny_run: TinyRun) -> None:
    config = tiny_run()
    assert differences(yaml.safe_load(yaml.safe_dump(as_dict(config))), config) == []
