"""Tests of the state that tools keep for an episode: never shared, and closed exactly once however the episode ends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.data.question import Question
from rlsys.data.trajectory import Finish
from rlsys.errors import RunError
from rlsys.rollout.agent.episode import EpisodeGroup, EpisodeTools, run_episode
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.tools import calls
from rlsys.rollout.tools.calls import Toolbox
from rlsys.rollout.tools.interface import EpisodeFacts, ToolError, arguments_of
from rlsys.search.web.loop import LoopThread
from tests.extensions.tool_toys import Blocking, Counting, Faulty
from tests.rollout.agent.scripted import CODEC, DRAWN, QUESTION, Script, task
from tests.rollout.tools.own_tools import Echo
from tests.support.waiting import until

SAMPLE = EpisodeFacts(Question("q", "", ()), 0)
THREAD = LoopThread("tool")


def toolbox(tool: Counting, episode: EpisodeFacts = SAMPLE) -> Toolbox:
    return Toolbox({tool.name: tool}, {tool.name: THREAD}, None, episode, Counter())  # type: ignore[dict-item]


def episodes(tool: Counting, script: Script) -> EpisodeTools:
    return EpisodeTools(script, script, CODEC, task(max_turns=9), custom=[tool, Echo()])  # type: ignore[list-item]


async def all_closed(tool: Counting, opened: int = 0) -> None:
    """Wait until every state, at least `opened`, has been closed; on a slow machine, this may be after the episode."""
    await until(lambda: len(tool.states) >= opened and all(state.closed for state in tool.states))


@settings(max_examples=50)
@given(st.lists(st.lists(st.text("ab", min_size=1, max_size=3), max_size=4), min_size=1, max_size=6))
def test_concurrent_episodes_never_share_state(texts: list[list[str]]) -> None:
    tool = Counting(label="")

    async def play(sample: int) -> list[str]:
        box = toolbox(tool, EpisodeFacts(QUESTION, sample))
        heard = [(await box.call(tool.name, text)).text for text in texts[sample]]
        await asyncio.gather(box.close(), box.close())
        return heard

    async def every() -> list[list[str]]:
        heard = await asyncio.gather(*(play(sample) for sample in range(len(texts))))
        await all_closed(tool)
        return heard

    assert asyncio.run(every()) == [[f" {place + 1}" for place in range(len(said))] for said in texts]
    called = [sample for sample, said in enumerate(texts) if said]
    assert sorted(one.sample for one in tool.begun) == called, "opened at the first call only"
    assert sorted(state.heard for state in tool.states) == sorted(said for said in texts if said)
    assert [state.closed for state in tool.states] == [1] * len(called)


@pytest.mark.parametrize(
    ("fault", "error", "opened", "closed"),
    [
        ("open raises", "it cannot be opened: OSError: no room", 1, 0),
        ("open exits", "it cannot be opened: SystemExit: 3", 1, 0),
        ("open hangs", "it did not open within 0.1 s", 1, 0),
        ("open returns a number", "it cannot be opened: open returned int, which has no async method call", 1, 0),
        ("open is late", "it did not open within 0.1 s", 1, 1),
        ("close raises", "", 1, 1),
        ("close hangs", "", 1, 1),
    ],
)
async def test_faulty_state_is_an_error_of_the_call_and_closed_at_most_once(
    fault: str, error: str, opened: int, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "close hangs":
        monkeypatch.setattr(calls, "CANCEL_GRACE_S", 0.1)
    tool = Faulty(label=fault)
    box = toolbox(tool)
    for _ in range(2):
        assert (await asyncio.wait_for(box.call(tool.name, "a"), 600)).error == error
    for _ in range(2):
        await asyncio.wait_for(box.close(), 600)
    if closed:
        await all_closed(tool, 1)
    assert (len(tool.begun), sum(state.closed for state in tool.states)) == (opened, closed)


class Ending(Script):
    """Engine that fails or hangs in the second turn."""

    def __init__(self, first: str, then: str) -> None:
        super().__init__([first, "<answer>x</answer>"])
        self.then = then

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        if rid.endswith(".1"):
            self.halted.set()
            if self.then == "raise":
                raise RunError("the engine has died")
            while self.then == "ignore":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.then = ""
            await asyncio.Event().wait()
        return await super().generate(input_ids, sampling, rid)


@pytest.mark.parametrize(
    ("text", "then", "how"),
    [
        ("a", "raise", "error"),
        ("raise", "raise", "error"),
        *(
            (text, then, how)
            for text, then in (("a", "hang"), ("a", "ignore"), ("hang", ""))
            for how in ("abort", "timeout")
        ),
    ],
)
async def test_state_is_closed_once_under_abort_timeout_and_error(
    text: str, then: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if then == "ignore":
        monkeypatch.setattr(calls, "CANCEL_GRACE_S", 0.1)
    tool = Counting(label="")
    script = Ending(f"<count>{text}</count>", then)
    group = EpisodeGroup(QUESTION, range(3), episodes(tool, script), DRAWN)
    playing = asyncio.ensure_future(group.play(asyncio.Semaphore(3), 0.3 if how == "timeout" else 600))
    if how == "abort":
        await until(lambda: len([state for state in tool.states if state.heard]) == 3)
        if text != "hang":
            await asyncio.wait_for(script.halted.wait(), 600)
        playing.cancel()
    (ended,) = await asyncio.wait_for(asyncio.gather(playing, return_exceptions=True), 600)
    assert type(ended) is {"error": RunError, "abort": asyncio.CancelledError, "timeout": type(None)}[how]
    assert [one.finish for one in group.trajectories()] == [Finish.ABORTED] * 3
    await all_closed(tool)
    assert {state.closed for state in tool.states} <= {1}
    assert len(tool.states) == 3 or how != "abort"
    assert how == "timeout" or not any(one.turns for one in group.progress()), "state cannot be resumed elsewhere"


@pytest.mark.parametrize(
    ("method", "error"),
    [("open", "no answer within 0.1 s"), ("call", "no answer within 0.1 s"), ("close", "")],
)
async def test_tool_that_blocks_delays_no_episode_and_no_other_tool(
    method: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CANCEL_GRACE_S", 0.1)
    if error:
        # A call that begins late, on a busy machine, must still have opened its state.
        monkeypatch.setattr(calls, "BLOCKED_S", 5.0 if method == "call" else 0.1)
    tool, script = Blocking(label=method), Script(["<block>a</block>", "<say>b</say>", "<answer>x</answer>"])
    tools = episodes(tool, script)
    played = await run_episode(QUESTION, 0, tools, DRAWN)
    assert [turn.tool_error for turn in played.turns] == [error, "", ""]
    assert (played.turns[1].observation.strip(), played.answer) == ("<information>B</information>", "x")
    assert [state.closed for state in tool.states] == [0] * (method != "open")
    tool.released.set()
    await all_closed(tool, 1)
    assert [state.closed for state in tool.states] == [1]
    tools.close()


NAME = st.text("abc", min_size=1, max_size=2)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda one: st.lists(one, max_size=3))


@given(st.dictionaries(NAME, VALUES), st.sets(NAME), st.text())
def test_arguments_are_read_back_and_any_text_is_arguments_or_an_error(
    arguments: dict[str, Any], others: set[str], text: str
) -> None:
    names = sorted({*arguments, *others})
    parameters = {"properties": {name: {"type": "string"} for name in names}, "required": sorted(arguments)}
    assert arguments_of(json.dumps(arguments), parameters) == arguments
    try:
        found = arguments_of(text, parameters)
    except ToolError:
        assert len(arguments) != 1
        return
    assert found.keys() <= {*names}
