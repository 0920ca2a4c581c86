"""Which questions a run holds out."""

from __future__ import annotations

from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.data.rows import read_questions
from rlsys.errors import UserError


def heldout_questions(config: RunConfig) -> list[Question]:
    """Those that evaluations ask. Raises UserError if `compat.validation_batch` leaves none."""
    questions = read_questions(config.task.eval_path, config.task.eval_limit)
    batch = config.compat.validation_batch
    if batch is None:
        return questions
    if len(questions) < batch:
        raise UserError(
            f"compat.validation_batch={batch} leaves out all of the {len(questions)} held-out questions: lower it, or "
            "set it to null."
        )
    return questions[: len(questions) // batch * batch]
