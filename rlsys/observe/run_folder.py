"""The folder of a run, for whoever reads it: the report, the live page, the audit.

Contract: `open_run` refuses a folder that is no run, by one sentence. What else is missing, empty, cut short or damaged is
a sentence in `problems`, and the rest is read; nothing of a run's content raises. Reading changes nothing, and a run may go
on meanwhile. Texts are as they were written: generated, retrieved or typed by anybody, and to be shown as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlsys.errors import UserError
from rlsys.files import limited_lines, open_regular, parse_json, read_regular, read_yaml
from rlsys.observe.environment import RUN, Life, read_lives
from rlsys.observe.kept import TRAJECTORIES, Kept, kept_steps, read_kept
from rlsys.observe.metrics import METRICS
from rlsys.observe.timeline import TIMELINE, StepTimeline, read_row, steps_of

T = TypeVar("T")

CONFIG, EVALUATIONS, SUMMARY, STATUS = "config.yaml", "evaluations", "summary.json", "status.json"
MEASURED = "eval*/results.json"
"""Within the run's folder: what `rlsys eval` has measured into it, beside the run's own evaluations."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What a run has written down."""

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
    _said: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """What reading more has added."""

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.path.resolve().name

    def timeline(self) -> tuple[StepTimeline, ...]:
        """What the groups did in each step."""
        return steps_of(_parsed(self.path / TIMELINE, TIMELINE, read_row, self._say))

    def trajectories(self) -> Iterator[Kept]:
        """Those that were kept, by step."""
        if not kept_steps(self.path):
            self._say(f"{TRAJECTORIES} is missing: no trajectory was kept, or the run is of an older rlsys.")
        yield from read_kept(self.path, self._say)

    def answers(self, step: int) -> list[dict[str, Any]]:
        """Every answer of the policy's evaluation after `step`, as `rlsys.orchestrator.evaluation.heldout` writes it."""
        name = f"{EVALUATIONS}/step_{step:06d}.jsonl"
        return list(_parsed(self.path / name, name, _object, self._say))

    def measured(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The name of each folder that `rlsys eval` has written into this one, and its results.json; by name."""
        for file in sorted(self.path.glob(MEASURED)):
            folder = file.parent.name
            results = _whole(self.path, f"{folder}/{file.name}", self._say)
            if results is not None:
                yield folder, results

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            self.problems.append(problem)


def open_run(path: Path) -> RunFolder:
    """The run at `path`. Raises UserError if it is none."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder: give the folder of a run, such as {_like(path.parent)}.")
    if not any((path / name).is_file() for name in (CONFIG, METRICS)):
        raise UserError(
            f"{path} is no run: it has neither {CONFIG} nor {METRICS}; give the folder of a run, such as {_like(path)}."
        )
    problems: list[str] = []
    say = problems.append
    by_step = {row["step"]: row for row in _parsed(path / METRICS, METRICS, _step_row, say)}
    reference = _evaluations(path, "reference_", say)
    return RunFolder(
        path=path,
        config=_config(path, say),
        lives=_lives(path, say),
        rows=tuple(by_step[step] for step in sorted(by_step)),
        evaluations=_evaluations(path, "", say),
        reference=reference[-1] if reference else None,
        summary=_whole(path, SUMMARY, say),
        status=_whole(path, STATUS, say),
        problems=problems,
    )


def _like(folder: Path) -> Path:
    """The newest run within `folder`, or what one is called."""
    runs = [found.parent for found in folder.glob(f"*/{CONFIG}")] if folder.is_dir() else []
    return max(runs, key=lambda run: run.stat().st_mtime, default=Path("outputs/NAME-YYYYMMDD-HHMMSS"))


def _parsed(path: Path, name: str, parse: Callable[[bytes], T | None], say: Callable[[str], None]) -> Iterator[T]:
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
                    say(f"{name}, line {number} is {what}: left out.")
        if not number:
            say(f"{name} is empty.")
    except OSError as problem:
        say(_unreadable(name, problem))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _step_row(line: bytes) -> dict[str, Any] | None:
    row = _object(line)
    return row if row is not None and type(row.get("step")) is int else None


def _config(path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    try:
        found = read_yaml(path / CONFIG)
    except OSError as problem:
        say(_unreadable(CONFIG, problem))
        return {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        say(f"{CONFIG} is empty or damaged: left out.")
        return {}
    return found


def _lives(path: Path, say: Callable[[str], None]) -> tuple[Life, ...]:
    try:
        return tuple(read_lives(path))
    except OSError as problem:
        say(_unreadable(RUN, problem))
    except ValueError:
        say(f"{RUN} is empty or damaged: left out.")
    return ()


def _evaluations(path: Path, whose: str, say: Callable[[str], None]) -> tuple[dict[str, Any], ...]:
    """Rows of the files whose names begin with `whose`, by step."""
    found: dict[int, dict[str, Any]] = {}
    for file in sorted((path / EVALUATIONS).glob(f"{whose}step_*.json")):
        row = _whole(path, f"{EVALUATIONS}/{file.name}", say)
        if row is not None and isinstance(row.get("step"), int):
            found[row["step"]] = row
        elif row is not None:
            say(f"{EVALUATIONS}/{file.name} names no step: left out.")
    return tuple(found[step] for step in sorted(found))


def _whole(path: Path, name: str, say: Callable[[str], None]) -> dict[str, Any] | None:
    """A file of one object; None, without a word, where there is none: it comes later, or never."""
    try:
        found = _object(read_regular(path / name))
    except FileNotFoundError:
        return None
    except OSError as problem:
        say(_unreadable(name, problem))
        return None
    if found is None:
        say(f"{name} is empty or damaged: left out.")
    return found


def _unreadable(name: str, problem: OSError) -> str:
    if isinstance(problem, FileNotFoundError):
        return f"{name} is missing: the run is of an older rlsys, or has not come so far."
    return f"{name} cannot be read: {problem.strerror}."
