"""The terms of the reward that follow from an episode alone. Pure.

Everything is read from the turns: what the policy wrote in `Turn.text`, what the environment said in
`Turn.observation`. So an `<information>` that the policy writes is no retrieval (it breaks the structure), and
an answer tag in the prompt, in a passage or in the invalid-action message is no answer. Only
`compat.answer_over_prompt` reads the answer as Search-R1's code does.

A term gives [slots] finite values, one a turn and at least one, without its weight; what concerns the whole episode
is on its last turn. Formulas and sources are in docs/rewards.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlsys.config.schema import CompatConfig, RewardConfig, TagsConfig, TaskConfig
from rlsys.data.answers import contains, exact_match, f1, sub_exact_match
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Trajectory, Turn

_THINK = "think"
"""The tag of reasoning, which the protocol does not know but the structure asks for."""
JUDGE = "judge"
"""The built-in term that is not pure."""
PLACEHOLDERS = ("{question}", "{answers}", "{answer}")
"""Parts of a judge's prompt that are filled in."""
ALIASES = {"correct_answer": "exact_match"}
"""Second name -> first name."""
PENALTIES = frozenset({"search_penalty", "invalid_format", "invalid_turns", "overlong"})
"""Those that grow with what is not wanted: their weights are below 0."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward of one episode."""

    reward: float
    turn_rewards: tuple[float, ...]
    """[turns], at least one: what of the reward fell on each turn."""
    parts: Mapping[str, float]
    """Term -> its value over the episode, unweighted."""


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

    def each_turn(self, value_of: Callable[[Turn], bool]) -> list[float]:
        """[slots] 1 for each turn of which `value_of` holds, 0 for the others."""
        return [float(value_of(turn)) for turn in self.trajectory.turns] or [0.0]


PureTerm = Callable[[Reading], Sequence[float]]


class Reader:
    """Reads episodes of a task with certain tags. Stateless; `read` raises on no text."""

    def __init__(self, tags: TagsConfig, compat: CompatConfig, tools: Mapping[str, str]) -> None:
        """`tools` are the tags of the task's own tools, by name."""
        self._tags = tags
        self._tools = tools
        self._over_prompt = compat.answer_over_prompt
        words = (_THINK, tags.search, tags.information, tags.answer, *tools.values())
        self._tag = re.compile(f"(</?(?:{'|'.join(map(re.escape, words))})>)")
        answer = re.escape(tags.answer)
        self._answer = re.compile(f"<{answer}>(.*?)</{answer}>", re.DOTALL)

    def read(self, question: Question, trajectory: Trajectory) -> Reading:
        """What the terms need to know of `trajectory`."""
        turns = trajectory.turns
        found = (number for number, turn in enumerate(turns) if self._retrieved(turn, question.answers))
        return Reading(
            question,
            trajectory,
            answer=self._last_match(question, trajectory) if self._over_prompt else trajectory.answer,
            well_formed=bool(turns)
            and all(bool(act := self._carried_out(turn)) and self._thinks_and(act, turn.text) for turn in turns[:-1])
            and self._thinks_and(self._tags.answer, turns[-1].text),
            found_in=next(found, None),
            answer_tags=count_answer_tags(turns, self._tags.answer),
        )

    def _last_match(self, question: Question, trajectory: Trajectory) -> str | None:
        """Search-R1's extraction: one match alone is taken to be the prompt's example."""
        found = self._answer.findall(question.prompt + trajectory.response)
        return str(found[-1]).strip() if len(found) > 1 else None

    def _carried_out(self, turn: Turn) -> str:
        """The tag of what the environment has answered, empty where it has not."""
        if turn.action is Action.TOOL and turn.observation:
            return self._tools[turn.tool]
        return self._tags.search if _searched(turn) else ""

    def _thinks_and(self, act: str, text: str) -> bool:
        """Whether `text` is a thought and an element `act`, without any other tag."""
        pieces = self._tag.split(text)
        tags, outside = pieces[1::2], pieces[::4]
        return tags == [f"<{_THINK}>", f"</{_THINK}>", f"<{act}>", f"</{act}>"] and not "".join(outside).strip()

    def _retrieved(self, turn: Turn, answers: Sequence[str]) -> bool:
        """Whether a search brought an answer; the tags around what it brought, whose word might be one, do not count."""
        if not _searched(turn) or turn.tool_error:
            return False
        opening, closing = f"<{self._tags.information}>", f"</{self._tags.information}>"
        return contains(turn.observation.strip().removeprefix(opening).removesuffix(closing), answers)


def count_answer_tags(turns: Sequence[Turn], tag: str) -> int:
    """Opening or closing tags that the policy wrote, whichever are more. Pages and messages may have their own."""
    return max(sum(turn.text.count(mark) for turn in turns) for mark in (f"<{tag}>", f"</{tag}>"))


def pure_terms(config: RewardConfig, task: TaskConfig) -> Mapping[str, PureTerm]:
    """Name -> term, of all that are built in but the judge."""
    return {
        "exact_match": _of_answer(exact_match),
        "correct_answer": _of_answer(exact_match),
        "sub_em": _of_answer(sub_exact_match),
        "f1": _of_answer(f1),
        "format": lambda reading: reading.at_end(_format_score(reading, config)),
        "retrieval": lambda reading: [float(slot == reading.found_in) for slot in range(reading.slots)],
        "search_penalty": lambda reading: reading.each_turn(_searched),
        "invalid_format": lambda reading: reading.at_end(float(not reading.well_formed)),
        "invalid_turns": lambda reading: reading.each_turn(lambda turn: turn.action is Action.INVALID),
        "overlong": lambda reading: reading.at_end(_overlong(reading, config, task)),
    }


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft over-long punishment (2503.14476, eq. 13) with its sign turned: from 0 to 1."""
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def _of_answer(measure: Callable[[str, Sequence[str]], float]) -> PureTerm:
    """The term that compares the answer with the accepted ones; 0 without an answer."""

    def term(reading: Reading) -> list[float]:
        answer = reading.answer
        return reading.at_end(0.0 if answer is None else float(measure(answer, reading.question.answers)))

    return term


def _format_score(reading: Reading, config: RewardConfig) -> float:
    """Search-R1's qa_em_format, for the settings `structure_score`, `final_score` and `retrieval_score`."""
    if reading.answer is not None and exact_match(reading.answer, reading.question.answers):
        return 1.0 if reading.well_formed else 1.0 - config.structure_score
    if reading.well_formed:
        return config.structure_score + config.retrieval_score * (reading.found_in is not None)
    return config.final_score if reading.answer is not None else 0.0


def _overlong(reading: Reading, config: RewardConfig, task: TaskConfig) -> float:
    prompt, limit = reading.trajectory.prompt_length, config.overlong_limit
    limit = task.max_total_tokens - prompt if limit is None else limit
    return overlong_penalty(len(reading.trajectory.tokens) - prompt, limit, config.overlong_buffer)


def _searched(turn: Turn) -> bool:
    """Whether a search was carried out, as `Trajectory.searches` counts them."""
    return turn.action is Action.SEARCH and bool(turn.observation)
