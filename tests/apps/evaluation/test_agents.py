"""Tests of `rlsys eval --agent`: an agent through the gateway answers as the native one, within its limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.agents import openai_sdk
from rlsys.apps.cli.main import app
from rlsys.apps.evaluation.evaluation_inputs import EvaluationMethod
from rlsys.apps.evaluation.execution import run_evaluation
from rlsys.config.compose import load_config
from rlsys.config.schema import GatewayAgent, RunConfig, TokenMode
from rlsys.data.trajectory import Finish
from rlsys.errors import Code
from tests.apps.evaluation.questions import QUESTIONS
from tests.rollout.agent import gateway_agents
from tests.support.refusals import refused
from tests.support.tiny import search_server
from tests.support.tiny_models import POLICY

HERE = __name__
AT_ONCE: list[int] = []
"""Number of agents of `counts_itself` at each start and end."""


async def counts_itself(question: str, base_url: str, api_key: str) -> str | None:
    AT_ONCE.append(AT_ONCE[-1] + 1 if AT_ONCE else 1)
    said = await openai_sdk.agent(question, base_url, api_key)
    AT_ONCE.append(AT_ONCE[-1] - 1)
    return said


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    with search_server() as search:
        usual = [f"search.url={search.url}", f"output_dir={tmp_path_factory.mktemp('out')}", "task.train_eos=false"]
        loaded = load_config("searchr1_tiny_cpu", [*usual, "task.token_mode=append"])
        yield replace(loaded, model=replace(loaded.model, path=str(POLICY)))


async def answers(config: RunConfig, agent: GatewayAgent | None = None) -> list[tuple[str | None, str, Finish]]:
    """Answer, policy's own text and end of each question."""
    task = config.task if agent is None else replace(config.task, agent=agent)
    found = await run_evaluation(replace(config, task=task), QUESTIONS, EvaluationMethod("transformers"))
    played = [one.trajectory for one in found.answered]
    return [((one.answer or "").strip(), "".join(turn.text for turn in one.turns), one.finish) for one in played]


async def test_agent_gives_the_answers_of_the_native_one_and_keeps_its_number(config: RunConfig) -> None:
    AT_ONCE.clear()
    found = await answers(config, GatewayAgent(entry=f"{HERE}.counts_itself", concurrency=1))
    assert found == await answers(config)
    assert max(AT_ONCE) == 1


@pytest.mark.slow
async def test_agents_keep_their_time(config: RunConfig) -> None:
    late = await answers(config, GatewayAgent(entry=f"{gateway_agents.__name__}.never_returns", timeout_s=2.0))
    assert [finish for *_, finish in late] == [Finish.ABORTED] * 3


def call(*words: object) -> None:
    done = CliRunner().invoke(app, ["eval", "-c", "searchr1_tiny_cpu", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (("--agent", "a.b", "--agent-command", "x"), "conflict", "--agent"),
        (("--agent", "a.b", "--baseline", "cot"), "conflict", "--agent"),
        (("--agent-command", "x 'y"), "malformed", "--agent-command"),
        (("--agent-command", " "), "empty", "--agent-command"),
        (("--agent", ""), "empty", "--agent"),
        (("--agent", "nowhere:agent", "search.url=http://127.0.0.1:1"), "user_code", "task.agent.entry"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words: tuple[object, ...], code: Code, key: str) -> None:
    with refused(code, key):
        call(*words, "--model", POLICY)


@pytest.mark.slow
def test_command_writes_the_results_of_any_agent(config: RunConfig, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": one.text, "golden_answers": ["x"]}) + "\n" for one in QUESTIONS))
    words = ("--agent-command", "python -m examples.agents.plain_http", "--engine", "transformers", "--limit", 2)
    usual = ("--model", POLICY, "--data", rows, "--out", tmp_path / "out", "algorithm.advantage=gae")
    call(*words, *usual, f"search.url={config.search.url}", "task.agent.concurrency=2")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    agent = results["settings"]["config"]["task"]["agent"]
    assert (agent["command"], agent["concurrency"]) == (["python", "-m", "examples.agents.plain_http"], 2)
    assert results["settings"]["config"]["task"]["token_mode"] == TokenMode.append
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 2
