"""The Search-R1 protocol as a pure state machine: text of a turn in, what to do next out.

A turn is cut after its first closing tag of the search or of a tool, else after its first closing answer tag.
Its action is the first complete element of the search, a tool or the answer in what is left. An answer ends the
episode, a search or a call asks for an observation, anything else is told off with the task's invalid message.
After `max_turns` turns there is one last generation, in which only an answer counts. A query, or a text for a
tool, of white space alone is invalid.

Invariants: `State` is immutable; `step` never raises on any text; the number of steps until `End` is at
most `max_turns + 1`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rlsys.config.schema import TaskConfig
from rlsys.data.trajectory import Action, Finish


@dataclass(frozen=True, slots=True)
class State:
    """How far an episode is."""

    turns: int = 0
    """Generations that lie behind."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn as the protocol reads it."""

    text: str
    """What is left of the turn after the cut."""
    action: Action
    content: str
    """The query, the text for a tool or the answer, stripped; empty for an invalid turn."""
    tool: str = ""
    """The tool's name, of `Action.TOOL` alone."""


@dataclass(frozen=True, slots=True)
class Search:
    """Search for `turn.content`, append the observation, generate again."""

    turn: Parsed


@dataclass(frozen=True, slots=True)
class Call:
    """Call the tool `turn.tool` with `turn.content`, append the observation, generate again."""

    turn: Parsed


@dataclass(frozen=True, slots=True)
class Say:
    """Append `message` as it is, generate again."""

    turn: Parsed
    message: str


@dataclass(frozen=True, slots=True)
class End:
    """The episode is over; nothing is appended."""

    turn: Parsed
    finish: Finish


Effect = Search | Call | Say | End


class Protocol:
    """The rules of a task. Stateless: every episode keeps its own `State`."""

    def __init__(self, task: TaskConfig, tools: Mapping[str, str] = {}, *, searches: bool = True) -> None:
        """`tools` are their names by tag; without `searches` the tag of the search means nothing."""
        tags = task.tags
        self._acts = {**({tags.search: ""} if searches else {}), **tools}
        """Tag -> name of the tool, empty for the search."""
        self._element = re.compile(rf"<({'|'.join(map(re.escape, (*self._acts, tags.answer)))})>(.*?)</\1>", re.DOTALL)
        self._answer_tag = tags.answer
        self._max_turns = task.max_turns
        self._invalid_message = task.invalid_message

    def cut(self, text: str) -> str:
        """`text` up to and including the tag that ends the turn; all of it without one."""
        for tags in (self._acts, (self._answer_tag,)):
            cuts = [text.partition(f"</{tag}>")[:2] for tag in tags]
            if ended := [head + closer for head, closer in cuts if closer]:
                return min(ended, key=len)
        return text

    def parse(self, text: str) -> Parsed:
        """Cut a turn and read its action."""
        kept = self.cut(text)
        element = self._element.search(kept)
        if element is None:
            return Parsed(kept, Action.INVALID, "")
        content = element.group(2).strip()
        if element.group(1) == self._answer_tag:
            return Parsed(kept, Action.ANSWER, content)
        if not content:
            return Parsed(kept, Action.INVALID, "")
        if tool := self._acts[element.group(1)]:
            return Parsed(kept, Action.TOOL, content, tool)
        return Parsed(kept, Action.SEARCH, content)

    def step(self, state: State, text: str) -> tuple[State, Effect]:
        """What follows from the generated `text` of a turn in `state`."""
        turn = self.parse(text)
        after = State(state.turns + 1)
        if turn.action is Action.ANSWER:
            return after, End(turn, Finish.ANSWER)
        if state.turns >= self._max_turns:
            return after, End(turn, Finish.TURN_LIMIT)
        if turn.action is Action.SEARCH:
            return after, Search(turn)
        if turn.action is Action.TOOL:
            return after, Call(turn)
        return after, Say(turn, self._invalid_message)
