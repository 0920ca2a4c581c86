"""Compares the prediction of `rlsys plan` in a run's folder with what the run measured. Pure.

Contract: no content of plan.json causes an error; a figure that is missing or no number is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

STAGES = {
    "rollout": "time/rollout",
    "inference": "time/inference",
    "values": "time/values",
    "training": "time/training",
    "weight sync": "time/sync_weights",
}
"""Stage of a prediction -> the metric with its seconds."""


def compare(plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return predicted and measured seconds of the step and its stages, idle shares, and sentences.

    `rows` are those of metrics.jsonl. The first step is left out if there are others, because devices warm up in it.
    """
    steps = rows[1:] or rows
    seconds = [_row("step", plan.get("step_s"), "time/step", steps)]
    stages = plan.get("stages_s")
    if isinstance(stages, Mapping):
        seconds += [_row(name, stages.get(name), metric, steps) for name, metric in STAGES.items()]
    idle = plan.get("idle")
    shares = [_row(name, idle[name], f"idle/{name}", steps) for name in idle] if isinstance(idle, Mapping) else []
    seconds, shares = ([row for row in some if row["predicted"] is not None] for some in (seconds, shares))
    return {"seconds": seconds, "idle": shares, "differs": differs_most(seconds), "notes": _notes(plan)}


def differs_most(seconds: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence about the stage whose seconds differ most; None if nothing was measured."""
    known = [row for row in seconds if row["measured"] is not None]
    stages = [row for row in known if row["name"] != "step"]
    if not stages:
        return None
    most = max(stages, key=lambda row: abs(row["predicted"] - row["measured"]))
    sentence = f"{most['name']} differs most: {most['predicted']:.2f} s predicted, {most['measured']:.2f} s measured"
    step = next((row for row in known if row["name"] == "step" and row["measured"]), None)
    if step is None:
        return f"{sentence}."
    off = step["predicted"] / step["measured"] - 1
    return f"A step takes {step['measured']:.2f} s, of which the prediction is {off:+.0%} off; {sentence}."


def _row(name: str, predicted: Any, metric: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = [number for row in rows if (number := _number(row.get(metric))) is not None]
    return {"name": str(name), "predicted": _number(predicted), "measured": fmean(found) if found else None}


def _notes(plan: Mapping[str, Any]) -> list[str]:
    """Return the bottleneck, what helps, and the sources of the costs."""
    notes = [text] if isinstance(text := plan.get("bottleneck"), str) else []
    helps = plan.get("helps")
    for one in helps if isinstance(helps, list) else []:
        saves = _number(one.get("saves_s")) if isinstance(one, Mapping) else None
        if saves is not None and saves > 0:
            notes.append(f"{one.get('change')}: a step takes {saves:.1f} s less.")
    costs = plan.get("costs")
    if isinstance(costs, Mapping):
        notes += [f"{part}: {source}" for part, source in costs.items()]
    return notes


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
