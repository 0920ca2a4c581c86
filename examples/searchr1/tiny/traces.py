"""Scripted episodes as text: what a policy that behaves in a given way would have written.

A trace is one string: the prompt, then turns and observations as the agent joins them, up to the last
`</answer>`. It must be tokenised as one string, as the agent tokenises the context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from examples.searchr1.tiny.passages import observation

SPELLED = {"timezone": "time zone"}
"""Relations whose words in a passage are not their name."""
OBSERVATION = re.compile(r"\n\n<information>.*?</information>\n\n", re.DOTALL)


class Behaviour(StrEnum):
    """How a scripted policy goes about a question."""

    RIGHT = "right"
    """Search for what is needed, then answer from what came back."""
    GUESS = "guess"
    """Answer at once."""
    STOP = "stop"
    """Search once for a two-hop question, then guess."""


@dataclass(frozen=True, slots=True)
class Step:
    """One search of the right path and the passages that come back."""

    query: str
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A question with its right path, from which any behaviour can be written."""

    prompt: str
    relation: str
    steps: tuple[Step, ...]
    answer: str
    guess: str
    """Some value of the relation that was not looked up."""


def write_trace(script: Script, behaviour: Behaviour) -> str:
    """The whole episode. `STOP` needs a script of two steps.

    Before it acts on what it has read, the policy says it in the passage's own words, so that the value
    follows the same words as in the passage: the plainest form of copying, and the first to be learned.
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
    """The prompt and the first search, up to its query."""
    return script.prompt + _search("I need to search.", script.steps[0].query)


def state(relation: str, value: str) -> str:
    """A fact as the passages state it: the relation's words, then the value."""
    return f"{SPELLED.get(relation, relation)} {value}"


def observation_spans(trace: str) -> Sequence[tuple[int, int]]:
    """Character ranges [start, end) of `trace` that the environment wrote."""
    return [match.span() for match in OBSERVATION.finditer(trace)]


def _search(thought: str, query: str) -> str:
    return f"<think> {thought} </think>\n<search> {query} </search>"


def _answer(thought: str, answer: str) -> str:
    return f"<think> {thought} </think>\n<answer> {answer} </answer>"


def write_drill(contents: Sequence[str], items: Sequence[tuple[str, str, str]]) -> str:
    """Passages, then one look-up after another: (place, relation, value) each.

    No episode reads like this. It asks for many copies out of the same passages, so that the skill that
    takes longest to learn is practised on few tokens.
    """
    asked = [
        f"<search> {place} </search>\n{_answer(state(relation, value), value)}\n" for place, relation, value in items
    ]
    return observation(contents) + "".join(asked)


def write_repetition(names: Sequence[str], times: int) -> str:
    """The same names in the same order again and again: the plainest thing that copying can be learned from."""
    return "".join(f" {name}" for name in names) * times
