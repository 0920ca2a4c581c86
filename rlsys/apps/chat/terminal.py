"""Reads questions one by one and prints their events: coloured text in a terminal, plain text when piped, or JSON lines.

Generated, retrieved and typed text is untrusted: characters that a terminal could act on, or that its encoding lacks, are
spelled out.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TextIO

import typer
from rich.console import Console
from rich.text import Text

from rlsys.apps.chat import conversation as chat
from rlsys.apps.chat.chat_settings import ChatSettings
from rlsys.apps.chat.conversation import Conversation, Event, Failed, Kind, opened_in_terminal
from rlsys.apps.evaluation.evaluation_inputs import Model
from rlsys.errors import RunError, with_code
from rlsys.observe.samples import visible

STYLES = dict(zip(Kind, ("", "dim", "bold cyan", "bold green", "bold magenta"), strict=True))
"""Terminal style of each kind of generated text."""
_OBSERVED, _FIGURES, _WRONG = "blue", "dim italic", "bold red"
_FINISHES = {
    "turn_limit": "no answer: turn limit reached",
    "token_limit": "no answer: token limit reached",
    chat.TIME_LIMIT: "no answer: time limit reached",
    "aborted": "no answer: the engine aborted the request",
}
_MAX_BYTES = 1 << 16


async def ask(model: Model, settings: ChatSettings, engine: str, question: str | None, *, as_json: bool) -> None:
    """Answer `question`, or the questions typed or piped to stdin."""
    typed = question is None and sys.stdin.isatty()
    screen: Screen = JsonScreen() if as_json else TextScreen(Console(highlight=False), echo=not typed)
    async with opened_in_terminal(model, settings, engine) as opened:
        if question is not None:
            if isinstance(await answer(opened.conversation, question, screen), Failed):
                raise typer.Exit(2)
            return

        def invite() -> None:
            if typed:
                print("Question: ", end="", file=sys.stderr, flush=True)

        failed = await session(opened.conversation, lines_of(sys.stdin.fileno()), screen, invite)
        if failed and not typed:
            raise RunError(f"Failed questions, for the reasons above: {failed}.")


class JsonScreen:
    """Prints one event per line, in ASCII, so that no text can break a line or the terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def show(self, event: Event) -> None:
        print(json.dumps(chat.as_dict(event)), file=self._out, flush=True)


class TextScreen:
    """Streams the response as the policy sees it, then prints the answer and a line of statistics."""

    def __init__(self, console: Console, echo: bool = False) -> None:
        """`echo` prints each question; set it for questions that were not typed."""
        self._console, self._echo = console, echo
        self._at_line_start = True

    def show(self, event: Event) -> None:
        match event:
            case chat.QuestionAccepted(question=question) if self._echo:
                self._line(f"> {question}", "bold")
            case chat.TextPiece(kind=kind, text=text):
                self._write(text, STYLES[kind])
            case chat.SearchFinished(error=error) if error:
                self._line(f"[the search failed: {error}]", _WRONG)
            case chat.TurnEnded() | chat.SearchFinished() | chat.QuestionAccepted():
                pass
            case chat.ObservationAdded(text=text):
                self._write(text, _OBSERVED)
            case chat.EpisodeEnded():
                self._end(event)
            case Failed():
                self._line(with_code(event.reason, event.code), _WRONG)

    def _end(self, event: chat.EpisodeEnded) -> None:
        figures = [f"{event.searches} {'search' if event.searches == 1 else 'searches'}"]
        if event.tool_calls:
            figures.append(f"{event.tool_calls} tool call{'s' * (event.tool_calls != 1)}")
        figures += [f"{event.tokens} token{'s' * (event.tokens != 1)}", f"{event.seconds:.1f} s"]
        if event.answer is None:
            self._line(_FINISHES[event.finish], _WRONG)
        else:
            self._line(f"answer: {event.answer}", STYLES[Kind.answer])
        self._line(f"({', '.join(figures)})", _FIGURES)
        self._console.print()

    def _line(self, text: str, style: str) -> None:
        """Print a line, after a line break if necessary."""
        self._write(f"{'' if self._at_line_start else chr(10)}{text}\n", style)

    def _write(self, text: str, style: str) -> None:
        if text:
            encoding = self._console.encoding
            shown = visible(text).encode(encoding, "backslashreplace").decode(encoding)
            self._console.print(Text(shown, style), end="", soft_wrap=True)
            self._console.file.flush()
            self._at_line_start = text.endswith("\n")


Screen = JsonScreen | TextScreen


async def answer(conversation: Conversation, question: str, screen: Screen) -> Event:
    """Answer a question, show its events and return the last. Shows and raises RunError if the engine has died."""
    event: Event = Failed("The question produced no event.")
    try:
        async with aclosing(conversation.ask(question)) as events:
            async for event in events:
                screen.show(event)
    except RunError as problem:
        screen.show(Failed.of(problem))
        raise
    return event


async def session(
    conversation: Conversation, questions: AsyncIterator[str], screen: Screen, invite: Callable[[], None] = lambda: None
) -> int:
    """Answer all `questions`; return the number of failures. Ctrl-C stops the current answer; between answers it stops
    the session."""
    failed = 0
    invite()
    async for question in questions:
        answering = asyncio.ensure_future(answer(conversation, question, screen))
        async with _interrupting(answering):
            # `wait` does not raise, so a cancelled answer does not cancel the session.
            await asyncio.wait({answering})
        if answering.cancelled():
            screen.show(Failed("Stopped."))
            failed += 1
        else:
            failed += isinstance(answering.result(), Failed)
        invite()
    return failed


@asynccontextmanager
async def _interrupting(answering: asyncio.Task[Event]) -> AsyncIterator[None]:
    """Make Ctrl-C cancel `answering` inside the context, and the whole session after it. `answering` ends on exit."""
    loop, outer = asyncio.get_running_loop(), asyncio.current_task()
    assert outer is not None
    loop.add_signal_handler(signal.SIGINT, answering.cancel)
    try:
        yield
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        loop.add_signal_handler(signal.SIGINT, outer.cancel)


async def lines_of(descriptor: int) -> AsyncIterator[str]:
    """Yield the lines of a file as they arrive, without line ends and without blocking the event loop.

    Invalid UTF-8 is replaced. The descriptor stays in blocking mode, because a terminal's input and output may share
    it. It is read only when data is ready.
    """
    held = b""
    while more := await _read(descriptor):
        *whole, held = (held + more).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if held:
        yield held.decode("utf-8", "replace").rstrip("\r")


async def _read(descriptor: int) -> bytes:
    """Wait for data and return it; empty at the end of the file."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:  # A regular file, which is always ready.
        return os.read(descriptor, _MAX_BYTES)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, _MAX_BYTES)
