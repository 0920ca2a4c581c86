"""What `rlsys eval` has measured into a run's folder, as the page shows it: a row for each folder and set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.observe.run_folder import RunFolder


def measured_rows(run: RunFolder) -> list[dict[str, Any]]:
    """In the order in which they were measured, the average of several sets last, whose `set` is None.

    What holds no figures of an evaluation is a sentence in the run's `problems`.
    """
    rows = []
    for folder, results in run.measured():
        try:
            rows += _rows(folder, results, run.path)
        except (KeyError, TypeError, ValueError, AttributeError):
            run.problems.append(f"{folder}/results.json holds no figures of an evaluation: left out.")
    return sorted(rows, key=lambda row: str(row["started"]))


def _rows(folder: str, results: Mapping[str, Any], run: Path) -> list[dict[str, Any]]:
    """Of one folder; as `rlsys.apps.evaluation.results` writes them, or one of many errors."""
    settings, sets = results["settings"], list(results["sets"].values())
    asked = {
        "folder": folder,
        "model": _within(settings["model"], run),
        **{key: settings.get(key) for key in ("engine", "baseline", "samples", "temperature", "started")},
        "level": _number(results["interval_level"]),
    }
    rows = [{**asked, "set": str(one["name"]), **_figures(one)} for one in sets]
    if len(sets) > 1:
        rows.append({**asked, "set": None, **_figures(results["average"])})
    return rows


def _figures(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: _number(found[key]) for key in ("questions", "searches", "search_errors")},
        **{key: _estimate(found[key]) for key in ("em", "f1", "sub_em")},
        "pass_at": {str(int(k)): _estimate(chance) for k, chance in found["pass_at"].items()},
    }


def _estimate(found: Mapping[str, Any]) -> dict[str, float]:
    return {part: _number(found[part]) for part in ("mean", "low", "high")}


def _number(found: Any) -> float:
    """A figure of an evaluation: none is negative. Raises TypeError or ValueError for what is none."""
    if not 0 <= found < math.inf:
        raise ValueError(found)
    return found


def _within(model: str, run: Path) -> str:
    """`model` as it is called from the run's folder, where it lies in there."""
    path = Path(model)
    above = next((folder for folder in (run, run.resolve()) if path.is_relative_to(folder)), None)
    return model if above is None else str(path.relative_to(above))
