"""What is asked, and how answers to it are scored."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.config.schema import RunConfig
from rlsys.data.question import Question, read_questions
from rlsys.data.trajectory import Trajectory
from rlsys.errors import UserError
from rlsys.orchestrator.evaluation.scores import Scores, scores_of
from rlsys.orchestrator.rewards.reading import Reader
from rlsys.rollout.tools.interface import tool_tags


def heldout_score(config: RunConfig) -> Callable[[Trajectory, Question], Scores]:
    """What the answer is worth that `compat.answer_over_prompt` says."""
    task = config.task
    reader = Reader(task.tags, config.compat, tool_tags(task.tools))

    def score(trajectory: Trajectory, question: Question) -> Scores:
        return scores_of(reader.read(question, trajectory).answer, question.answers)

    return score


def heldout_questions(config: RunConfig) -> list[Question]:
    """Those that a run holds out. Raises UserError if `compat.validation_batch` leaves none."""
    return whole_batches(read_questions(config.task.eval_path, config.eval.limit), config.compat.validation_batch)


def whole_batches(questions: list[Question], batch: int | None) -> list[Question]:
    """The questions that fill batches of `batch`; all without one. Raises UserError if they fill none."""
    if batch is None:
        return questions
    if len(questions) < batch:
        raise UserError(
            f"compat.validation_batch={batch} leaves out all of the {len(questions)} held-out questions: lower it, or "
            "set it to null."
        )
    return questions[: len(questions) // batch * batch]
