"""The files of an evaluation: figures and settings for programs, every answer, and a page for people.

Contract: each appears whole or not at all. `results.json` comes last: where it is, all are there. Until then the answers
that are known lie in `answers.partial.jsonl`, in the order in which they came.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlsys.apps.evaluation.how import How
from rlsys.apps.evaluation.page import render_page
from rlsys.apps.evaluation.sets import Source
from rlsys.apps.evaluation.summary import SetFigures, average, summarise
from rlsys.apps.evaluation.wanted import Wanted
from rlsys.config.compose import as_dict
from rlsys.files import json_safe, sha256_of, write_atomically
from rlsys.observe.environment import environment
from rlsys.orchestrator.evaluation.answers import answer_line
from rlsys.orchestrator.evaluation.evaluate import Answered, Evaluation
from rlsys.orchestrator.evaluation.intervals import LEVEL

RESULTS, ANSWERS, PAGE = "results.json", "answers.jsonl", "samples.html"
PARTIAL = "answers.partial.jsonl"


def write_results(
    evaluation: Evaluation, out: Path, settings: Mapping[str, Any], shown: int, seed: int
) -> list[SetFigures]:
    """Write the three files to `out`, at most `shown` right and as many wrong answers of each set to the page.

    Returns the figures of every set. `settings` are whatever tells how they came about.
    """
    sets = summarise(evaluation)
    write_atomically(out / ANSWERS, "".join(map(answer_line, evaluation.answered)))
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


def settings_of(wanted: Wanted, how: How, started: float, ended: float) -> dict[str, Any]:
    """The `settings` of an evaluation that began and ended at these times, in seconds since the epoch."""
    model, asked = wanted.model, wanted.config.eval
    return {
        "config": as_dict(wanted.config),
        "model": str(model.folder),
        "original": None if model.original is None else str(model.original),
        "step": model.step,
        "data": [_described(source) for source in wanted.sources],
        "limit": asked.limit,
        **asdict(how),
        "samples": asked.samples,
        "temperature": asked.temperature,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "seconds": round(ended - started, 1),
    }


@contextmanager
def noting(out: Path) -> Iterator[Callable[[Answered], None]]:
    """Write every answer to `answers.partial.jsonl` of `out` at once."""
    path = out / PARTIAL
    with path.open("w", encoding="utf-8") as lines:

        def note(one: Answered) -> None:
            lines.write(answer_line(one))
            lines.flush()

        try:
            yield note
        finally:
            if not path.stat().st_size:
                path.unlink()


def _described(source: Source) -> dict[str, str]:
    """A file of questions, so that it can be told from another."""
    return {"set": source.label, "path": str(source.path), "sha256": sha256_of(source.path)}
