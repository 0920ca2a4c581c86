"""What may differ when a run goes on, and what may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlsys.config.compose import KeyDifference, as_dict, differences
from rlsys.config.schema import RunConfig


@pytest.mark.parametrize(
    ("setting", "keys"),
    [
        ("algorithm.kl_coef=0.5", ["algorithm.kl_coef"]),
        ("algorithm.correction.kind=mask", ["algorithm.correction.kind"]),
        ("actor.optimizer.lr=1e-7", ["actor.optimizer.lr"]),
        ("trainer.seed=7", ["trainer.seed"]),
        ("trainer.prompts_per_step=16", ["trainer.prompts_per_step"]),
        ("task.max_turns=2", ["task.max_turns"]),
        ("task.tags.search=find", ["task.tags.search"]),
        ("reward.terms={exact_match: 2.0}", ["reward.terms.exact_match"]),
        ("rollout.sampling.temperature=0.7", ["rollout.sampling.temperature"]),
        ("search.topk=5", ["search.topk"]),
        ("search.enabled=false", ["search.enabled"]),
        ("task.tools=[rlsys.rollout.tools.calculator.Calculator]", ["task.tools"]),
        ("trainer.steps=99", []),
        ("actor.parallel.tp=2", []),
        ("actor.micro_batch_tokens=4096", []),
        ("actor.optimizer.distributed=false", ["actor.optimizer.distributed"]),
        ("cluster.placement={actor: '0-1', inference: '2', rollout: '3'}", []),
        ("search.url=http://127.0.0.1:9000", []),
        ("eval.interval=9", []),
        ("checkpoint.keep_last=1", []),
        ("tracking.wandb=false", []),
        ("model.recompute=true", []),
        ("resume=auto", []),
    ],
)
def test_what_a_run_learns_by_must_stay(tiny_run: Callable[..., RunConfig], setting: str, keys: list[str]) -> None:
    before = as_dict(tiny_run())
    assert [one.key for one in differences(before, tiny_run(setting))] == keys


def test_both_values_are_told(tiny_run: Callable[..., RunConfig]) -> None:
    found = differences(as_dict(tiny_run()), tiny_run("trainer.seed=7"))
    assert found == [KeyDifference("trainer.seed", 1234, 7)]


@pytest.mark.parametrize("shape", ["actor.optimizer.decay=cosine", "critic.optimizer.warmup_fraction=0.1"])
def test_the_end_must_stay_where_the_rate_knows_it(tiny_run: Callable[..., RunConfig], shape: str) -> None:
    before = as_dict(tiny_run(shape))
    assert [one.key for one in differences(before, tiny_run(shape, "trainer.steps=99"))] == ["trainer.steps"]


def test_a_key_that_came_with_another_value_or_went_is_a_difference(
    tiny_run: Callable[..., RunConfig],
) -> None:
    config = tiny_run("algorithm.kl_coef=0.5")
    before: dict[str, Any] = as_dict(config)
    del before["algorithm"]["kl_coef"]
    before["algorithm"]["old_key"] = 1
    assert [one.key for one in differences(before, config)] == ["algorithm.kl_coef", "algorithm.old_key"]


def test_a_key_that_an_older_version_did_not_have_was_its_default(
    tiny_run: Callable[..., RunConfig],
) -> None:
    before = as_dict(tiny_run())
    del before["task"]["tools"], before["search"]["enabled"]
    assert differences(before, tiny_run()) == []
    (found,) = differences(before, tiny_run("search.enabled=false"))
    assert found == KeyDifference("search.enabled", True, False)


def test_what_was_read_back_from_a_file_is_the_same(tiny_run: Callable[..., RunConfig]) -> None:
    import yaml

    config = tiny_run()
    assert differences(yaml.safe_load(yaml.safe_dump(as_dict(config))), config) == []
