"""Tests of the example agents that act by Search-R1's tags, each by its real library."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config.schema import GatewayAgent
from rlsys.data.trajectory import Finish
from tests.rollout.agent.gateway_play import CODEC, END, Engine, play, trained
from tests.support.paths import PROJECT

AGENTS = ["openai_sdk", "plain_http", "langgraph", "smolagents"]
SEARCH = "<search> Rome </search>"


@pytest.mark.parametrize("name", AGENTS)
def test_agent_searches_and_its_tokens_are_trained(name: str) -> None:
    said = [SEARCH, SEARCH, "<answer> Paris </answer>"]
    played = play(Engine(said), GatewayAgent(entry=f"examples.agents.{name}.agent"))
    assert (played.finish, (played.answer or "").strip()) == (Finish.ANSWER, "Paris")
    assert trained(played) == "".join(f"{text}{END}" for text in said)
    assert [branch.cause for branch in played.branches] == ["first"]
    read = CODEC.decode_all(played.tokens[~played.loss_mask].tolist())
    found = "\n\n<information>Doc 1(Title: About) Rome</information>\n\n"
    assert (read.count(found), read.count("<|im_start|>user")) == (2, 3)
    assert "Question: Who? 東京\n" in read


@pytest.mark.parametrize("name", AGENTS)
def test_agent_that_searches_on_and_on_ends_without_an_answer(name: str) -> None:
    played = play(Engine([SEARCH]), GatewayAgent(entry=f"examples.agents.{name}.agent"), max_turns=9)
    assert (played.finish, len(played.turns)) == (Finish.ANSWER, 4)
    assert "Paris" not in (played.answer or "")


@pytest.mark.parametrize("file", sorted(PROJECT.glob("examples/agents/*.py")), ids=lambda file: file.stem)
def test_example_is_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 60
