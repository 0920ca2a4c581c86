"""Reads a run folder for the report, the live page and the token audit.

Contract: `open_run` raises UserError only for a folder that is no run. Missing, empty, truncated or damaged files
become sentences in `problems`, and everything else is still read. Reading changes no file and works while the run is
active. Texts are untrusted (generated, retrieved or user input) and returned unescaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlsys.errors import UserError
from rlsys.files import limited_lines, open_regular, read_regular, read_yaml
from rlsys.observe import records
from rlsys.observe.environment import RUN, Launch, read_launches
from rlsys.observe.faults import FAULTS, RecordedChange, RecordedFault, changes_of, faults_of, read_fault_row
from rlsys.observe.kept import TRAJECTORIES, TrajectoryRecord, read_trajectories, trajectory_steps
from rlsys.observe.metrics import UNITS
from rlsys.observe.status import STATUS

T = TypeVar("T")
Report = Callable[[str], None]
"""Receives a sentence about something unreadable."""

CONFIG, EVALUATIONS = "config.yaml", "evaluations"
PLAN = "plan.json"
"""Prediction of `rlsys plan`, if one was made."""
MEASURED = "eval*/results.json"
"""Glob pattern, within the run folder, of results that `rlsys eval` wrote."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path
    config: dict[str, Any]
    launches: tuple[Launch, ...]
    rows: tuple[dict[str, Any], ...]
    """Rows of metrics.jsonl, by step."""
    evaluations: tuple[dict[str, Any], ...]
    """Rows of the policy's evaluations, by step."""
    reference: dict[str, Any] | None
    """Row of the reference policy's latest evaluation; None if it was not evaluated."""
    summary: dict[str, Any] | None
    """Contents of summary.json; None until the run ends."""
    status: dict[str, Any] | None
    faults: tuple[RecordedFault, ...] = ()
    """Faults, by beginning; empty for a run of an older rlsys too."""
    changes: tuple[RecordedChange, ...] = ()
    """Engines that joined and left, by time."""
    units: Mapping[str, Any] = field(default_factory=dict)
    """Contents of units.json: name of a metric -> [unit, meaning]; empty for a run of an older rlsys."""
    problems: list[str] = field(default_factory=list)
    """Sentences about unreadable content, without duplicates; methods that read a file later may append more."""
    _reported: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Problems that `_report` appended."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def timeline(self) -> tuple[records.StepTimeline, ...]:
        """Read the timeline: the spans of each step."""
        return records.steps_of(
            _parsed(self.path / records.TIMELINE, records.TIMELINE, records.read_timeline_row, self._report)
        )

    def trajectories(self) -> Iterator[TrajectoryRecord]:
        """Yield the kept trajectories, by step."""
        if not trajectory_steps(self.path):
            self._report(f"{TRAJECTORIES} is missing: no trajectory was kept, or an older rlsys wrote the run.")
        yield from read_trajectories(self.path, self._report)

    def answers(self, step: int) -> list[dict[str, Any]]:
        """Read all answers of the evaluation after `step`; written by `rlsys.orchestrator.evaluation.heldout`."""
        name = f"{EVALUATIONS}/step_{step:06d}.jsonl"
        return list(_parsed(self.path / name, name, records.read_object, self._report))

    def measured(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield folder name and results.json of each `rlsys eval` output within the run folder, by name."""
        for file in sorted(self.path.glob(MEASURED)):
            folder = file.parent.name
            results = _whole(self.path, f"{folder}/{file.name}", self._report)
            if results is not None:
                yield folder, results

    def plan(self) -> dict[str, Any] | None:
        """Read the prediction of `rlsys plan`; None if none was made."""
        return _whole(self.path, PLAN, self._report)

    def _report(self, problem: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            self.problems.append(problem)


def open_run(path: Path) -> RunFolder:
    """Read the run at `path`. Raises UserError if the folder is no run."""
    require_run(path)
    problems: list[str] = []
    report = problems.append
    by_step = {
        row["step"]: row for row in _parsed(path / records.METRICS, records.METRICS, records.read_step_row, report)
    }
    reference = read_evaluations(path, "reference_", report)
    faults = tuple(_parsed(path / FAULTS, FAULTS, read_fault_row, report, optional=True))
    return RunFolder(
        path=path,
        config=_read(CONFIG, lambda: _config(path), report) or {},
        launches=tuple(_read(RUN, lambda: read_launches(path), report) or ()),
        rows=tuple(by_step[step] for step in sorted(by_step)),
        evaluations=read_evaluations(path, "", report),
        reference=reference[-1] if reference else None,
        summary=_whole(path, records.SUMMARY, report),
        status=_whole(path, STATUS, report),
        faults=faults_of(faults),
        changes=changes_of(faults),
        units=_whole(path, UNITS, report) or {},
        problems=problems,
    )


def require_run(path: Path) -> None:
    """Raise UserError if the folder `path` is no run."""
    if not path.is_dir():
        sentence = f"{path} is not a folder: give the folder of a run, such as {_like(path.parent)}."
        raise UserError(sentence, code="not_found", key=str(path))
    if not any((path / name).is_file() for name in (CONFIG, records.METRICS)):
        raise UserError(
            f"{path} is not a run: it has neither {CONFIG} nor {records.METRICS}; give the folder of a run, such as {_like(path)}.",
            code="malformed",
            key=str(path),
        )


def section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the section at the nested keys `names`; empty if any of them is not a mapping. Never raises."""
    value: Any = config
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def number(settings: Mapping[str, Any], name: str, default: float) -> float:
    """Return setting `name` as a float; `default` if it is absent or no finite number."""
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return default
    return float(value)


def _like(folder: Path) -> Path:
    """Return the newest run within `folder`, or a placeholder path, for an error message."""
    runs = [found.parent for found in folder.glob(f"*/{CONFIG}")] if folder.is_dir() else []
    return max(runs, key=lambda run: run.stat().st_mtime, default=Path("outputs/NAME-YYYYMMDD-HHMMSS"))


def _parsed(
    path: Path, name: str, parse: Callable[[bytes], T | None], report: Report, optional: bool = False
) -> Iterator[T]:
    """Yield what `parse` makes of each line of a file; report lines for which it returns None.

    An `optional` file that is missing or empty is not reported.
    """
    number = 0
    try:
        with open_regular(path) as file:
            for number, line in enumerate(limited_lines(file), 1):
                found = parse(line) if line.strip() else None
                if found is not None:
                    yield found
                elif line.strip():
                    what = "cut short" if not line.endswith(b"\n") else "damaged"
                    report(f"{name}, line {number} is {what}: left out.")
        if not number and not optional:
            report(f"{name} is empty.")
    except OSError as problem:
        if not (optional and isinstance(problem, FileNotFoundError)):
            report(_unreadable(name, problem))


def _read(name: str, read: Callable[[], T | None], report: Report, optional: bool = False) -> T | None:
    """Call `read` for a file; report a failure and return None. A missing `optional` file is not reported."""
    try:
        found = read()
    except OSError as problem:
        if not (optional and isinstance(problem, FileNotFoundError)):
            report(_unreadable(name, problem))
        return None
    except ValueError:
        found = None
    if found is None:
        report(f"{name} is empty or damaged: left out.")
    return found


def _config(path: Path) -> dict[str, Any] | None:
    found = read_yaml(path / CONFIG)
    return found if isinstance(found, dict) else None


def read_evaluations(path: Path, whose: str, report: Report) -> tuple[dict[str, Any], ...]:
    """Return the evaluation rows, by step, from files with the name prefix `whose`."""
    found: dict[int, dict[str, Any]] = {}
    for file in sorted((path / EVALUATIONS).glob(f"{whose}step_*.json")):
        row = _whole(path, f"{EVALUATIONS}/{file.name}", report)
        step = None if row is None else row.get("step")
        if row is not None and type(step) is int and file.name == f"{whose}step_{step:06d}.json":
            found[step] = row
        elif row is not None:
            report(f"{EVALUATIONS}/{file.name} is no evaluation of the step in its name: left out.")
    return tuple(found[step] for step in sorted(found))


def _whole(path: Path, name: str, report: Report) -> dict[str, Any] | None:
    """Read a file with one JSON object; None if it does not exist (yet), which is not reported."""
    return _read(name, lambda: records.read_object(read_regular(path / name)), report, optional=True)


def _unreadable(name: str, problem: OSError) -> str:
    if isinstance(problem, FileNotFoundError):
        return f"{name} is missing: the run has not written it yet, or an older rlsys wrote the run."
    return f"{name} cannot be read: {problem.strerror}."
