"""Compares the speed of sequential, pipelined and async runs of the demo with each other and with an ideal schedule.

    python -m bench.pipeline          # speed of every schedule; about 20 minutes on two cores
    python -m bench.pipeline --em     # adds held-out exact match, staleness and ratios of whole runs, over seeds

Every row is a separate run of `rlsys train`. All runs start from the same weights, have the same number of episodes and
optimiser steps, and get their searches from one cassette with recorded latencies. The first and the last step are not
timed: between them, a run with rollouts ahead of training rolls out as much as it trains.

    ideal = sum / max(R, I, T, cpu_seconds / cores)

R, I and T are the seconds of rollout, log-probs and training in a step of the sequential run; `sum` is their total. An
ideal schedule keeps its longest stage, or all cores, busy all the time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.record_searches import record_searches
from bench.training_run import training_run

OUT = Path("outputs/bench")
RESULT = OUT / "pipeline.json"
GROUPS = ("rollout", "inference", "actor")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule and its settings."""

    name: str
    settings: tuple[str, ...]


SEQUENTIAL = Schedule("sequential", ("trainer.schedule.kind=sequential",))
COLOCATED = Schedule(
    "colocated",
    ("trainer.schedule.kind=sequential", "cluster=one_slot", f"cluster.threads={os.cpu_count()}"),
)
PIPELINED = Schedule("pipelined", ("trainer.schedule.kind=pipelined",))
ASYNC = tuple(
    Schedule(f"async {k}", ("trainer.schedule.kind=async", f"trainer.schedule.max_staleness={k}")) for k in (1, 2)
)
FINISH = Schedule("async 1, finish", (*ASYNC[0].settings, "trainer.schedule.on_update=finish"))
ONE_UPDATE = Schedule("one update", (*PIPELINED.settings, "trainer.mini_batches=1"))
"""Pipelined with one optimiser step per training step, as `algorithm.old_logprobs=actor` needs."""
OWN = Schedule("one update, own log-probs", (*ONE_UPDATE.settings, "algorithm.old_logprobs=actor"))
RECORDED = 1.0
LATENCIES = {RECORDED: "", 0.0: "_without_latency", 4.0: "_at_4x_latency"}
"""Search latencies as multiples of the recorded latencies -> suffix of their key figures."""
STALENESS: dict[str, tuple[Callable[[list[float]], float], str]] = {
    "staleness_mean": (fmean, "staleness/mean"),
    "staleness_max": (max, "staleness/max"),
    "dropped_stale": (max, "pipeline/dropped_stale"),
    "ratio_mean": (fmean, "actor/ratio"),
    "ratio_dev_max": (max, "actor/ratio_dev_max"),
    "clip_fraction": (fmean, "actor/clip_fraction"),
    "logprob_max_diff": (max, "logprob/max_diff"),
}
"""Figure of a run -> how it is computed from a metric of all steps."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the measured steps of a run."""

    schedule: str
    latency: float
    steps: int
    step_s: float
    rollout_s: float
    logprob_s: float
    train_s: float
    sync_s: float
    cpu_s: float
    idle: dict[str, float]
    search_misses: float

    @property
    def ideal_step_s(self) -> float:
        """Seconds of the longest stage, or processor seconds divided by the number of cores if that is more; defined
        for sequential runs."""
        return max(self.rollout_s, self.logprob_s, self.train_s, self.cpu_s / (os.cpu_count() or 1))

    @property
    def ideal(self) -> float:
        """Sum of the stages divided by the ideal time of a step; defined for sequential runs."""
        return (self.rollout_s + self.logprob_s + self.train_s) / self.ideal_step_s


def main(
    em: Annotated[bool, typer.Option(help="Compare held-out exact match instead of speed; slow.")] = False,
    steps: Annotated[int, typer.Option(help="Steps per run when speed is measured.", min=4)] = 5,
    seeds: Annotated[int, typer.Option(help="Number of seeds for --em.", min=1)] = 3,
) -> None:
    """Measure the schedules on the demo's world."""
    console = Console()
    cassette = record_searches()
    known = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    found = _exact_match(console, cassette, seeds) if em else _speed(console, cassette, steps)
    OUT.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(known | found, indent=2) + "\n")
    console.print(f"Written to {RESULT}.", highlight=False)


def _speed(console: Console, cassette: Path, steps: int) -> dict[str, Any]:
    started = time.perf_counter()
    rows: list[Measured] = []
    for latency in LATENCIES:
        schedules = [SEQUENTIAL, PIPELINED, *ASYNC]
        if latency == RECORDED:
            schedules = [COLOCATED, *schedules, FINISH, ONE_UPDATE, OWN]
        for schedule in schedules:
            console.print(f"{schedule.name}, {latency:g} x the recorded search latency ...", highlight=False)
            rows.append(_measure(schedule, latency, cassette, steps))
    console.print(_times(rows), _idle(rows))
    figures = {**_key_figures(rows), "seconds": time.perf_counter() - started, "cores": os.cpu_count()}
    for name, value in figures.items():
        console.print(f"{name} {value:.3f}", highlight=False)
    return {**figures, "rows": [_as_dict(row, rows) for row in rows]}


def _measure(schedule: Schedule, latency: float, cassette: Path, steps: int) -> Measured:
    settings = [
        *schedule.settings,
        f"trainer.steps={steps}",
        "eval.limit=8",
        f"search.cassette.latency_scale={latency}",
    ]
    run = _run(f"{schedule.name}-{latency:g}", settings, cassette)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:-1]

    def mean(key: str) -> float:
        return fmean(row.get(key, 0.0) for row in rows)

    return Measured(
        schedule=schedule.name,
        latency=latency,
        steps=len(rows),
        step_s=mean("time/step"),
        rollout_s=mean("time/rollout"),
        logprob_s=mean("time/inference"),
        train_s=mean("time/training"),
        sync_s=mean("time/sync_weights"),
        cpu_s=mean("time/cpu"),
        idle={group: mean(f"idle/{group}") for group in GROUPS},
        search_misses=rows[-1].get("engine/0/search_misses", 0.0),
    )


def _exact_match(console: Console, cassette: Path, seeds: int) -> dict[str, Any]:
    """Return, by schedule and seed, the held-out exact match after whole runs of the demo's length, and their staleness."""
    found: dict[str, list[dict[str, float]]] = {}
    for schedule in (PIPELINED, ASYNC[0], FINISH):
        for seed in range(1, seeds + 1):
            settings = [*schedule.settings, f"trainer.seed={seed}", "eval.limit=400"]
            run = _run(f"em-{schedule.name}-{seed}", settings, cassette)
            found.setdefault(schedule.name, []).append(_learned(run))
            console.print(f"{schedule.name}, seed {seed}: {found[schedule.name][-1]}", highlight=False)
    em = {name: fmean(one["em"] for one in runs) for name, runs in found.items()}
    gaps = {
        "em_gap_async1": abs(em[PIPELINED.name] - em[ASYNC[0].name]),
        "em_gap_finish": abs(em[FINISH.name] - em[ASYNC[0].name]),
    }
    for name, gap in gaps.items():
        console.print(f"{name} {gap:.3f} over {seeds} seeds", highlight=False)
    return {**gaps, "em_seeds": seeds, "em_after": found}


def _learned(run: Path) -> dict[str, float]:
    """Return the exact match after a run, and the figures in `STALENESS`."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figures = {name: of([row[key] for row in rows]) for name, (of, key) in STALENESS.items()}
    return {"em": json.loads((run / "summary.json").read_text())["em_after"], **figures}


def _run(name: str, settings: Iterable[str], cassette: Path) -> Path:
    """Run one training and return its folder."""
    folder = OUT / "pipeline" / name.replace(", ", "-").replace(" ", "-")
    return training_run(folder, ["eval.interval=0", *settings], cassette)


def _sequential(rows: Sequence[Measured], latency: float) -> Measured:
    return _row(rows, SEQUENTIAL.name, latency)


def _row(rows: Sequence[Measured], schedule: str, latency: float = RECORDED) -> Measured:
    return next(row for row in rows if (row.schedule, row.latency) == (schedule, latency))


def _key_figures(rows: Sequence[Measured]) -> dict[str, float]:
    """Return the key metrics at the recorded latency, and those of async runs at every latency."""
    one, colocated = (_row(rows, schedule.name) for schedule in (ASYNC[0], COLOCATED))
    figures = {
        "speedup_pipelined": _speedup(rows, PIPELINED),
        "speedup_async1_finish": _speedup(rows, FINISH),
        "speedup_own_logprobs": _row(rows, ONE_UPDATE.name).step_s / _row(rows, OWN.name).step_s,
        "speedup_async1_vs_colocated": colocated.step_s / one.step_s,
    }
    for latency, suffix in LATENCIES.items():
        ideal = _sequential(rows, latency).ideal
        speedups = [_speedup(rows, schedule, latency) for schedule in ASYNC]
        figures |= {f"speedup_async{k}{suffix}": speedup for k, speedup in enumerate(speedups, start=1)}
        figures |= {f"ideal{suffix}": ideal, f"fraction_of_ideal_async1{suffix}": speedups[0] / ideal}
    return figures


def _speedup(rows: Sequence[Measured], schedule: Schedule, latency: float = RECORDED) -> float:
    return _sequential(rows, latency).step_s / _row(rows, schedule.name, latency).step_s


def _as_dict(row: Measured, rows: Sequence[Measured]) -> dict[str, Any]:
    baseline = _sequential(rows, row.latency)
    speedup = baseline.step_s / row.step_s
    idle = {f"idle_{group}": share for group, share in row.idle.items()}
    times = ("step_s", "rollout_s", "logprob_s", "train_s", "sync_s", "cpu_s", "search_misses", "steps")
    return {
        "schedule": row.schedule,
        "latency_scale": row.latency,
        **{name: getattr(row, name) for name in times},
        **idle,
        "speedup": speedup,
        "ideal": baseline.ideal,
        "fraction_of_ideal": speedup / baseline.ideal,
    }


def _times(rows: Sequence[Measured]) -> Table:
    names = ("step", "rollout", "score", "train", "cpu", "gain", "/ideal")
    table = _table("Seconds per step", names)
    for row in rows:
        shown = _as_dict(row, rows)
        times = (row.step_s, row.rollout_s, row.logprob_s, row.train_s, row.cpu_s)
        gains = (f"{shown['speedup']:.2f} x", f"{shown['fraction_of_ideal']:.2f}")
        _add(table, row, [*(f"{value:.2f}" for value in times), *gains])
    return table


def _idle(rows: Sequence[Measured]) -> Table:
    columns = [f"{group} idle" for group in GROUPS]
    table = _table("Idle share of a step, and seconds of weight sync", [*columns, "sync"])
    for row in rows:
        _add(table, row, [*(f"{row.idle[group]:.0%}" for group in GROUPS), f"{row.sync_s:.2f}"])
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("search")
    table.add_column("schedule", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _add(table: Table, row: Measured, cells: Sequence[str]) -> None:
    table.add_row(f"{row.latency:g} x", row.schedule, *cells)


if __name__ == "__main__":
    typer.run(main)
