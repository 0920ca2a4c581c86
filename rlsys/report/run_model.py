"""Builds the page model, in JSON types, of one or more runs for `rlsys report` and `rlsys watch`.

Contract: no content of a run causes an error; a missing or damaged part is None in the model and a sentence in
`problems`. Trajectories (`row_of`) and evaluation answers are in chunks. Chunks go to `sink` during the build, or are
read again one by one with `read_chunk`. Chunk numbers are stable while a run grows: trajectories and answers are
numbered separately and only appended.
"""

from __future__ import annotations

import math
import os
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.config.compose import as_dict, flat, recorded
from rlsys.config.schema import RunConfig
from rlsys.data.trajectory import Action
from rlsys.errors import UserError
from rlsys.files import json_safe
from rlsys.observe.kept import (
    TrajectoryRecord,
    read_row,
    read_step_trajectories,
    trajectory_file,
    trajectory_lines,
    trajectory_steps,
)
from rlsys.observe.records import TIMELINE
from rlsys.observe.run_folder import RunFolder, section
from rlsys.observe.status import FINISHED, HEARTBEAT_S
from rlsys.report import drift, predicted, time_use, token_audit

Sink = Callable[[int, list[Any]], None]
"""Receives a chunk's number and content."""
Stamp = tuple[int, int, int]
"""Inode, size in bytes and modification time in ns of a file."""

NUMBERS = 1_000_000
"""Number of chunk numbers reserved for the trajectories of a run, and again for its answers."""
ANSWERS = 200
"""Maximum number of evaluation answers per chunk."""


def build(runs: Sequence[RunFolder], sink: Sink | None = None, audited: bool = True) -> dict[str, Any]:
    """Return the model of `runs`; `sink` receives each chunk, in order. `audited=False` leaves out the token audit."""
    named = enumerate(zip(runs, names_of(runs), strict=True))
    models = [_run(run, name, 2 * place * NUMBERS, sink, ModelCache(), audited) for place, (run, name) in named]
    return {"made": time.time(), "runs": models}


@dataclass(frozen=True, slots=True)
class Digest:
    """Accumulated trajectories of one step, sampled with `sampling`, and the problems met while reading them."""

    stamp: Stamp | None
    sampling: Mapping[str, Any]
    index: TrajectoryIndex
    drift: drift.DriftTally
    problems: tuple[str, ...]


class ModelCache:
    """Caches step digests and the token audit between builds of the model of one run.

    Reads a changed file again (its step was repeated) and forgets removed steps.
    """

    def __init__(self) -> None:
        self._known: dict[int, Digest] = {}
        self._audit: tuple[Any, dict[str, Any]] | None = None

    def build(self, run: RunFolder, audited: bool) -> dict[str, Any]:
        """Return the model of only `run`, as the function `build` does; every call must pass the same run."""
        return {"made": time.time(), "runs": [_run(run, run.name, 0, None, self, audited)]}

    def digests(self, run: RunFolder, chunks: Chunks | None) -> list[Digest]:
        """Return the digests of all steps of `run`, in order; adds unreadable parts to its problems.

        `chunks` receives the rows read. Cached steps are not read, so pass `chunks` only to a new `ModelCache`.
        """
        sampling = section(run.config, "rollout", "sampling")
        digests: dict[int, Digest] = {}
        for step in trajectory_steps(run.path):
            stamp, known = _stamp(trajectory_file(run.path, step)), self._known.get(step)
            if known is None or (known.stamp, known.sampling) != (stamp, sampling):
                known = _digest(run.path, step, stamp, sampling, chunks)
            digests[step] = known
            run.problems.extend(problem for problem in known.problems if problem not in run.problems)
        self._known = digests
        return list(digests.values())

    def audit(self, run: RunFolder, digests: Sequence[Digest]) -> dict[str, Any]:
        """Return the token audit, or {"problem": reason} if it cannot be made, for example without the tokenizer."""
        made_of = run.config, [digest.stamp for digest in digests]
        if self._audit is None or self._audit[0] != made_of:
            try:
                # Reading the digests has already reported unreadable parts.
                self._audit = made_of, token_audit.as_json(token_audit.audit_run(replace(run, problems=[])))
            except UserError as problem:
                return {"problem": str(problem)}
        return self._audit[1]


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """Return the display name of each run: the folder's name, or PARENT/NAME if several runs share the name."""
    names = Counter(run.name for run in runs)
    return [run.name if names[run.name] == 1 else f"{run.path.resolve().parent.name}/{run.name}" for run in runs]


def read_chunk(runs: Sequence[RunFolder], model: Mapping[str, Any], number: int) -> list[Any] | None:
    """Read chunk `number` of the `model` of `runs`; None if it does not exist (any more)."""
    for run, of_run in zip(runs, model["runs"], strict=True):
        kept = of_run["trajectories"]
        if kept and 0 <= (place := number - kept["first_chunk"]) < len(kept["chunks"]):
            return [row_of(trajectory) for trajectory in _part(run, *kept["chunks"][place])] or None
        for evaluation in of_run["evaluations"]:
            if 0 <= (place := number - evaluation["first_chunk"]) < evaluation["chunks"]:
                return run.answers(evaluation["step"])[place * ANSWERS : (place + 1) * ANSWERS] or None
    return None


def _part(run: RunFolder, step: int, first: int, count: int) -> list[TrajectoryRecord]:
    """Read `count` trajectories of `step` from index `first`; parses other rows only if the file has damaged rows."""
    file = trajectory_file(run.path, step)
    if not any(file.name in problem for problem in run.problems):
        with suppress(OSError, EOFError, zlib.error, ValueError):
            return [read_row(line) for line in islice(trajectory_lines(file), first, first + count)]
    return list(islice(read_step_trajectories(run.path, step, lambda _: None), first, first + count))


def _run(run: RunFolder, name: str, chunk: int, sink: Sink | None, cache: ModelCache, audited: bool) -> dict[str, Any]:
    rows = run.rows
    digests = cache.digests(run, Chunks(chunk, sink) if sink else None)
    index = TrajectoryIndex()
    for digest in digests:
        index.extend(digest.index)
    if not digests:
        next(run.trajectories(), None)  # Reports the missing trajectories as a problem.
    kept = index.as_json(chunk)
    drifts, sampling = [digest.drift for digest in digests], section(run.config, "rollout", "sampling")
    evaluations = list(_evaluations(run, chunk + NUMBERS, sink))
    names = sorted({name for row in rows for name in row} - {"step", "time"})
    known, defaults = dict(flat(recorded(run.config))), json_safe(dict(flat(as_dict(RunConfig()))))
    settings = json_safe({key: value for key, value in flat(run.config) if key in known})
    return {
        "name": name,
        "path": str(run.path),
        "config": settings,
        "changed": [key for key, value in settings.items() if key not in defaults or defaults[key] != value],
        "lives": [json_safe(asdict(life)) for life in run.launches],
        "status": json_safe(run.status),
        "life": asdict(liveness_here(run.status, run.summary is not None)),
        "summary": json_safe(run.summary),
        "steps": [row["step"] for row in rows],
        "times": [json_safe(row.get("time")) for row in rows],
        "metrics": {name: [_figure(row.get(name)) for row in rows] for name in names},
        "units": _units(run, names),
        "evaluations": evaluations,
        "reference": json_safe(run.reference),
        "measured": _measured(run),
        "faults": [json_safe(asdict(fault)) for fault in run.faults],
        "changes": [json_safe(asdict(change)) for change in run.changes],
        "time": _time(run),
        "plan": None if (plan := run.plan()) is None else predicted.compare(plan, rows),
        "trajectories": kept,
        "drift": drift.as_json(drift.report_of(drifts, sampling)) if kept else None,
        "audit": cache.audit(run, digests) if audited and kept else None,
        "problems": list(run.problems),
    }


def _units(run: RunFolder, names: Sequence[str]) -> dict[str, list[str]]:
    """Return unit and meaning of each metric in `names` that units.json explains."""
    found = {name: run.units.get(name) for name in names}
    return {
        name: [str(text) for text in both] for name, both in found.items() if isinstance(both, list) and len(both) == 2
    }


def _time(run: RunFolder) -> dict[str, Any] | None:
    try:
        steps = run.timeline()
        return time_use.as_json(time_use.time_report(steps)) if steps else None
    except (TypeError, ValueError, AttributeError):
        run.problems.append(f"{TIMELINE} has invalid spans: left out.")
        return None


def _digest(path: Path, step: int, stamp: Stamp | None, sampling: Mapping[str, Any], chunks: Chunks | None) -> Digest:
    index, problems = TrajectoryIndex(), list[str]()

    def indexed(kept: Iterable[TrajectoryRecord]) -> Iterator[TrajectoryRecord]:
        for trajectory in kept:
            index.add(trajectory)
            yield trajectory

    kept = indexed(read_step_trajectories(path, step, problems.append))
    tally = drift.tally_step(step, chunks.passing(kept) if chunks else kept, sampling)
    return Digest(stamp, sampling, index, tally, tuple(problems))


def _stamp(file: Path) -> Stamp | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _evaluations(run: RunFolder, chunk: int, sink: Sink | None) -> Iterator[dict[str, Any]]:
    """Yield each evaluation's row with the chunk numbers of its answers."""
    for row in run.evaluations:
        answers = run.answers(row["step"])
        parts = [answers[start : start + ANSWERS] for start in range(0, len(answers), ANSWERS)]
        for place, part in enumerate(parts):
            if sink is not None:
                sink(chunk + place, part)
        yield {**json_safe(row), "answers": len(answers), "first_chunk": chunk, "chunks": len(parts)}
        chunk += len(parts)


def _figure(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _measured(run: RunFolder) -> list[dict[str, Any]]:
    """Return the results that `rlsys eval` wrote into the run folder: one row per folder and data set, by start time.

    With several sets, a last row with `set` None is their average. Invalid results become sentences in the run's
    `problems`.
    """
    rows = []
    for folder, results in run.measured():
        try:
            rows += _rows(folder, results, run.path)
        except (KeyError, TypeError, ValueError, AttributeError):
            run.problems.append(f"{folder}/results.json holds no evaluation results: left out.")
    return sorted(rows, key=lambda row: str(row["started"]))


def _rows(folder: str, results: Mapping[str, Any], run: Path) -> list[dict[str, Any]]:
    """Return the rows of one results.json of `rlsys.apps.evaluation.results`; other content raises various errors."""
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
    """Return `figure` if it is finite and not negative. Raises TypeError or ValueError otherwise."""
    if not 0 <= figure < math.inf:
        raise ValueError(figure)
    return figure


CHUNK = 32
"""Maximum number of trajectories per chunk."""


class TrajectoryIndex:
    """Columns over all trajectories, with which the page lists, filters and sorts them without unpacking chunks."""

    def __init__(self) -> None:
        self._questions: dict[str, int] = {}
        self._asked: list[dict[str, Any]] = []
        self._columns: dict[str, list[Any]] = {}
        self._chunks: list[tuple[int, int, int]] = []

    def add(self, kept: TrajectoryRecord) -> None:
        """Append a trajectory. Trajectories of one step must be added consecutively."""
        asked: dict[str, Any] = {"uid": kept.question_uid, "text": kept.question or kept.prompt.strip()}
        asked |= {"golden": list(kept.golden_answers), "source": kept.data_source}
        trained = kept.loss_mask.astype(bool)
        ratios = (kept.old_logprobs - kept.rollout_logprobs)[trained]
        ratios, sampled_by = ratios[np.isfinite(ratios)], kept.versions[trained & (kept.versions >= 0)]
        row = {
            "question": self._number(asked),
            "step": kept.step,
            "sample": kept.sample,
            "right": int(kept.exact),
            "answer": kept.answer,
            "reward": _rounded(kept.reward),
            "finish": str(kept.finish),
            "searches": sum(turn.action == Action.SEARCH and bool(turn.observation) for turn in kept.turns),
            "errors": sum(bool(turn.search_error) for turn in kept.turns),
            "trained": int(trained.sum()),
            "length": len(kept.token_ids) - kept.prompt_length,
            "advantage": _rounded(kept.advantages[trained].mean()) if trained.any() else None,
            "log_ratio": _rounded(ratios[np.argmax(np.abs(ratios))]) if len(ratios) else None,
            "lag": max(0, kept.step - 1 - int(sampled_by.min())) if len(sampled_by) else 0,
        }
        for name, value in row.items():
            self._columns.setdefault(name, []).append(value)
        self._into_chunk(kept.step)

    def extend(self, later: TrajectoryIndex) -> None:
        """Append the contents of `later`, which must hold other steps."""
        numbers = [self._number(asked) for asked in later._asked]
        for name, values in later._columns.items():
            own = [numbers[value] for value in values] if name == "question" else values
            self._columns.setdefault(name, []).extend(own)
        self._chunks += later._chunks

    def as_json(self, first_chunk: int) -> dict[str, Any] | None:
        """Return the questions, the columns, and (step, first index, length) per chunk; None without trajectories."""
        columns = {"questions": self._asked, "columns": self._columns}
        return {**columns, "first_chunk": first_chunk, "chunks": self._chunks} if self._asked else None

    def _number(self, asked: dict[str, Any]) -> int:
        """Return the question's number, a new one for a new uid."""
        number = self._questions.setdefault(asked["uid"], len(self._asked))
        if number == len(self._asked):
            self._asked.append(asked)
        return number

    def _into_chunk(self, step: int) -> None:
        last, first, count = self._chunks[-1] if self._chunks else (None, 0, 0)
        if last != step:
            self._chunks.append((step, 0, 1))
        elif count < CHUNK:
            self._chunks[-1] = (step, first, count + 1)
        else:
            self._chunks.append((step, first + count, 1))


class Chunks:
    """Collects rows into chunks with the same boundaries as `TrajectoryIndex`."""

    def __init__(self, first: int, sink: Callable[[int, list[dict[str, Any]]], None]) -> None:
        """`sink` receives each chunk's number, starting at `first`, and its rows."""
        self._next, self._sink = first, sink

    def passing(self, kept: Iterable[TrajectoryRecord]) -> Iterator[TrajectoryRecord]:
        """Yield `kept` unchanged and add each to a chunk."""
        for _, of_step in groupby(kept, key=lambda trajectory: trajectory.step):
            rows: list[dict[str, Any]] = []
            for trajectory in of_step:
                if len(rows) == CHUNK:
                    self._hand_over(rows)
                    rows = []
                rows.append(row_of(trajectory))
                yield trajectory
            self._hand_over(rows)

    def _hand_over(self, rows: list[dict[str, Any]]) -> None:
        self._sink(self._next, rows)
        self._next += 1


def row_of(kept: TrajectoryRecord) -> dict[str, Any]:
    """Return what the page's trajectory reader shows of one trajectory."""
    return {
        "prompt": kept.prompt,
        "prompt_length": kept.prompt_length,
        "trained_version": kept.step - 1,
        "parts": {name: _rounded(value) for name, value in (kept.parts or {}).items()},
        "extra": {str(name): str(value) for name, value in (kept.extra or {}).items()},
        "turns": [
            {
                "action": str(turn.action),
                "tool": str(getattr(turn, "tool", "") or ""),
                "content": turn.content,
                "error": turn.search_error,
                "generate_s": _rounded(turn.generate_s),
                "search_s": _rounded(turn.search_s),
                "cached": turn.cached_tokens,
                "asked": turn.prompt_tokens,
                "sampled": len(turn.sampled_ids),
            }
            for turn in kept.turns
        ],
        "runs": runs_of(kept),
    }


def runs_of(kept: TrajectoryRecord) -> list[dict[str, Any]]:
    """Return the response as runs of consecutive tokens with the same loss mask, turn and weight version.

    An untrained run has `text` and `count`. A trained run has `texts` and `ids` [count], `turn` and `version`. Its
    other keys hold one number per token, or a single number if all are equal: `advantage`, `weight`, and in nats
    `sampled` (engine log-prob), `ratio` (old minus engine log-prob) and `kl` (old minus reference log-prob). Unknown
    values are null.
    """
    arrays = (kept.loss_mask.astype(bool), kept.turn_of_token, kept.versions)
    mask, turns, versions = (array[kept.prompt_length :] for array in arrays)
    if not len(mask):
        return []
    alike = (mask[1:] == mask[:-1]) & (turns[1:] == turns[:-1]) & ((versions[1:] == versions[:-1]) | ~mask[1:])
    edges = [0, *(np.flatnonzero(~alike) + 1).tolist(), len(mask)]
    return [_tokens_alike(kept, begin, end, bool(mask[begin])) for begin, end in pairwise(edges)]


def _tokens_alike(kept: TrajectoryRecord, begin: int, end: int, trained: bool) -> dict[str, Any]:
    texts = kept.pieces[begin:end]
    if not trained:
        return {"text": "".join(texts), "count": end - begin}
    part = slice(kept.prompt_length + begin, kept.prompt_length + end)
    old = kept.old_logprobs[part]
    run = {
        "texts": list(texts),
        "ids": kept.token_ids[part].tolist(),
        "turn": int(kept.turn_of_token[part][0]),
        "version": int(kept.versions[part][0]),
        "advantage": _rounded_figures(kept.advantages[part]),
        "sampled": _rounded_figures(kept.rollout_logprobs[part]),
        "ratio": _rounded_figures(old - kept.rollout_logprobs[part]),
    }
    if kept.weights is not None:
        run["weight"] = _rounded_figures(kept.weights[part])
    if kept.ref_logprobs is not None:
        run["kl"] = _rounded_figures(old - kept.ref_logprobs[part])
    return run


def _rounded_figures(values: NDArray[Any]) -> Any:
    """Return rounded numbers, None for non-finite ones; a single number if all are equal."""
    listed: Sequence[float] = np.asarray(values, np.float64).round(4).tolist()
    known = [value + 0.0 if math.isfinite(value) else None for value in listed]
    return known[0] if len(set(known)) == 1 else known


def _rounded(value: float | None) -> float | None:
    return round(float(value), 4) if value is not None and math.isfinite(value) else None


QUIET_S = 2 * HEARTBEAT_S
"""Longest normal age of status.json while a run is active."""
SILENT_S = 6 * HEARTBEAT_S
"""Age of status.json from which the process is assumed to be dead, or its machine or disk to hang."""


class Phase(StrEnum):
    """Run phase. `gone`: the process was killed. `silent`: status.json is older than `SILENT_S`."""

    unknown = "unknown"
    running = "running"
    finished = "finished"
    failed = "failed"
    gone = "gone"
    silent = "silent"


@dataclass(frozen=True, slots=True)
class RunLiveness:
    """Run phase, and a sentence about it."""

    phase: Phase
    sentence: str


def liveness_of(
    status: Mapping[str, Any] | None, has_summary: bool, now: float, host: str, alive: Callable[[int], bool]
) -> RunLiveness:
    """Return the phase at `now` (seconds since the epoch) from status.json and summary.json.

    `alive(pid)` returns True for a living process of this machine, named `host`.
    """
    if status is None:
        if has_summary:
            return RunLiveness(Phase.finished, "The run has finished.")
        return RunLiveness(Phase.unknown, "The run has no status.json: it has not begun, or an older rlsys wrote it.")
    ended, step = status.get("ended"), f"step {status.get('step')} of {status.get('steps')}"
    if ended == FINISHED:
        return RunLiveness(Phase.finished, f"The run has finished after {step}.")
    if isinstance(ended, str):
        return RunLiveness(Phase.failed, f"The run has {ended} (after {step}).")
    pid, quiet_s = status.get("pid"), now - _number(status.get("at"))
    # A process that still writes is alive, whatever its pid says: another container may have the same host name. A time
    # in the future means that the clock was set back, and proves nothing.
    if abs(quiet_s) > QUIET_S and status.get("host") == host and isinstance(pid, int) and not alive(pid):
        return RunLiveness(
            Phase.gone, f"The run's process no longer exists and recorded no end: it was probably killed, after {step}."
        )
    if quiet_s > SILENT_S:
        return RunLiveness(
            Phase.silent, f"The run has written no status for {quiet_s:.0f} s; the last was after {step}."
        )
    return RunLiveness(Phase.running, f"The run is active, after {step}.")


def liveness_here(status: Mapping[str, Any] | None, has_summary: bool) -> RunLiveness:
    """Return `liveness_of` for the current time and this machine."""
    return liveness_of(status, has_summary, time.time(), socket.gethostname(), _is_alive)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # The process of another user, or no valid pid.
        return True
    return True


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
