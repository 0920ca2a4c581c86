"""Tests of reward terms from one file outside of rlsys, with parameters, chosen by config."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlsys.config.compose import as_dict, recorded, typed
from rlsys.config.schema import CompatConfig, RewardConfig, RunConfig
from rlsys.errors import Code
from rlsys.orchestrator.rewards.reward import Rewards, weights_of
from tests.support.composed import composed
from tests.support.refusals import refused
from tests.support.written_episodes import episode, read, think

FILE = """
def length(question, trajectory, *, limit: int, scale: float = 1.0):
    return scale * min(limit, len(trajectory.turns))
"""
EXAMPLE = "examples.extend.reward.searches_above"


def config_of(folder: Path, terms: str) -> RunConfig:
    paths = (f"{key}={folder}" for key in ("model.path", "task.train_path", "task.eval_path"))
    return composed(*paths, f"reward.terms={terms}")


def score(config: RewardConfig, *said: str) -> float:
    async def scored() -> float:
        rewards = Rewards(config, RunConfig().task, CompatConfig())
        reading = read(episode(*said), "Bamako")
        found = await rewards.score(reading.question, reading.trajectory)
        await rewards.close()
        return found.reward

    return asyncio.run(scored())


SEARCHES = ((think("search", "Mali"), "Bamako"), (think("search", "Chad"), "Ndjamena"), think("answer", "Bamako"))


def test_parameters_stand_beside_the_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "terms_of_mine.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    run = config_of(tmp_path, "{exact_match: 1, terms_of_mine.length: {weight: 0.5, limit: 2, scale: 3}}")
    assert weights_of(run.reward) == {"exact_match": 1.0, "terms_of_mine.length": 0.5}
    assert score(run.reward, *SEARCHES) == 1.0 + 0.5 * 3 * 2
    assert typed(recorded(as_dict(run)), RunConfig) == run


@pytest.mark.parametrize(
    ("terms", "code", "key"),
    [
        ("{terms_of_mine.length: {weight: 1}}", "missing", "reward.terms.terms_of_mine.length.limit"),
        ("{terms_of_mine.length: {limit: many}}", "wrong_type", "reward.terms.terms_of_mine.length.limit"),
        ("{terms_of_mine.length: {limit: 1, size: 1}}", "unknown", "reward.terms.terms_of_mine.length.size"),
        ("{terms_of_mine.width: {limit: 1}}", "unknown", "reward.terms.terms_of_mine.width"),
        ("{exact_match: {weight: 1}}", "wrong_type", "reward.terms.exact_match"),
    ],
)
def test_parameter_that_is_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terms: str, code: Code, key: str
) -> None:
    (tmp_path / "terms_of_mine.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    with refused(code, key):
        config_of(tmp_path, terms)


def test_weight_alone_needs_every_parameter_to_have_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "terms_of_mine.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    with refused("missing", "reward.terms.terms_of_mine.length"):
        Rewards(config_of(tmp_path, "{terms_of_mine.length: 1}").reward, RunConfig().task, CompatConfig())


def test_example_counts_searches_above_its_budget(tmp_path: Path) -> None:
    for budget, expected in ((0, 0.8), (1, 0.9), (2, 1.0)):
        run = config_of(tmp_path, f"{{exact_match: 1, {EXAMPLE}: {{weight: -0.1, budget: {budget}}}}}")
        assert score(run.reward, *SEARCHES) == pytest.approx(expected)
    with refused("out_of_range", f"reward.terms.{EXAMPLE}.budget"):
        config_of(tmp_path, f"{{{EXAMPLE}: {{weight: -0.1, budget: -1}}}}")
