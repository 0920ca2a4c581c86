"""Tests of a chat in a terminal, a pipe and a program: output, control characters, and a sequence of questions."""

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from rlsys.apps.chat.conversation import EpisodeEnded, Failed, Kind, ObservationAdded, QuestionAccepted, TextPiece
from rlsys.apps.chat.terminal import JsonScreen, TextScreen, lines_of, session
from rlsys.errors import RunError
from rlsys.rollout.agent.recorder import Generation
from tests.support.chat import ANSWERS, SEARCHES, FakeSearch, Script, codec, conversation

HOSTILE = "\x1b]0;owned\x07[bold]x[/bold] \u202e\x9b31m\udc80"
ESCAPED = "\\x1b]0;owned\\x07[bold]x[/bold] \\u202e\\x9b31m\\udc80"


async def these(*questions: str) -> AsyncIterator[str]:
    for question in questions:
        yield question


def test_control_characters_are_escaped() -> None:
    out = io.StringIO()
    screen = TextScreen(Console(file=out, color_system=None, width=20), echo=True)
    for event in (
        QuestionAccepted(HOSTILE, ""),
        TextPiece(0, Kind.text, HOSTILE),
        ObservationAdded(0, HOSTILE),
        EpisodeEnded(HOSTILE, "answer", 0, 0, 1, 0.1),
        Failed(HOSTILE),
    ):
        screen.show(event)
    assert out.getvalue().count(ESCAPED) == 5
    assert not set(out.getvalue()) & {"\x1b", "\x07", "\u202e", "\x9b", "\udc80"}


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    TextScreen(Console(file=out, color_system=None), echo=True).show(QuestionAccepted("東 é", ""))
    assert out.buffer.getvalue() == b"> \\u6771 \xe9\n"  # type: ignore[attr-defined]


async def test_a_dead_engine_is_reported_and_ends_the_session() -> None:
    class DeadScript(Script):
        async def generate(self, *_: object) -> Generation:  # type: ignore[override]
            raise RunError("The engine has died.")

    out = io.StringIO()
    asked = conversation(DeadScript(codec(), ()), FakeSearch())
    with pytest.raises(RunError):
        await session(asked, these("Who?", "And?"), JsonScreen(out))
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events].count("failed") == 1
    assert (events[-1]["event"], events[-1]["reason"]) == ("failed", "The engine has died.")


async def test_ctrl_c_stops_the_answer_but_not_the_session() -> None:
    out = io.StringIO()
    script = Script(codec(), (SEARCHES, ANSWERS), halt_after=6)
    going = asyncio.create_task(session(conversation(script, FakeSearch()), these("Who?", ""), JsonScreen(out)))
    await script.halted.wait()
    os.kill(os.getpid(), signal.SIGINT)
    assert await going == 2
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    reasons = [json.loads(line).get("reason") for line in out.getvalue().splitlines()]
    assert reasons[-2] == "Stopped."
    assert json.loads(out.getvalue().splitlines()[-1])["code"] == "empty"
    assert script.cancelled == 1


async def test_lines_are_read_as_soon_as_they_are_written() -> None:
    reading, writing = os.pipe()
    lines = lines_of(reading)
    first = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)
    assert not first.done()
    os.write(writing, b"one\r\ntw")
    assert await first == "one"
    os.write(writing, "o\n\nthree ü".encode())
    os.write(writing, b"\xff")
    os.close(writing)
    assert [line async for line in lines] == ["two", "", "three ü\ufffd"], "the last has no line end"
    os.close(reading)
