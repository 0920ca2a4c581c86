"""An answer as a line of a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rlsys.orchestrator.evaluation.evaluate import Answered


def answer_row(one: Answered) -> dict[str, Any]:
    """An answer as a line of `answers.jsonl`."""
    question, trajectory = one.question, one.trajectory
    return {
        "set": question.data_source,
        "uid": question.uid,
        "sample": trajectory.sample,
        "question": question.text or question.prompt,
        "golden_answers": list(question.answers),
        "answer": trajectory.answer,
        **asdict(one.scores),
        "finish": str(trajectory.finish),
        "searches": trajectory.searches,
        "search_errors": one.search_errors,
        "tokens": one.tokens,
        "response": trajectory.response,
    }


def answer_line(one: Answered) -> str:
    """`answer_row` as JSON, without what UTF-8 cannot say, which a model's tokenizer may produce."""
    text = json.dumps(answer_row(one), ensure_ascii=False) + "\n"
    return text.encode("utf-8", "replace").decode("utf-8")
