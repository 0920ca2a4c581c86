"""Tests that an episode has the tools and limits of its question's source."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from rlsys.config.schema import SourceConfig, TaskConfig
from rlsys.data.trajectory import Action, Finish
from rlsys.rollout.agent.episode import Episode, EpisodeTools, run_episode
from rlsys.rollout.tools.interface import named_tools
from tests.rollout.agent.scripted import CALCULATOR, CODEC, DRAWN, QUESTION, Script, interrupted, task

SUM, SEARCH, ANSWER = "<calculator>2+3</calculator>", "<search>x</search>", "<answer>5</answer>"
NOTES = "examples.extend.tool.Notes"


def mixed(**settings: SourceConfig) -> TaskConfig:
    return task(sources=settings)


SOURCES = mixed(
    wiki=SourceConfig(),
    sums=SourceConfig(tools=named_tools([CALCULATOR]), search=False, max_turns=1),
    short=SourceConfig(max_turn_tokens=12, max_total_tokens=90),
)


@pytest.mark.parametrize(
    ("source", "said", "actions", "finish"),
    [
        ("wiki", [SUM, SEARCH, ANSWER], [Action.INVALID, Action.SEARCH, Action.ANSWER], Finish.ANSWER),
        ("sums", [SUM, ANSWER], [Action.TOOL, Action.ANSWER], Finish.ANSWER),
        ("sums", [SEARCH, SUM, ANSWER], [Action.INVALID, Action.TOOL], Finish.TURN_LIMIT),
        ("", [SUM, SEARCH, ANSWER], [Action.INVALID, Action.SEARCH, Action.ANSWER], Finish.ANSWER),
    ],
)
async def test_tools_and_turns_are_those_of_the_source(
    source: str, said: list[str], actions: list[Action], finish: Finish
) -> None:
    script = Script(said)
    with closing(EpisodeTools(script, script, CODEC, SOURCES)) as tools:
        done = await run_episode(replace(QUESTION, source=source), 0, tools, DRAWN)
    assert ([turn.action for turn in done.turns], done.finish) == (actions, finish)
    assert script.queries == ["x"] * actions.count(Action.SEARCH)
    called = [turn for turn in done.turns if turn.action is Action.TOOL and finish is Finish.ANSWER]
    assert ["5" in turn.observation for turn in called] == [True] * done.tool_calls


async def test_token_limits_are_those_of_the_source() -> None:
    """The budget of each turn is what the engine is asked for; a long text ends at the source's length."""
    script = Script(["word " * 40] * 9)
    with closing(EpisodeTools(script, script, CODEC, SOURCES)) as tools:
        done = await run_episode(replace(QUESTION, source="short"), 0, tools, DRAWN)
        assert (script.calls[0][2], max(budget for _, _, budget in script.calls)) == (12, 12)
        assert (done.finish, len(done.tokens) <= 90) == (Finish.TOKEN_LIMIT, True)
        await run_episode(replace(QUESTION, source="wiki"), 0, tools, DRAWN)
    assert max(budget for _, _, budget in script.calls) == SOURCES.max_turn_tokens


async def test_only_a_source_whose_tool_has_state_begins_its_episodes_anew() -> None:
    """A partial episode of another source goes on where it was."""
    config = mixed(plain=SourceConfig(), notes=SourceConfig(tools=named_tools([NOTES])))
    begun = {}
    for name in config.sources:
        halting = Script([SEARCH, SEARCH, ANSWER], halt=(1, "say"))
        with closing(EpisodeTools(halting, halting, CODEC, config)) as tools:
            begun[name] = await interrupted(halting, tools, asked=replace(QUESTION, source=name))
    assert {name: len(progress.turns) for name, progress in begun.items() if progress} == {"plain": 1, "notes": 0}
    script = Script([SEARCH, SEARCH, ANSWER])
    with closing(EpisodeTools(script, script, CODEC, config)) as tools:
        for name, progress in begun.items():
            episode = Episode(replace(QUESTION, source=name), 3, tools, DRAWN, progress)
            assert await episode.run() is Finish.ANSWER
        assert tools.metrics() == {"episodes_begun_anew": 1}
    assert [rid.rpartition(".")[2] for rid, _, _ in script.calls] == ["1", "2", "0", "1", "2"]


def test_sources_with_the_tools_of_the_task_share_them_and_closing_ends_all_once() -> None:
    script = Script([])
    config = replace(
        mixed(one=SourceConfig(max_turns=1), own=SourceConfig(tools=named_tools([CALCULATOR]))),
        tools=named_tools([CALCULATOR]),
    )
    tools = EpisodeTools(script, script, CODEC, config)
    shared, one, own = (tools.of(replace(QUESTION, source=name)).custom["calculator"] for name in ("", "one", "own"))
    threads = [tools.of(replace(QUESTION, source=name)).threads["calculator"] for name in ("", "one", "own")]
    assert shared is one is not own
    assert threads[0] is threads[1] is not threads[2]
    tools.close()
    tools.close()
    assert tools.of(replace(QUESTION, source="own")) is tools, "nothing is held any more"
