"""Builds the model of a page, all that it shows of runs in plain JSON types: for `rlsys report` and for `rlsys watch`.

Contract: nothing of a run's content raises; a part that is missing or damaged is None here and a sentence in the run's
`problems`. What is large is in chunks, which are handed to `sink` as they come up, or read again one by one with
`read_chunk`: lists of trajectories (`rlsys.report.trajectories.row_of`) or of answers. A chunk keeps its number while a run
goes on, as trajectories and answers are numbered apart and only come to be more.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rlsys.config.compose import as_dict, recorded
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError
from rlsys.files import json_safe
from rlsys.observe.kept import Kept, kept_file, kept_lines, kept_steps, read_kept_step, read_row
from rlsys.observe.records import TIMELINE
from rlsys.observe.run_folder import RunFolder, section
from rlsys.report import drift, time_use
from rlsys.report.audit import token_audit
from rlsys.report.life import life_here
from rlsys.report.trajectories import Chunks, TrajectoryIndex, row_of

Sink = Callable[[int, list[Any]], None]  # Takes a chunk's number and content
Stamp = tuple[int, int, int]  # Inode, bytes and ns of the last change of a file

NUMBERS = 1_000_000
"""Of chunks: so many for the trajectories of the first run, then for its answers, then for the next run's."""
ANSWERS = 200  # Answers of an evaluation that are unpacked together, at most


def build(runs: Sequence[RunFolder], sink: Sink | None = None, audited: bool = True) -> dict[str, Any]:
    """The model of `runs`. Without `audited` the token audit, which needs the tokenizer and a while, is left out.

    `sink` gets every chunk, in order of their numbers; no more than one is held at a time.
    """
    named = enumerate(zip(runs, names_of(runs), strict=True))
    models = [_run(run, name, 2 * place * NUMBERS, sink, Memory(), audited) for place, (run, name) in named]
    return {"made": time.time(), "runs": models}


@dataclass(frozen=True, slots=True)
class Digest:
    """What a page needs of the kept trajectories of one step, added up."""

    stamp: Stamp | None
    sampling: Mapping[str, Any]  # By which its drift was told
    index: TrajectoryIndex
    drift: drift.DriftTally
    problems: tuple[str, ...]  # What could not be read


class Memory:
    """Keeps what building the model of one run again and again need not do twice: reading steps, and the audit.

    A step's file never changes, so no more than its digest is held. A file that is another one than before (its steps were
    done again) is read again; steps that are gone are forgotten.
    """

    def __init__(self) -> None:
        self._known: dict[int, Digest] = {}
        self._audit: tuple[Any, dict[str, Any]] | None = None

    def build(self, run: RunFolder, audited: bool) -> dict[str, Any]:
        """As the function `build` of `run` alone, which is the same run at every call."""
        return {"made": time.time(), "runs": [_run(run, run.name, 0, None, self, audited)]}

    def digests(self, run: RunFolder, chunks: Chunks | None) -> list[Digest]:
        """Those of all steps of `run`, in order; what could not be read is added to its problems.

        `chunks` gets the rows of what is read; with them use a new object, that reads everything.
        """
        sampling = _sampling_of(run)
        digests: dict[int, Digest] = {}
        for step in kept_steps(run.path):
            stamp, known = _stamp(kept_file(run.path, step)), self._known.get(step)
            if known is None or (known.stamp, known.sampling) != (stamp, sampling):
                known = _digest(run.path, step, stamp, sampling, chunks)
            digests[step] = known
            run.problems.extend(problem for problem in known.problems if problem not in run.problems)
        self._known = digests
        return list(digests.values())

    def audit(self, run: RunFolder, digests: Sequence[Digest]) -> dict[str, Any]:
        """The token audit; why there is none, as `problem`, where the tokenizer is not here."""
        made_of = run.config, [digest.stamp for digest in digests]
        if self._audit is None or self._audit[0] != made_of:
            try:
                # What cannot be read was said when the steps were.
                self._audit = made_of, token_audit.as_json(token_audit.audit_run(replace(run, problems=[])))
            except UserError as problem:
                return {"problem": str(problem)}
        return self._audit[1]


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """The name of each run: its folder, with the one around it where another has the same."""
    names = Counter(run.name for run in runs)
    return [run.name if names[run.name] == 1 else f"{run.path.resolve().parent.name}/{run.name}" for run in runs]


def read_chunk(runs: Sequence[RunFolder], model: Mapping[str, Any], number: int) -> list[Any] | None:
    """Chunk `number` of the model that was built of `runs`; None if there is none of it (any more)."""
    for run, of_run in zip(runs, model["runs"], strict=True):
        kept = of_run["trajectories"]
        if kept and 0 <= (place := number - kept["first_chunk"]) < len(kept["chunks"]):
            return [row_of(trajectory) for trajectory in _part(run, *kept["chunks"][place])] or None
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
    digests = memory.digests(run, Chunks(chunk, sink) if sink else None)
    kept, drifted = _trajectories(run, digests, chunk)
    evaluations = list(_evaluations(run, chunk + NUMBERS, sink))
    names = sorted({name for row in rows for name in row} - {"step", "time"})
    known, defaults = flat(recorded(run.config)), flat(as_dict(RunConfig()))
    settings = {key: value for key, value in flat(run.config).items() if key in known}
    return {
        "name": name,
        "path": str(run.path),
        "config": settings,
        "changed": [key for key, value in settings.items() if key not in defaults or defaults[key] != value],
        "lives": [json_safe(asdict(life)) for life in run.lives],
        "status": json_safe(run.status),
        "life": asdict(life_here(run.status, run.summary is not None)),
        "summary": json_safe(run.summary),
        "steps": [row["step"] for row in rows],
        "times": [json_safe(row.get("time")) for row in rows],
        "metrics": {name: [_figure(row.get(name)) for row in rows] for name in names},
        "evaluations": evaluations,
        "reference": json_safe(run.reference),
        "measured": _measured(run),
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
    index = TrajectoryIndex()
    for digest in digests:
        index.extend(digest.index)
    if not digests:
        next(run.trajectories(), None)  # Notes as a problem that there are none.
    columns = index.as_json(first_chunk)
    if columns is None:
        return None, None
    return columns, drift.as_json(drift.report_of([digest.drift for digest in digests], _sampling_of(run)))


def _sampling_of(run: RunFolder) -> Mapping[str, Any]:
    """How `run` draws tokens."""
    return section(run.config, "rollout", "sampling")


def _digest(path: Path, step: int, stamp: Stamp | None, sampling: Mapping[str, Any], chunks: Chunks | None) -> Digest:
    index, problems = TrajectoryIndex(), list[str]()

    def indexed(kept: Iterable[Kept]) -> Iterator[Kept]:
        for trajectory in kept:
            index.add(trajectory)
            yield trajectory

    kept = indexed(read_kept_step(path, step, problems.append))
    tally = drift.tally_step(step, chunks.passing(kept) if chunks else kept, sampling)
    return Digest(stamp, sampling, index, tally, tuple(problems))


def _stamp(file: Path) -> Stamp | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


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
    settings: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{name}.")
        else:
            settings[name] = json_safe(value)
    return settings


def _figure(value: Any) -> float | None:
    """A metric; None for what is no number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _measured(run: RunFolder) -> list[dict[str, Any]]:
    """What `rlsys eval` has measured into the run's folder: a row for each folder and set, in order of time.

    The average of several sets is the last, whose `set` is None. What holds no figures of an evaluation is a sentence in
    the run's `problems`.
    """
    rows = []
    for folder, results in run.measured():
        try:
            rows += _rows(folder, results, run.path)
        except (KeyError, TypeError, ValueError, AttributeError):
            run.problems.append(f"{folder}/results.json holds no figures of an evaluation: left out.")
    return sorted(rows, key=lambda row: str(row["started"]))


def _rows(folder: str, results: Mapping[str, Any], run: Path) -> list[dict[str, Any]]:
    """Of one folder; as `rlsys.apps.evaluation.result_files` writes them, or one of many errors."""
    settings, sets = results["settings"], list(results["sets"].values())
    model = Path(settings["model"])
    above = next((around for around in (run, run.resolve()) if model.is_relative_to(around)), None)
    asked = {
        "folder": folder,
        "model": settings["model"] if above is None else str(model.relative_to(above)),
        **{key: settings.get(key) for key in ("engine", "baseline", "samples", "temperature", "started")},
        "level": _not_negative(results["interval_level"]),
    }
    rows = [{**asked, "set": str(of_set["name"]), **_figures(of_set)} for of_set in sets]
    if len(sets) > 1:
        rows.append({**asked, "set": None, **_figures(results["average"])})
    return rows


def _figures(of_set: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: _not_negative(of_set[key]) for key in ("questions", "searches", "search_errors")},
        **{key: _estimate(of_set[key]) for key in ("em", "f1", "sub_em")},
        "pass_at": {str(int(k)): _estimate(chance) for k, chance in of_set["pass_at"].items()},
    }


def _estimate(given: Mapping[str, Any]) -> dict[str, float]:
    return {part: _not_negative(given[part]) for part in ("mean", "low", "high")}


def _not_negative(figure: Any) -> float:
    """A figure of an evaluation: none is negative. Raises TypeError or ValueError for what is none."""
    if not 0 <= figure < math.inf:
        raise ValueError(figure)
    return figure
