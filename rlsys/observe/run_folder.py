"""The folder of a run, for its readers: the report, the live page, the audit.

Contract: `open_run` refuses a folder that is no run, by one sentence. What else is missing, empty, cut short or damaged is
a sentence in `problems`, and the rest is read; nothing of a run's content raises. Reading changes nothing, and a run may go
on meanwhile. Texts are as they were written: generated, retrieved or typed by anybody, and to be shown as such.
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
from rlsys.observe.environment import RUN, Life, read_lives
from rlsys.observe.kept import TRAJECTORIES, Kept, kept_steps, read_kept
from rlsys.observe.status import STATUS

T = TypeVar("T")
Report = Callable[[str], None]
"""Takes a sentence about what could not be read."""

CONFIG, EVALUATIONS = "config.yaml", "evaluations"
MEASURED = "eval*/results.json"
"""Within the run's folder: what `rlsys eval` has measured into it, beside the run's own evaluations."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Contents of the folder of a run."""

    path: Path
    config: dict[str, Any]
    lives: tuple[Life, ...]
    rows: tuple[dict[str, Any], ...]
    """Of metrics.jsonl, by step."""
    evaluations: tuple[dict[str, Any], ...]
    """Rows of the policy's evaluations, by step."""
    reference: dict[str, Any] | None
    """The row of the reference policy's evaluation, which comes last; None without one."""
    summary: dict[str, Any] | None
    """None before the end."""
    status: dict[str, Any] | None
    problems: list[str] = field(default_factory=list)
    """What could not be read, a sentence each, without repetition; reading more may add to it."""
    _reported: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """What reading more has added."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    def timeline(self) -> tuple[records.StepTimeline, ...]:
        """Read the work of the groups in each step."""
        return records.steps_of(
            _parsed(self.path / records.TIMELINE, records.TIMELINE, records.read_timeline_row, self._report)
        )

    def trajectories(self) -> Iterator[Kept]:
        """Read the trajectories that were kept, by step."""
        if not kept_steps(self.path):
            self._report(f"{TRAJECTORIES} is missing: no trajectory was kept, or the run is of an older rlsys.")
        yield from read_kept(self.path, self._report)

    def answers(self, step: int) -> list[dict[str, Any]]:
        """Read every answer of the policy's evaluation after `step`, as `rlsys.orchestrator.evaluation.heldout` writes it."""
        name = f"{EVALUATIONS}/step_{step:06d}.jsonl"
        return list(_parsed(self.path / name, name, records.read_object, self._report))

    def measured(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Read the name of each folder that `rlsys eval` has written into this one, and its results.json; by name."""
        for file in sorted(self.path.glob(MEASURED)):
            folder = file.parent.name
            results = _whole(self.path, f"{folder}/{file.name}", self._report)
            if results is not None:
                yield folder, results

    def _report(self, problem: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            self.problems.append(problem)


def open_run(path: Path) -> RunFolder:
    """Read the run at `path`. Raises UserError if it is none."""
    if not path.is_dir():
        sentence = f"{path} is no folder: give the folder of a run, such as {_like(path.parent)}."
        raise UserError(sentence, code="not_found", key=str(path))
    if not any((path / name).is_file() for name in (CONFIG, records.METRICS)):
        raise UserError(
            f"{path} is no run: it has neither {CONFIG} nor {records.METRICS}; give the folder of a run, such as {_like(path)}.",
            code="malformed",
            key=str(path),
        )
    problems: list[str] = []
    report = problems.append
    by_step = {
        row["step"]: row for row in _parsed(path / records.METRICS, records.METRICS, records.read_step_row, report)
    }
    reference = _evaluations(path, "reference_", report)
    return RunFolder(
        path=path,
        config=_read(CONFIG, lambda: _config(path), report) or {},
        lives=tuple(_read(RUN, lambda: read_lives(path), report) or ()),
        rows=tuple(by_step[step] for step in sorted(by_step)),
        evaluations=_evaluations(path, "", report),
        reference=reference[-1] if reference else None,
        summary=_whole(path, records.SUMMARY, report),
        status=_whole(path, STATUS, report),
        problems=problems,
    )


def section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Settings under `names`, each within the one before; nothing unless all are mappings. Never raises."""
    value: Any = config
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def number(settings: Mapping[str, Any], name: str, default: float) -> float:
    """Read a figure of `settings`; `default` where it is not set, null or no finite number."""
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return default
    return float(value)


def _like(folder: Path) -> Path:
    """The newest run within `folder`, or what one is called."""
    runs = [found.parent for found in folder.glob(f"*/{CONFIG}")] if folder.is_dir() else []
    return max(runs, key=lambda run: run.stat().st_mtime, default=Path("outputs/NAME-YYYYMMDD-HHMMSS"))


def _parsed(path: Path, name: str, parse: Callable[[bytes], T | None], report: Report) -> Iterator[T]:
    """The lines of a file that `parse` understands."""
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
        if not number:
            report(f"{name} is empty.")
    except OSError as problem:
        report(_unreadable(name, problem))


def _read(name: str, read: Callable[[], T | None], report: Report, optional: bool = False) -> T | None:
    """Call `read` for a file; None where it cannot, or finds nothing. No word of an optional file that is missing."""
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


def _evaluations(path: Path, whose: str, report: Report) -> tuple[dict[str, Any], ...]:
    """Rows of the files whose names begin with `whose`, by step."""
    found: dict[int, dict[str, Any]] = {}
    for file in sorted((path / EVALUATIONS).glob(f"{whose}step_*.json")):
        row = _whole(path, f"{EVALUATIONS}/{file.name}", report)
        if row is not None and isinstance(row.get("step"), int):
            found[row["step"]] = row
        elif row is not None:
            report(f"{EVALUATIONS}/{file.name} names no step: left out.")
    return tuple(found[step] for step in sorted(found))


def _whole(path: Path, name: str, report: Report) -> dict[str, Any] | None:
    """A file of one object; None, without a word, where there is none: it comes later, or never."""
    return _read(name, lambda: records.read_object(read_regular(path / name)), report, optional=True)


def _unreadable(name: str, problem: OSError) -> str:
    if isinstance(problem, FileNotFoundError):
        return f"{name} is missing: the run is of an older rlsys, or has not come so far."
    return f"{name} cannot be read: {problem.strerror}."
