"""Where prompts come from: an endless, seeded shuffle of the questions.

Invariant: every epoch hands out each question exactly once, in an order that depends on the seed and
the epoch alone. `position` counts what was handed out; a source given that position goes on there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlsys.data.question import Question


class PromptSource:
    """Hands out questions; `position` is all of its state."""

    def __init__(self, questions: Sequence[Question], seed: int, position: int = 0) -> None:
        self._questions = list(questions)
        self._seed = seed
        self.position = position

    def take(self, count: int) -> list[Question]:
        """The next `count` questions, running on into the next epoch where one ends."""
        taken: list[Question] = []
        while len(taken) < count:
            epoch, start = divmod(self.position, len(self._questions))
            order = self._order(epoch)
            part = order[start : start + count - len(taken)]
            taken.extend(self._questions[index] for index in part)
            self.position += len(part)
        return taken

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._questions)))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order
