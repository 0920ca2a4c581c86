"""Tells Prometheus of a run, from its folder. Pure.

Every figure of the last step is a sample of `rlsys_figure`, under the name that it has in metrics.jsonl, which
docs/metrics.md explains; engines' counts, and what each group does or waits for, have families of their own. What a
run has not written yet is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from rlsys.observe.run_folder import RunFolder
from rlsys.observe.status import WAIT_PREFIX
from rlsys.report.life import Phase, RunLife

_ENGINE = re.compile(r"engine/([^/]+)/(.+)")
_IDLE = "idle/"


def exposition(run: RunFolder, life: RunLife, now: float) -> bytes:
    """All samples of `run` at `now`, seconds since the epoch, in Prometheus' text format."""
    row = run.rows[-1] if run.rows else {}
    figures = {
        _writable(name): value for name, value in row.items() if name not in ("step", "time") and _is_figure(value)
    }
    families = [*_of_run(run, life), *_of_groups(run, life, now, figures), *_of_step(figures)]

    class Families(Collector):
        def collect(self) -> Iterator[Metric]:
            return iter(families)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())
    return generate_latest(registry)


def _of_run(run: RunFolder, life: RunLife) -> Iterator[Metric]:
    labels = {"run": run.name, "name": _writable(str(run.config.get("name", "")))}
    yield InfoMetricFamily("rlsys_run", "What is watched.", labels)
    phases = {phase.value: float(phase is life.phase) for phase in Phase}
    yield _gauge("rlsys_run_phase", "1 for how far the run is, 0 for the others.", "phase", phases)
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


def _of_groups(run: RunFolder, life: RunLife, now: float, figures: Mapping[str, float]) -> Iterator[Metric]:
    """What each group does at this moment, while the run goes on, and how idle it was in the last step."""
    waits = GaugeMetricFamily(
        "rlsys_group_wait_seconds", "How long the group has been waiting, and for what.", labels=["group", "cause"]
    )
    at_work = {}
    states = (run.status or {}).get("states")
    for group, state in states.items() if life.phase is Phase.running and isinstance(states, dict) else ():
        if isinstance(state, dict):
            text, since = _writable(str(state.get("text", ""))), state.get("since")
            waiting = text.startswith(WAIT_PREFIX)
            at_work[_writable(group)] = float(not waiting)
            if waiting and _is_figure(since):
                cause = text.removeprefix(WAIT_PREFIX).strip().removeprefix("for ")
                waits.add_metric([_writable(group), cause], max(0.0, now - since))
    idle = {name.removeprefix(_IDLE): value for name, value in figures.items() if name.startswith(_IDLE)}
    yield _gauge("rlsys_group_at_work", "1 if the group works, 0 if it waits.", "group", at_work)
    yield waits
    meaning = "Share of the last step in which nobody of the group worked."
    yield _gauge("rlsys_group_idle_ratio", meaning, "group", idle)


def _of_step(figures: Mapping[str, float]) -> Iterator[Metric]:
    """The figures of the last step."""
    plain: dict[str, float] = {}
    engines: dict[str, UnknownMetricFamily] = {}
    for name, value in figures.items():
        if match := _ENGINE.fullmatch(name):
            count = _engine_name(match[2])
            meaning = f"Of the last step's row: {match[2]} of an engine or its search client."
            family = engines.setdefault(count, UnknownMetricFamily(count, meaning, labels=["engine"]))
            family.add_metric([match[1]], value)
        elif not name.startswith(_IDLE):
            plain[name] = value
    yield _gauge("rlsys_figure", "A figure of the last step, see docs/metrics.md.", "name", plain)
    yield from engines.values()


def _gauge(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _engine_name(name: str) -> str:
    if name.endswith("_s") and not name.endswith("_per_s"):  # Prometheus writes units out.
        name = name.removesuffix("_s") + "_seconds"
    return "rlsys_engine_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _writable(text: str) -> str:
    """`text` with a question mark for each half of a pair of surrogates, which UTF-8 does not have."""
    return text.encode(errors="replace").decode()


def _is_figure(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
