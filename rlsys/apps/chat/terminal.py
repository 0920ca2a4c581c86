"""Events as text: in colour in a terminal, plain when piped, or one JSON object a line.

What is generated, retrieved and typed is untrusted: characters that a terminal could act on are spelled out, and so are
those that its encoding does not have.
"""

from __future__ import annotations

import json
import sys
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text as Styled

from rlsys.apps.chat.events import (
    TIME_LIMIT,
    Acted,
    Asked,
    Ended,
    Event,
    Failed,
    Found,
    Kind,
    Observed,
    Text,
    as_dict,
)
from rlsys.observe.samples import visible

STYLES = {
    Kind.text: "",
    Kind.thought: "dim",
    Kind.search: "bold cyan",
    Kind.tool: "bold magenta",
    Kind.answer: "bold green",
}
_OBSERVED, _FIGURES, _WRONG = "blue", "dim italic", "bold red"
_FINISHES = {
    "turn_limit": "no answer: the turn limit is reached",
    "token_limit": "no answer: the token limit is reached",
    TIME_LIMIT: "no answer: the time limit is reached",
    "aborted": "no answer: the engine has given it up",
}


class Screen(Protocol):
    """Shows events."""

    def show(self, event: Event) -> None:
        """Show the next event."""


class JsonScreen:
    """One event a line, at once; pure ASCII, so that nothing in it can break a line or a terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def show(self, event: Event) -> None:
        """Write a line."""
        print(json.dumps(as_dict(event)), file=self._out, flush=True)


class TextScreen:
    """The response as the policy sees it, while it comes; then the answer and a line of figures."""

    def __init__(self, console: Console, echo: bool = False) -> None:
        """`echo` repeats the question, where it was not typed right above."""
        self._console = console
        self._echo = echo
        self._at_line_start = True

    def show(self, event: Event) -> None:
        """Show the next event."""
        match event:
            case Asked(question=question) if self._echo:
                self._line(f"> {question}", "bold")
            case Text(kind=kind, text=text):
                self._write(text, STYLES[kind])
            case Found(error=error) if error:
                self._line(f"[the search failed: {error}]", _WRONG)
            case Acted() | Found() | Asked():
                pass
            case Observed(text=text):
                self._write(text, _OBSERVED)
            case Ended():
                self._end(event)
            case Failed(reason=reason):
                self._line(reason, _WRONG)

    def _end(self, event: Ended) -> None:
        figures = [
            _counted(event.searches, "search", "searches"),
            *([_counted(event.tool_calls, "tool call", "tool calls")] if event.tool_calls else []),
            _counted(event.tokens, "token", "tokens"),
            f"{event.seconds:.1f} s",
        ]
        if event.answer is None:
            self._line(_FINISHES[event.finish], _WRONG)
        else:
            self._line(f"answer: {event.answer}", STYLES[Kind.answer])
        self._line(f"({', '.join(figures)})", _FIGURES)
        self._console.print()

    def _line(self, text: str, style: str) -> None:
        """A line of its own, whatever came before."""
        self._write(f"{'' if self._at_line_start else chr(10)}{text}\n", style)

    def _write(self, text: str, style: str) -> None:
        if text:
            encoding = self._console.encoding
            shown = visible(text).encode(encoding, "backslashreplace").decode(encoding)
            self._console.print(Styled(shown, style), end="", soft_wrap=True)
            self._console.file.flush()
            self._at_line_start = text.endswith("\n")


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
