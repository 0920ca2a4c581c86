"""An episode as the terms of the reward see it: its answer, its structure, what it retrieved. Pure.

Everything is read from the turns: what the policy wrote in `Turn.text`, what the environment said in
`Turn.observation`. So an `<information>` that the policy writes is no retrieval (it breaks the structure), and
an answer tag in the prompt, in a passage or in the invalid-action message is no answer. Only
`compat.answer_over_prompt` reads the answer as Search-R1's code does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlsys.config.schema import CompatConfig, TagsConfig
from rlsys.data.answers import contains
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Trajectory, Turn

THINK = "think"
"""The tag of reasoning, which the protocol does not know but the structure asks for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An episode and what was read from it."""

    question: Question
    trajectory: Trajectory
    answer: str | None
    well_formed: bool
    """think -> (search or a tool's call -> information -> think)* -> answer, with white space alone between."""
    found_in: int | None
    """The first turn whose search brought text that holds an accepted answer."""
    answer_tags: int
    """As `count_answer_tags`."""

    @property
    def slots(self) -> int:
        """Places for rewards: one a turn, and one for an episode without turns."""
        return max(1, len(self.trajectory.turns))

    def at_end(self, value: float) -> list[float]:
        """[slots] `value` on the last turn."""
        return [0.0] * (self.slots - 1) + [value]


class Reader:
    """Reads episodes of a task with certain tags. Stateless; `read` raises on no text."""

    def __init__(self, tags: TagsConfig, compat: CompatConfig, tools: Mapping[str, str]) -> None:
        """`tools` are the tags of the task's own tools, by name."""
        self._tags = tags
        self._tools = tools
        self._over_prompt = compat.answer_over_prompt
        words = (THINK, tags.search, tags.information, tags.answer, *tools.values())
        self._tag = re.compile(f"(</?(?:{'|'.join(map(re.escape, words))})>)")
        answer = re.escape(tags.answer)
        self._answer = re.compile(f"<{answer}>(.*?)</{answer}>", re.DOTALL)

    def read(self, question: Question, trajectory: Trajectory) -> Reading:
        """What the terms need to know of `trajectory`."""
        return Reading(
            question,
            trajectory,
            answer=self._last_match(question, trajectory) if self._over_prompt else trajectory.answer,
            well_formed=self._well_formed(trajectory.turns),
            found_in=self._found_in(trajectory.turns, question.answers),
            answer_tags=count_answer_tags(trajectory.turns, self._tags.answer),
        )

    def _last_match(self, question: Question, trajectory: Trajectory) -> str | None:
        """Search-R1's extraction: one match alone is taken to be the prompt's example."""
        found = self._answer.findall(question.prompt + trajectory.response)
        return str(found[-1]).strip() if len(found) > 1 else None

    def _well_formed(self, turns: Sequence[Turn]) -> bool:
        if not turns:
            return False
        *before, last = turns
        return all(
            bool(act := self._carried_out(turn)) and self._thinks_and(act, turn.text) for turn in before
        ) and self._thinks_and(self._tags.answer, last.text)

    def _carried_out(self, turn: Turn) -> str:
        """The tag of what the environment has answered, empty where it has not."""
        if turn.action is Action.TOOL and turn.observation:
            return self._tools[turn.tool]
        return self._tags.search if searched(turn) else ""

    def _thinks_and(self, act: str, text: str) -> bool:
        """Whether `text` is a thought and an element `act`, without any other tag."""
        pieces = self._tag.split(text)
        tags, outside = pieces[1::2], pieces[::4]
        return tags == [f"<{THINK}>", f"</{THINK}>", f"<{act}>", f"</{act}>"] and not "".join(outside).strip()

    def _found_in(self, turns: Sequence[Turn], answers: Sequence[str]) -> int | None:
        return next(
            (
                number
                for number, turn in enumerate(turns)
                if searched(turn) and not turn.tool_error and contains(self._retrieved(turn), answers)
            ),
            None,
        )

    def _retrieved(self, turn: Turn) -> str:
        """The observation without its own tags, whose word might be an answer."""
        opening, closing = f"<{self._tags.information}>", f"</{self._tags.information}>"
        return turn.observation.strip().removeprefix(opening).removesuffix(closing)


def count_answer_tags(turns: Sequence[Turn], tag: str) -> int:
    """Opening or closing tags that the policy wrote, whichever are more. Pages and messages may have their own."""
    return max(sum(turn.text.count(one) for turn in turns) for one in (f"<{tag}>", f"</{tag}>"))


def searched(turn: Turn) -> bool:
    """Whether a search was carried out, as `Trajectory.searches` counts them."""
    return turn.action is Action.SEARCH and bool(turn.observation)
