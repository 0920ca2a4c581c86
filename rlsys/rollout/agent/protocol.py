"""The Search-R1 protocol as pure functions: reads the text of a turn, and says whether the episode ends with it.

A turn is cut after its first closing tag of the search or of a tool, else after its first closing answer tag.
Its action is the first complete element of the search, a tool or the answer in what is left. An answer ends the
episode, a search or a call asks for an observation, anything else is answered with the task's invalid message.
After `max_turns` turns there is one last generation, in which only an answer counts. A query, or a text for a
tool, of white space alone is invalid.

Invariants: `step` never raises on any text; the number of steps until one ends the episode is at most `max_turns + 1`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rlsys.config.schema import TaskConfig
from rlsys.data.trajectory import Action, Finish


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn as the protocol reads it."""

    text: str
    """The rest of the turn after the cut."""
    action: Action
    content: str
    """The query, the text for a tool or the answer, stripped; empty for an invalid turn."""
    tool: str = ""
    """The tool's name, of `Action.TOOL` alone."""


class TurnRules:
    """The rules of a task. Stateless: every episode counts its own turns."""

    def __init__(self, task: TaskConfig, tools: Mapping[str, str] = {}, *, searches: bool = True) -> None:
        """`tools` are their names by tag; without `searches` the tag of the search means nothing."""
        tags = task.tags
        self._acts = {**({tags.search: ""} if searches else {}), **tools}
        """Tag -> name of the tool, empty for the search."""
        self._element = re.compile(rf"<({'|'.join(map(re.escape, (*self._acts, tags.answer)))})>(.*?)</\1>", re.DOTALL)
        self._answer_tag = tags.answer
        self._max_turns = task.max_turns

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
        tag, content = element.group(1), element.group(2).strip()
        if tag == self._answer_tag:
            return Parsed(kept, Action.ANSWER, content)
        if not content:
            return Parsed(kept, Action.INVALID, "")
        tool = self._acts[tag]
        return Parsed(kept, Action.TOOL if tool else Action.SEARCH, content, tool)

    def step(self, turns: int, text: str) -> tuple[Parsed, Finish | None]:
        """Read the generated `text` of a turn after `turns` others, and say how it ends the episode, if it does."""
        turn = self.parse(text)
        if turn.action is Action.ANSWER:
            return turn, Finish.ANSWER
        return turn, Finish.TURN_LIMIT if turns >= self._max_turns else None
