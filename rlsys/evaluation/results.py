"""The files of an evaluation: figures and settings for programs, every answer, and a page for people.

Contract: each appears whole or not at all. `results.json` comes last: where it is, all are there. Until then the answers
that are known lie in `answers.partial.jsonl`, in the order in which they came.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlsys.evaluation.evaluate import Answered, Evaluation
from rlsys.evaluation.intervals import LEVEL
from rlsys.evaluation.page import render_page
from rlsys.evaluation.sets import Source
from rlsys.evaluation.summary import SetFigures, average, summarise
from rlsys.observe.environment import environment
from rlsys.observe.files import json_safe, write_atomically

RESULTS, ANSWERS, PAGE = "results.json", "answers.jsonl", "samples.html"
PARTIAL = "answers.partial.jsonl"


def write_results(
    evaluation: Evaluation, out: Path, settings: Mapping[str, Any], shown: int, seed: int
) -> list[SetFigures]:
    """Write the three files to `out`, at most `shown` right and as many wrong answers of each set to the page.

    Returns the figures of every set. `settings` are whatever tells how they came about.
    """
    sets = summarise(evaluation)
    write_atomically(out / ANSWERS, "".join(map(_line, evaluation.answered)))
    write_atomically(out / PAGE, render_page(evaluation, sets, shown, seed))
    results = {
        "settings": settings,
        "versions": environment(),
        "interval_level": LEVEL,
        "sets": {one.name: asdict(one) for one in sets},
        "average": asdict(average(sets)),
    }
    write_atomically(out / RESULTS, json.dumps(json_safe(results), indent=2) + "\n")
    (out / PARTIAL).unlink(missing_ok=True)
    return sets


@contextmanager
def noting(out: Path) -> Iterator[Callable[[Answered], None]]:
    """Write every answer to `answers.partial.jsonl` of `out` at once."""
    path = out / PARTIAL
    with path.open("w", encoding="utf-8") as lines:

        def note(one: Answered) -> None:
            lines.write(_line(one))
            lines.flush()

        try:
            yield note
        finally:
            if not path.stat().st_size:
                path.unlink()


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


def described(source: Source) -> dict[str, str]:
    """A file of questions, so that it can be told from another."""
    with source.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"set": source.label, "path": str(source.path), "sha256": digest}


def _line(one: Answered) -> str:
    """`answer_row` as JSON, without what UTF-8 cannot say, which a model's tokenizer may produce."""
    text = json.dumps(answer_row(one), ensure_ascii=False) + "\n"
    return text.encode("utf-8", "replace").decode("utf-8")
