"""Tests that an episode is rewarded by the terms of its question's source."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from rlsys.config.schema import CompatConfig, RewardConfig, SourceConfig
from rlsys.errors import Code
from rlsys.orchestrator.rewards.reward import Rewards, check_weights
from rlsys.rollout.tools.interface import named_tools
from tests.orchestrator.rewards import own_terms
from tests.support.refusals import refused
from tests.support.written_episodes import episode, question, task_of, think

CALCULATOR = "rlsys.rollout.tools.calculator.Calculator"
PER_TURN = f"{own_terms.__name__}.per_turn"
SEARCH, RIGHT = (think("search", "capital of Mali"), "Bamako"), think("answer", "Bamako")
SUM = (think("calculator", "1+1"), "2")
TASK = task_of(
    sources={
        "plain": SourceConfig(),
        "shaped": SourceConfig(reward={"format": 2.0, "search_penalty": -0.5}),
        "own": SourceConfig(reward={PER_TURN: 1.0}),
        "sums": SourceConfig(reward={"invalid_format": -1.0}, tools=named_tools([CALCULATOR])),
        "short": SourceConfig(reward={"overlong": -1.0}, max_total_tokens=20),
        "long": SourceConfig(reward={"overlong": -1.0}),
    },
    max_prompt_tokens=5,
    max_total_tokens=2000,
)
REWARD = RewardConfig(terms={"exact_match": 1.0}, structure_score=0.25, overlong_buffer=10)


@asynccontextmanager
async def rewards() -> AsyncIterator[Rewards]:
    made = Rewards(REWARD, TASK, CompatConfig())
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("source", "reward", "parts"),
    [
        ("", 1.0, {"exact_match": 1.0}),
        ("plain", 1.0, {"exact_match": 1.0}),
        ("shaped", 1.5, {"format": 1.0, "search_penalty": 1.0}),
        ("own", 1.0, {PER_TURN: 1.0}),
        # 15 response tokens: 17 - 10 = 7 are free of 17, the rest of 10 is the buffer.
        ("short", -0.8, {"overlong": 0.8}),
        ("long", 0.0, {"overlong": 0.0}),
    ],
)
async def test_the_terms_are_those_of_the_source(source: str, reward: float, parts: Mapping[str, float]) -> None:
    """One search and a right answer: 3 prompt tokens, 15 of the response; worked out by hand."""
    asked = replace(question("Bamako"), source=source)
    async with rewards() as of_sources:
        found = await of_sources.score(asked, episode(SEARCH, RIGHT, response_tokens=15))
    assert found.parts == pytest.approx(parts)
    assert found.reward == pytest.approx(reward)


async def test_the_structure_knows_the_tools_of_the_source() -> None:
    """A call of the calculator belongs to the structure only where the policy has it."""
    called = episode(SUM, RIGHT, tools={"calculator": "calculator"})
    text = episode(think("search", "<calculator>1</calculator>"), RIGHT)
    async with rewards() as of_sources:
        assert (await of_sources.score(replace(question("Bamako"), source="sums"), called)).reward == 0.0
        assert (await of_sources.score(replace(question("Bamako"), source="sums"), text)).reward == -1.0


@pytest.mark.parametrize(
    ("reward", "code", "key"),
    [
        ({"no_term": 1.0}, "unknown", "task.sources.bad.reward.no_term"),
        ({"search_penalty": 1.0}, "out_of_range", "task.sources.bad.reward.search_penalty"),
        ({"judge": 1.0}, "missing", "reward.judge.url"),
    ],
)
def test_terms_of_a_source_are_refused_under_its_key(reward: dict[str, Any], code: Code, key: str) -> None:
    with refused(code, key):
        Rewards(REWARD, task_of(sources={"bad": SourceConfig(reward=reward)}), CompatConfig())


def test_terms_without_a_weight_are_named_for_a_run_that_has_no_teacher() -> None:
    silent = SourceConfig(reward={"f1": 0.0})
    found = check_weights(replace(REWARD, terms={"f1": 0.0}), task_of(sources={"bad": silent}))
    assert [(one.code, one.key) for one in found] == [("empty", "reward.terms"), ("empty", "task.sources.bad.reward")]
