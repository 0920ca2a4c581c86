"""A run that goes on learns as before; its place and speed may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlsys.config.compose import KeyDifference, as_dict, differences, recorded
from rlsys.config.schema import AsyncSchedule, PipelinedSchedule, RunConfig, SequentialSchedule, TrainerConfig

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


def test_another_kind_is_a_difference() -> None:
    now = RunConfig(trainer=TrainerConfig(schedule=AsyncSchedule(max_staleness=2)))
    changed = {one.key: (one.before, one.now) for one in differences(as_dict(RunConfig()), now)}
    assert changed == {
        "trainer.schedule.kind": ("pipelined", "async"),
        "trainer.schedule.max_staleness": (None, 2),
        "trainer.schedule.on_update": (None, "finish"),
    }


@pytest.mark.parametrize(
    "schedule", [SequentialSchedule(), PipelinedSchedule(), AsyncSchedule(max_staleness=0)], ids=lambda one: one.kind
)
def test_an_old_record_with_keys_of_every_kind_is_no_difference(schedule: Any) -> None:
    """Earlier versions wrote all three keys of a schedule, and none of the keys that came later."""
    now = RunConfig(trainer=TrainerConfig(schedule=schedule))
    old = as_dict(now)
    old["trainer"]["schedule"] = {"max_staleness": 7, "on_update": "finish", **old["trainer"]["schedule"]}
    del old["actor"]["optimizer"]["kind"], old["rollout"]["engine"]["kind"], old["task"]["tools"]
    assert recorded(old) == as_dict(now)
    assert differences(old, now) == []
