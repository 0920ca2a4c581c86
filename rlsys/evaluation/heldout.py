"""What a run holds out, and how answers to it are scored."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.agent.trajectory import Trajectory
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.data.rows import read_questions
from rlsys.errors import UserError
from rlsys.reward.exact_match import exact_match
from rlsys.reward.reading import Reader


def heldout_score(config: RunConfig) -> Callable[[Trajectory, Question], float]:
    """Exact match, 1 or 0, of the answer that `compat.answer_over_prompt` says."""
    reader = Reader(config.task.tags, config.compat)

    def score(trajectory: Trajectory, question: Question) -> float:
        answer = reader.read(question, trajectory).answer
        return float(answer is not None and exact_match(answer, question.answers))

    return score


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
