"""Tests of reward terms from one file outside of rlsys, with parameters, chosen by config."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlsys.config.compose import as_dict, recorded, typed
from rlsys.config.schema import RunConfig
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


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "terms_of_mine.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)


def rewards_of(terms: str) -> Rewards:
    run = composed(f"reward.terms={terms}")
    return Rewards(run.reward, run.task, run.compat)


def score(terms: str, *said: str) -> float:
    async def scored() -> float:
        rewards = rewards_of(terms)
        reading = read(episode(*said), "Bamako")
        found = await rewards.score(reading.question, reading.trajectory)
        await rewards.close()
        return found.reward

    return asyncio.run(scored())


SEARCHES = ((think("search", "Mali"), "Bamako"), (think("search", "Chad"), "Ndjamena"), think("answer", "Bamako"))


def test_parameters_stand_beside_the_weight() -> None:
    terms = "{exact_match: 1, terms_of_mine.length: {weight: 0.5, limit: 2, scale: 3}}"
    run = composed(f"reward.terms={terms}")
    assert weights_of(run.reward) == {"exact_match": 1.0, "terms_of_mine.length": 0.5}
    assert score(terms, *SEARCHES) == 1.0 + 0.5 * 3 * 2
    assert typed(recorded(as_dict(run)), RunConfig) == run


@pytest.mark.parametrize(
    ("terms", "code", "key"),
    [
        ("{terms_of_mine.length: 1}", "missing", "reward.terms.terms_of_mine.length"),
        ("{terms_of_mine.length: {weight: 1}}", "missing", "reward.terms.terms_of_mine.length.limit"),
        ("{terms_of_mine.length: {limit: many}}", "wrong_type", "reward.terms.terms_of_mine.length.limit"),
        ("{terms_of_mine.length: {limit: 1, size: 1}}", "unknown", "reward.terms.terms_of_mine.length.size"),
        ("{terms_of_mine.width: {limit: 1}}", "unknown", "reward.terms.terms_of_mine.width"),
        ("{exact_match: {weight: 1}}", "wrong_type", "reward.terms.exact_match"),
        (f"{{{EXAMPLE}: {{weight: -0.1, budget: -1}}}}", "out_of_range", f"reward.terms.{EXAMPLE}.budget"),
    ],
)
def test_parameter_that_is_wrong_or_missing_is_refused(terms: str, code: Code, key: str) -> None:
    with refused(code, key):
        rewards_of(terms)


def test_example_counts_searches_above_its_budget() -> None:
    for budget, expected in ((0, 0.8), (1, 0.9), (2, 1.0)):
        terms = f"{{exact_match: 1, {EXAMPLE}: {{weight: -0.1, budget: {budget}}}}}"
        assert score(terms, *SEARCHES) == pytest.approx(expected)
