"""The Search-R1 protocol as a pure state machine: text of a turn in, what to do next out.

A turn is cut after its first closing search tag, else after its first closing answer tag. Its action
is the first complete search or answer element of what is left. An answer ends the episode, a search
asks for an observation, anything else is told off with the task's invalid message. After `max_turns`
turns there is one last generation, in which only an answer counts. A query of white space alone cannot
be searched and is invalid.

Invariants: `State` is immutable; `step` never raises on any text; the number of steps until `End` is at
most `max_turns + 1`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlsys.agent.trajectory import Action, Finish
from rlsys.config.schema import TaskConfig


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
    """The query or the answer, stripped; empty for an invalid turn."""


@dataclass(frozen=True, slots=True)
class Search:
    """Search for `turn.content`, append the observation, generate again."""

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


Effect = Search | Say | End


class Protocol:
    """The rules of a task. Stateless: every episode keeps its own `State`."""

    def __init__(self, task: TaskConfig) -> None:
        tags = task.tags
        self._closers = (f"</{tags.search}>", f"</{tags.answer}>")
        self._element = re.compile(
            rf"<({re.escape(tags.search)}|{re.escape(tags.answer)})>(.*?)</\1>", re.DOTALL
        )
        self._search_tag = tags.search
        self._max_turns = task.max_turns
        self._invalid_message = task.invalid_message

    def cut(self, text: str) -> str:
        """`text` up to and including the tag that ends the turn; all of it without one."""
        for closer in self._closers:
            head, found, _ = text.partition(closer)
            if found:
                return head + closer
        return text

    def parse(self, text: str) -> Parsed:
        """Cut a turn and read its action."""
        kept = self.cut(text)
        element = self._element.search(kept)
        if element is None:
            return Parsed(kept, Action.INVALID, "")
        content = element.group(2).strip()
        if element.group(1) != self._search_tag:
            return Parsed(kept, Action.ANSWER, content)
        if not content:
            return Parsed(kept, Action.INVALID, "")
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
        return after, Say(turn, self._invalid_message)
