"""What is asked, and how answers to it are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlsys.agent.trajectory import Trajectory
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.data.rows import read_questions
from rlsys.errors import UserError
from rlsys.evaluation.scores import Scores, scores_of
from rlsys.evaluation.sets import Source
from rlsys.reward.reading import Reader
from rlsys.tools.load import tool_tags


def heldout_score(config: RunConfig) -> Callable[[Trajectory, Question], Scores]:
    """What the answer is worth that `compat.answer_over_prompt` says."""
    task = config.task
    reader = Reader(task.tags, config.compat, tool_tags(task.tools))

    def score(trajectory: Trajectory, question: Question) -> Scores:
        return scores_of(reader.read(question, trajectory).answer, question.answers)

    return score


def heldout_questions(config: RunConfig) -> list[Question]:
    """Those that a run holds out. Raises UserError if `compat.validation_batch` leaves none."""
    return _whole_batches(
        read_questions(config.task.eval_path, config.eval.limit), config.compat.validation_batch
    )


def questions_of(sources: Sequence[Source], config: RunConfig) -> list[Question]:
    """At most `eval.limit` questions of each source, each with an id of its own and the name of its set.

    Raises UserError as `heldout_questions` does.
    """
    found = []
    for source in sources:
        questions = read_questions(source.path, config.eval.limit)
        for one in _whole_batches(questions, config.compat.validation_batch):
            # Files of one name, such as test.jsonl of two sets, number their questions alike.
            uid = one.uid if len(sources) == 1 else f"{source.label}/{one.uid}"
            found.append(replace(one, uid=uid, data_source=one.data_source or source.label))
    return found


def _whole_batches(questions: list[Question], batch: int | None) -> list[Question]:
    if batch is None:
        return questions
    if len(questions) < batch:
        raise UserError(
            f"compat.validation_batch={batch} leaves out all of the {len(questions)} held-out questions: lower it, or "
            "set it to null."
        )
    return questions[: len(questions) // batch * batch]
