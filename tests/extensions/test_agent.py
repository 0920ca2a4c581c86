"""Tests of agents from one file outside of the package, chosen by the config alone."""

from __future__ import annotations

import asyncio

import pytest

from rlsys.config.schema import TaskConfig
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.errors import Code
from rlsys.orchestrator.validate import find_problems
from rlsys.rollout.agent.episode import EpisodeGroup, EpisodeTools, run_episode
from tests.extensions import agent_toys, tool_toys
from tests.rollout.agent.scripted import CODEC, DRAWN, QUESTION, Script
from tests.support.composed import composed
from tests.support.refusals import refused

TOYS, KIND = agent_toys.__name__, "task.agent.kind"
TOOLS = f"task.tools=[{{kind: {tool_toys.__name__}.Counting, label: no}}]"
APPEND = "task.token_mode=append"


def task(*overrides: str) -> TaskConfig:
    return composed(*overrides).task


def run(script: Script, config: TaskConfig, timeout_s: float | None = None) -> Trajectory:
    tools = EpisodeTools(script, script, script.codec, config)
    return asyncio.run(run_episode(QUESTION, 3, tools, DRAWN, timeout_s))


@pytest.mark.parametrize("kind", [f"{KIND}={TOYS}.drafts", f"task.agent={TOYS}.drafts"])
@pytest.mark.parametrize("mode", ["append", "retokenize"])
def test_agent_plays_with_the_settings_of_the_config(kind: str, mode: str) -> None:
    script = Script(["one. more", "two.", "three."])
    played = run(script, task(kind, "task.agent.number=3", f"task.token_mode={mode}", TOOLS))
    assert played.response == "one. [no 1] two. [no 2] three."
    assert CODEC.decode(played.tokens[: played.prompt_length].tolist()) == f"{QUESTION.prompt}Draft:"
    if mode == "append":
        assert CODEC.decode(played.tokens[played.loss_mask].tolist()) == "one.two.three."
    assert (played.finish, played.answer) == (Finish.ANSWER, "three.")
    assert [turn.tool_s > 0 for turn in played.turns] == [True, True, False]
    assert script.stops == {(*DRAWN.stop, ".")}


@pytest.mark.parametrize("name", ["too_few", "not_async", "raises", "returns_text", "exits"])
def test_agent_that_cannot_play_is_one_sentence(name: str) -> None:
    with refused("user_code", KIND) as caught:
        run(Script(["one"]), task(f"{KIND}={TOYS}.{name}", APPEND))
    assert len(str(caught.value).splitlines()) == 1


def test_settings_and_token_mode_are_checked_before_a_run() -> None:
    def problems(*overrides: str) -> set[tuple[str, Code]]:
        return {(one.key, one.code) for one in find_problems(composed(*overrides))}

    with refused("out_of_range", "task.agent.number"):
        problems(f"{KIND}={TOYS}.drafts", "task.agent.number=0")
    assert (KIND, "user_code") in problems(f"{KIND}={TOYS}.not_async")
    assert (KIND, "conflict") in problems("task.agent=react")
    assert not {key for key, _ in problems("task.agent=react", APPEND)} & {KIND, "task.token_mode"}


@pytest.mark.parametrize("agent", ["never_returns", "never_gives_up"])
def test_agent_that_does_not_end_is_ended_by_a_limit(agent: str) -> None:
    played = run(Script(["one " * 9] * 9), task(f"{KIND}={TOYS}.{agent}", APPEND, "task.max_total_tokens=90"), 0.5)
    finish = Finish.ABORTED if agent == "never_returns" else Finish.TOKEN_LIMIT
    assert (played.finish, played.turns[0].text[:3]) == (finish, "one")


async def test_interrupted_episode_of_an_own_agent_begins_anew() -> None:
    config = task(f"{KIND}={TOYS}.drafts", APPEND, TOOLS)
    halting = Script(["one.", "two."], halt=(1, "say"))
    group = EpisodeGroup(QUESTION, [3], EpisodeTools(halting, halting, CODEC, config), DRAWN)
    playing = asyncio.ensure_future(group.play(asyncio.Semaphore(1), 600))
    await asyncio.wait_for(halting.halted.wait(), 600)
    assert [one.turns for one in group.progress()] == [()], "it had begun, and nothing of it is kept"
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    (aborted,) = group.trajectories()
    assert (aborted.finish, aborted.response) == (Finish.ABORTED, "one. [no 1] ")


def test_example_searches_answers_and_checks_its_answer() -> None:
    script = Script(["hm", "<search>who</search>", "<answer>a</answer>", "<answer>b</answer>"])
    config = task("task.agent=examples.extend.agent.second_thoughts", "task.agent.checks=1", "task.max_turns=3")
    played = run(script, config)
    assert [turn.action for turn in played.turns] == [Action.INVALID, Action.SEARCH, Action.ANSWER, Action.ANSWER]
    assert (played.finish, played.answer, script.queries) == (Finish.ANSWER, "b", ["who"])
    assert "Check your answer" in played.turns[2].observation
