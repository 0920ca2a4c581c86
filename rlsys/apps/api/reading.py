"""Files of results, as Python is given them.

Contract: a file that is missing, cannot be read or holds nothing of its kind is a UserError with its path and what to do.
A line that cannot be read is left out of the others, and a warning at the user's own line names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlsys.apps.api.notes import note
from rlsys.errors import UserError
from rlsys.files import limited_lines, open_regular, parse_json, read_regular
from rlsys.observe.metrics import METRICS
from rlsys.observe.run_folder import open_run

_SAID = 3
"""Problems that one sentence repeats."""


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, by step."""
    run = open_run(run_dir)
    problems = [one for one in run.problems if one.startswith(METRICS)]
    if not run.rows:
        raise UserError(
            f"{run_dir / METRICS} holds no row of a step{_bracketed(problems)}: copy the file from where the run was, or "
            "train again."
        )
    _warn(run_dir, problems)
    return list(run.rows)


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """What a file of one JSON object holds; `remedy` says what brings it back."""
    with _readable(path, remedy):
        found = _object(read_regular(path))
    if found is None:
        raise UserError(f"{path} is empty or damaged: {remedy}.")
    return found


def read_objects(path: Path, remedy: str) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects."""
    rows, problems = [], []
    with _readable(path, remedy), open_regular(path) as file:
        for number, line in enumerate(limited_lines(file), 1):
            found = _object(line)
            if found is not None:
                rows.append(found)
            elif line.strip():
                problems.append(f"{path.name}, line {number} is damaged: left out.")
    if not rows:
        raise UserError(f"{path} is empty or damaged: {remedy}.")
    _warn(path.parent, problems)
    return rows


@contextmanager
def _readable(path: Path, remedy: str) -> Iterator[None]:
    """Raises UserError where the body cannot read `path`."""
    try:
        yield
    except FileNotFoundError as problem:
        raise UserError(f"{path} is missing: {remedy}.") from problem
    except OSError as problem:
        raise UserError(f"{path} cannot be read ({problem.strerror}): {remedy}.") from problem


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _warn(folder: Path, problems: Sequence[str]) -> None:
    if problems:
        note(f"{folder}: {_shortened(problems)}")


def _bracketed(problems: Sequence[str]) -> str:
    return f" ({_shortened(problems).removesuffix('.')})" if problems else ""


def _shortened(problems: Sequence[str]) -> str:
    more = len(problems) - _SAID
    return " ".join(problems[:_SAID]) + (f" So are {more} more." if more > 0 else "")
