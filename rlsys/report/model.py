"""Everything a page shows of runs, in plain JSON types: what `rlsys report` puts into its file and `rlsys watch` serves.

Contract: nothing of a run's content raises; a part that is missing or damaged is None here and a sentence in the run's
`problems`. What is large is in chunks, which are handed to `sink` as they come up, or read again one by one with
`read_chunk`: lists of trajectories (`rlsys.report.trajectories.row_of`) or of answers. A chunk keeps its number while a run
goes on, as trajectories and answers are numbered apart and only come to be more.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from rlsys.config.compose import as_dict
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError
from rlsys.files import json_safe
from rlsys.observe.kept import Kept, kept_file, kept_lines, read_kept_step, read_row
from rlsys.observe.run_folder import RunFolder
from rlsys.observe.timeline import TIMELINE
from rlsys.report import drift, trajectories
from rlsys.report import time as time_use
from rlsys.report.audit import tokens
from rlsys.report.audit.run import audit_run
from rlsys.report.digests import Digest, Digests, sampling_of
from rlsys.report.life import life_here
from rlsys.report.measured import measured_rows

Sink = Callable[[int, list[Any]], None]
"""Takes a chunk's number and content."""

NUMBERS = 1_000_000
"""Of chunks: so many for the trajectories of the first run, then for its answers, then for the next run's."""
ANSWERS = 200
"""Answers of an evaluation that are unpacked together, at most."""


def build(runs: Sequence[RunFolder], sink: Sink | None = None, audited: bool = True) -> dict[str, Any]:
    """The model of `runs`. Without `audited` the token audit, which needs the tokenizer and a while, is left out.

    `sink` gets every chunk, in order of their numbers; no more than one is held at a time.
    """
    return {
        "made": time.time(),
        "runs": [
            _run(run, name, 2 * place * NUMBERS, sink, Memory(), audited)
            for place, (run, name) in enumerate(zip(runs, names_of(runs), strict=True))
        ],
    }


class Memory:
    """What building the model of one run again and again need not do twice: reading steps, and the audit."""

    def __init__(self) -> None:
        self.digests = Digests()
        self._audit: tuple[Any, dict[str, Any]] | None = None

    def build(self, run: RunFolder, audited: bool) -> dict[str, Any]:
        """As the function `build` of `run` alone, which is the same run at every call."""
        return {"made": time.time(), "runs": [_run(run, run.name, 0, None, self, audited)]}

    def audit(self, run: RunFolder, digests: Sequence[Digest]) -> dict[str, Any]:
        """The token audit; why there is none, as `problem`, where the tokenizer is not here."""
        made_of = run.config, [digest.stamp for digest in digests]
        if self._audit is None or self._audit[0] != made_of:
            try:
                # What cannot be read was said when the steps were.
                self._audit = made_of, tokens.as_json(audit_run(replace(run, problems=[])))
            except UserError as problem:
                return {"problem": str(problem)}
        return self._audit[1]


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """What each run is called: its folder, with the one around it where another has the same."""
    names = Counter(run.name for run in runs)
    return [run.name if names[run.name] == 1 else f"{run.path.resolve().parent.name}/{run.name}" for run in runs]


def read_chunk(runs: Sequence[RunFolder], model: Mapping[str, Any], number: int) -> list[Any] | None:
    """Chunk `number` of the model that was built of `runs`; None if there is none of it (any more)."""
    for run, of_run in zip(runs, model["runs"], strict=True):
        kept = of_run["trajectories"]
        if kept and 0 <= (place := number - kept["first_chunk"]) < len(kept["chunks"]):
            step, first, count = kept["chunks"][place]
            return [trajectories.row_of(one) for one in _part(run, step, first, count)] or None
        for evaluation in of_run["evaluations"]:
            if 0 <= (place := number - evaluation["first_chunk"]) < evaluation["chunks"]:
                return run.answers(evaluation["step"])[place * ANSWERS : (place + 1) * ANSWERS] or None
    return None


def _part(run: RunFolder, step: int, first: int, count: int) -> list[Kept]:
    """`count` trajectories of `step` from the one at `first` on; others are not parsed, unless rows are damaged."""
    file = kept_file(run.path, step)
    if not any(file.name in problem for problem in run.problems):
        with suppress(OSError, EOFError, zlib.error, ValueError):
            return [read_row(line) for line in islice(kept_lines(file), first, first + count)]
    return list(islice(read_kept_step(run.path, step, lambda _: None), first, first + count))


def _run(run: RunFolder, name: str, chunk: int, sink: Sink | None, memory: Memory, audited: bool) -> dict[str, Any]:
    rows = run.rows
    digests = memory.digests.of(run, trajectories.Chunks(chunk, sink) if sink else None)
    kept, drifted = _trajectories(run, digests, chunk)
    evaluations = list(_evaluations(run, chunk + NUMBERS, sink))
    names = sorted({name for row in rows for name in row} - {"step", "time"})
    return {
        "name": name,
        "path": str(run.path),
        "config": (settings := flat(run.config)),
        "changed": _changed(settings),
        "lives": [json_safe(asdict(life)) for life in run.lives],
        "status": json_safe(run.status),
        "life": asdict(life_here(run.status, run.summary is not None)),
        "summary": json_safe(run.summary),
        "steps": [row["step"] for row in rows],
        "times": [json_safe(row.get("time")) for row in rows],
        "metrics": {name: [_figure(row.get(name)) for row in rows] for name in names},
        "evaluations": evaluations,
        "reference": json_safe(run.reference),
        "measured": measured_rows(run),
        "time": _time(run),
        "trajectories": kept,
        "drift": drifted,
        "audit": memory.audit(run, digests) if audited and kept else None,
        "problems": list(run.problems),
    }


def _time(run: RunFolder) -> dict[str, Any] | None:
    try:
        steps = run.timeline()
        return time_use.as_json(time_use.time_report(steps)) if steps else None
    except (TypeError, ValueError, AttributeError):
        run.problems.append(f"{TIMELINE} has spans that are none: left out.")
        return None


def _trajectories(
    run: RunFolder, digests: Sequence[Digest], first_chunk: int
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Index and drift of what was kept."""
    index = trajectories.Index()
    for digest in digests:
        index.extend(digest.index)
    if not digests:
        next(run.trajectories(), None)  # Says that there are none.
    known = index.as_json(first_chunk)
    if known is None:
        return None, None
    return known, drift.as_json(drift.report_of([digest.drift for digest in digests], sampling_of(run)))


def _evaluations(run: RunFolder, chunk: int, sink: Sink | None) -> Iterator[dict[str, Any]]:
    """Each evaluation's row with the chunks of its answers."""
    for row in run.evaluations:
        answers = run.answers(row["step"])
        parts = [answers[start : start + ANSWERS] for start in range(0, len(answers), ANSWERS)]
        for place, part in enumerate(parts):
            if sink is not None:
                sink(chunk + place, part)
        yield {**json_safe(row), "answers": len(answers), "first_chunk": chunk, "chunks": len(parts)}
        chunk += len(parts)


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`config` with dotted keys, as they are written on a command line."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = json_safe(value) if not isinstance(value, Mapping) else {}
    return found


def _changed(settings: Mapping[str, Any]) -> list[str]:
    """Those of the flat `settings` that are not the default here."""
    defaults = flat(as_dict(RunConfig()))
    return [key for key, value in settings.items() if key not in defaults or defaults[key] != value]


def _figure(value: Any) -> float | None:
    """A metric; None for what is no number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
