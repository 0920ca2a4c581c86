"""Tests of tools from one file outside of the package, chosen by the config alone."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from examples.extend.tool import Notes
from rlsys.config.compose import as_dict, recorded
from rlsys.config.schema import TaskConfig
from rlsys.errors import Code
from rlsys.orchestrator.validate import find_problems
from rlsys.rollout.agent.episode import EpisodeTools, run_episode
from rlsys.rollout.tools.interface import open_tools
from tests.extensions import tool_toys
from tests.extensions.tool_toys import Counting
from tests.rollout.agent.scripted import CODEC, DRAWN, QUESTION, Script
from tests.support.composed import composed
from tests.support.refusals import refused

TOYS, EXAMPLE = tool_toys.__name__, "examples.extend.tool.Notes"
ROOM = ("task.max_turns=4", "task.max_total_tokens=4000", "task.token_mode=append")
CALCULATOR = "rlsys.rollout.tools.calculator.Calculator"


def task(tools: str, *more: str) -> TaskConfig:
    return composed(f"task.tools={tools}", *more).task


def test_tool_has_the_settings_of_the_config_and_state_of_its_own_in_each_episode() -> None:
    tools = task(f"[{CALCULATOR}, {{kind: {TOYS}.Counting, by: '3', label: at}}]", *ROOM)
    assert pickle.loads(pickle.dumps(tools)) == tools, "workers receive the config"
    said = ["<count>a</count>", "<count>raise</count>", "<calculator>1+1</calculator>", "<count>b</count>"]
    opened = [EpisodeTools(script := Script([*said, "<answer>x</answer>"]), script, CODEC, tools) for _ in range(2)]

    async def played() -> list[list[str]]:
        shared = opened[0]
        every = await asyncio.gather(*(run_episode(QUESTION, sample, shared, DRAWN) for sample in range(5)))
        return [[turn.observation.strip() for turn in one.turns] for one in every]

    heard = ["at 3", "counting failed: RuntimeError: no more", "2", "at 9"]
    assert asyncio.run(played()) == [[*(f"<information>{text}</information>" for text in heard), ""]] * 5
    counting = opened[0].custom["counting"]
    assert isinstance(counting, Counting)
    assert sorted((one.question.uid, one.sample) for one in counting.begun) == [("q", sample) for sample in range(5)]
    assert [(state.heard, state.closed) for state in counting.states] == [(["a", "raise", "b"], 1)] * 5
    assert opened[1].custom["counting"] is not counting


@pytest.mark.parametrize(
    ("entry", "code", "key"),
    [
        (f"{{kind: {TOYS}.Counting}}", "missing", "task.tools[0].label"),
        ("{by: 3}", "unknown", "task.tools[0].kind"),
        ("3", "wrong_type", "task.tools[0]"),
    ],
)
def test_entry_that_names_no_usable_tool_is_refused(entry: str, code: Code, key: str) -> None:
    with refused(code, key):
        open_tools(task(f"[{entry}]"))


@pytest.mark.parametrize(
    ("tools", "code"),
    [
        (f"[{CALCULATOR}, {CALCULATOR}]", "conflict"),
        (f"[{{kind: {TOYS}.Counting, label: a}}, {TOYS}.TakesItsTag]", "conflict"),
        (f"[{TOYS}.WithoutCall]", "user_code"),
    ],
    ids=["same name", "same tag", "no tool"],
)
def test_tools_that_cannot_work_together_are_a_problem_of_the_config(tools: str, code: Code) -> None:
    found = find_problems(composed(f"task.tools={tools}"))
    assert [(one.key, one.code) for one in found if one.key.startswith("task.tools")] == [("task.tools", code)]


def test_record_of_an_older_run_names_the_same_tools() -> None:
    now = as_dict(composed(f"task.tools=[{CALCULATOR}]", "task.agent.allow_empty_query=true"))
    assert now["task"]["tools"] == [{"kind": CALCULATOR}]
    before = {key: value for key, value in now["task"].items() if key != "agent"}
    before |= {"tools": [CALCULATOR], "allow_empty_query": True, "invalid_message": "No."}
    agent = recorded(now | {"task": before})["task"].pop("agent")
    assert agent == {"kind": "search_r1", "allow_empty_query": True, "invalid_message": "No."}
    before |= {"invalid_message": now["task"]["agent"]["invalid_message"]}
    assert recorded(now | {"task": before}) == now


async def test_example_takes_notes_of_one_episode() -> None:
    script = Script(["<note>a</note>", "<note>b</note>", "<note>c</note>", "<answer>x</answer>"])
    tools = EpisodeTools(script, script, CODEC, task(f"[{{kind: {EXAMPLE}, most: 2}}]", *ROOM))
    assert isinstance(tools.custom["notes"], Notes)
    for sample in range(2):
        played = await run_episode(QUESTION, sample, tools, DRAWN)
        assert ["1. a\n2. b" in turn.observation for turn in played.turns] == [False, True, False, False]
        assert [turn.tool_error for turn in played.turns] == ["", "", "the notebook has room for 2 notes", ""]
