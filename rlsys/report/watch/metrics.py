"""What Prometheus is told of a run, from its folder. Pure.

Every figure of the last step is a sample of `rlsys_figure`, under the name that it has in metrics.jsonl, which
docs/metrics.md explains; engines' counts, and what each group does or waits for, have families of their own. What a
run has not written yet is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from rlsys.observe.progress import WAIT_PREFIX
from rlsys.observe.run_folder import RunFolder
from rlsys.report.life import Life, Phase

_ENGINE = re.compile(r"engine/([^/]+)/(.+)")
_IDLE = "idle/"


def exposition(run: RunFolder, life: Life, now: float) -> bytes:
    """All samples of `run` at `now`, seconds since the epoch, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed([*_of_run(run, life), *_of_groups(run, life, now), *_of_step(run)]))
    return generate_latest(registry)


class _Fixed(Collector):
    """Families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _of_run(run: RunFolder, life: Life) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "rlsys_run", "What is watched.", {"run": run.name, "name": _writable(str(run.config.get("name", "")))}
    )
    phase = GaugeMetricFamily("rlsys_run_phase", "1 for how far the run is, 0 for the others.", labels=["phase"])
    for one in Phase:
        phase.add_metric([one], float(one is life.phase))
    yield phase
    status = run.status or {}
    last = run.evaluations[-1] if run.evaluations else {}
    # A run of an older version has no status; its rows say the step as well.
    step = status.get("step", run.rows[-1]["step"] if run.rows else None)
    for name, value, meaning in (
        ("step", step, "Steps that are done."),
        ("steps", status.get("steps"), "Steps that the run shall have."),
        ("begun_timestamp_seconds", status.get("begun"), "When this life of the run began."),
        ("status_timestamp_seconds", status.get("at"), "When the run last said what it does."),
        ("exact_match", last.get("em"), "Exact match of held-out questions, in the last evaluation."),
        ("evaluation_step", last.get("step"), "The step that this was after."),
        ("reward", status.get("reward"), "Mean reward of the last step."),
        ("tokens_per_second", status.get("tokens_per_s"), "Generated tokens a second of the last step."),
    ):
        if _is_figure(value):
            yield GaugeMetricFamily(f"rlsys_run_{name}", meaning, value=value)


def _of_groups(run: RunFolder, life: Life, now: float) -> Iterator[Metric]:
    """What each group does at this moment, while the run goes on, and how idle it was in the last step."""
    waits = GaugeMetricFamily(
        "rlsys_group_wait_seconds",
        "How long the group has been waiting, and for what.",
        labels=["group", "cause"],
    )
    works = GaugeMetricFamily("rlsys_group_at_work", "1 if the group works, 0 if it waits.", labels=["group"])
    for group, state in _states(run, life):
        text, since = _writable(str(state.get("text", ""))), state.get("since")
        waiting = text.startswith(WAIT_PREFIX)
        works.add_metric([group], float(not waiting))
        if waiting and _is_figure(since):
            cause = text.removeprefix(WAIT_PREFIX).strip().removeprefix("for ")
            waits.add_metric([group, cause], max(0.0, now - since))
    yield works
    yield waits
    idle = GaugeMetricFamily(
        "rlsys_group_idle_ratio",
        "Share of the last step in which nobody of the group worked.",
        labels=["group"],
    )
    for name, value in _figures(run):
        if name.startswith(_IDLE):
            idle.add_metric([name.removeprefix(_IDLE)], value)
    yield idle


def _states(run: RunFolder, life: Life) -> list[tuple[str, Mapping[str, Any]]]:
    states = (run.status or {}).get("states")
    if life.phase is not Phase.running or not isinstance(states, dict):
        return []
    return [(_writable(group), state) for group, state in states.items() if isinstance(state, dict)]


def _of_step(run: RunFolder) -> Iterator[Metric]:
    """The figures of the last step."""
    figures = GaugeMetricFamily("rlsys_figure", "A figure of the last step, see docs/metrics.md.", labels=["name"])
    engines: dict[str, UnknownMetricFamily] = {}
    for name, value in _figures(run):
        if found := _ENGINE.fullmatch(name):
            count = _engine_name(found[2])
            meaning = f"Of the last step's row: {found[2]} of an engine or its search client."
            family = engines.setdefault(count, UnknownMetricFamily(count, meaning, labels=["engine"]))
            family.add_metric([found[1]], value)
        elif not name.startswith(_IDLE):
            figures.add_metric([name], value)
    yield figures
    yield from engines.values()


def _figures(run: RunFolder) -> list[tuple[str, float]]:
    row = run.rows[-1] if run.rows else {}
    return [
        (_writable(name), value) for name, value in row.items() if name not in ("step", "time") and _is_figure(value)
    ]


def _engine_name(name: str) -> str:
    if name.endswith("_s") and not name.endswith("_per_s"):  # Prometheus writes units out.
        name = name.removesuffix("_s") + "_seconds"
    return "rlsys_engine_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _writable(text: str) -> str:
    """`text` with a question mark for each half of a pair of surrogates, which UTF-8 does not have."""
    return text.encode(errors="replace").decode()


def _is_figure(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
