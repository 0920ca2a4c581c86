"""Writes scripted episodes as text, for policies with different behaviours.

A trace is one string: the prompt, then turns and observations as the agent joins them, up to the last `</answer>`. It
must be tokenised as one string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from examples.searchr1.tiny.passages import observation

SPELLED = {"timezone": "time zone"}
"""Relation -> its words in a passage, if they differ from its name."""
OBSERVATION = re.compile(r"\n\n<information>.*?</information>\n\n", re.DOTALL)


class Behaviour(StrEnum):
    """Behaviour of a scripted policy."""

    RIGHT = "right"
    """Search for every fact, then answer from the passages."""
    GUESS = "guess"
    """Answer at once."""
    STOP = "stop"
    """Search once for a two-hop question, then guess."""


@dataclass(frozen=True, slots=True)
class Step:
    """One search of the right path and its passages."""

    query: str
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A question with its right path; a trace of any behaviour can be written from it."""

    prompt: str
    relation: str
    steps: tuple[Step, ...]
    answer: str
    guess: str
    """A possible value of the relation, given without a search."""


def write_trace(script: Script, behaviour: Behaviour) -> str:
    """Write the whole episode. `STOP` needs a script of two steps.

    Before it uses a fact, the policy repeats it in the passage's words, so that the value follows the same words as in
    the passage. This is the simplest form of copying and the first that is learned.
    """
    if behaviour is Behaviour.GUESS:
        return script.prompt + _answer("I know this.", script.guess)
    text = write_opening(script)
    if behaviour is Behaviour.STOP:
        return text + observation(script.steps[0].contents) + _answer("I know the rest.", script.guess)
    for step, following in pairwise(script.steps):
        text += observation(step.contents) + _search(state("country", following.query), following.query)
    found = state(script.relation, script.answer)
    return text + observation(script.steps[-1].contents) + _answer(found, script.answer)


def write_opening(script: Script) -> str:
    """Write the prompt and the first search, up to the end of its query."""
    return script.prompt + _search("I need to search.", script.steps[0].query)


def state(relation: str, value: str) -> str:
    """Return a fact as passages state it: the relation's words, then the value."""
    return f"{SPELLED.get(relation, relation)} {value}"


def observation_spans(trace: str) -> Sequence[tuple[int, int]]:
    """Return the character ranges [start, end) of the observations in `trace`."""
    return [match.span() for match in OBSERVATION.finditer(trace)]


def _search(thought: str, query: str) -> str:
    return f"<think> {thought} </think>\n<search> {query} </search>"


def _answer(thought: str, answer: str) -> str:
    return f"<think> {thought} </think>\n<answer> {answer} </answer>"


def write_drill(contents: Sequence[str], items: Sequence[tuple[str, str, str]]) -> str:
    """Write passages, then several look-ups of (place, relation, value).

    No episode has this form. It contains many copies from the same passages, so that copying, which takes longest to
    learn, is trained on few tokens.
    """
    asked = [
        f"<search> {place} </search>\n{_answer(state(relation, value), value)}\n" for place, relation, value in items
    ]
    return observation(contents) + "".join(asked)


def write_repetition(names: Sequence[str], times: int) -> str:
    """Write the same names in the same order, `times` times: the simplest text from which a model learns to copy."""
    return "".join(f" {name}" for name in names) * times
