"""An endless, seeded shuffle of the questions.

Invariants: every epoch hands out each question exactly once, in an order that depends on the seed and
the epoch alone; a question that was given back is handed out again before new ones. `position` counts
new ones; a source that is given the state of another goes on where that was.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.data.question import Question


@dataclass(frozen=True, slots=True)
class SourceState:
    """The place of a source. Questions are whole: one that the data file has no more is asked all the same."""

    position: int
    given_back: tuple[Question, ...]


class PromptSource:
    """Hands out questions."""

    def __init__(self, questions: Sequence[Question], seed: int, state: SourceState | None = None) -> None:
        self._questions = list(questions)
        self._seed = seed
        self._given_back = deque(state.given_back if state else ())
        self._epoch = -1
        self._order: list[int] = []
        self.position = state.position if state else 0

    def state(self) -> SourceState:
        """For another source of the same questions and seed to go on from."""
        return SourceState(self.position, tuple(self._given_back))

    def next(self) -> Question:
        """The next question, from the next epoch where one ends."""
        if self._given_back:
            return self._given_back.popleft()
        epoch, index = divmod(self.position, len(self._questions))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._questions)))
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
        self.position += 1
        return self._questions[self._order[index]]

    def give_back(self, question: Question) -> None:
        """Ask `question` again, after those that were given back before it."""
        self._given_back.append(question)
