"""Where prompts come from: an endless, seeded shuffle of the questions.

Invariants: every epoch hands out each question exactly once, in an order that depends on the seed and
the epoch alone; a question that was given back is handed out again before new ones. `position` counts
new ones; a source that is given that position, and the questions that were given back, goes on there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

from rlsys.data.question import Question


class PromptSource:
    """Hands out questions."""

    def __init__(
        self,
        questions: Sequence[Question],
        seed: int,
        position: int = 0,
        given_back: Iterable[Question] = (),
    ) -> None:
        self._questions = list(questions)
        self._seed = seed
        self._given_back = deque(given_back)
        self._epoch = -1
        self._order: list[int] = []
        self.position = position

    @property
    def given_back(self) -> list[Question]:
        """Questions that wait to be asked again."""
        return list(self._given_back)

    def next(self) -> Question:
        """The next question, from the next epoch where one ends."""
        if self._given_back:
            return self._given_back.popleft()
        epoch, index = divmod(self.position, len(self._questions))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        self.position += 1
        return self._questions[self._order[index]]

    def give_back(self, question: Question) -> None:
        """Ask `question` again, after those that were given back before it."""
        self._given_back.append(question)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._questions)))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order
