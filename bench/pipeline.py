"""Compares the speed of sequential, pipelined and async runs of the demo with each other and with an ideal schedule.

    python -m bench.pipeline          # speed of every schedule; about an hour on two cores
    python -m bench.pipeline --only sequential --only "async 1" --latency recorded     # some rows
    python -m bench.pipeline --em     # adds held-out exact match, staleness and ratios of whole runs, over seeds

Every row is the median of `--rounds` separate runs of `rlsys train`. All schedules of a latency run once in each round, in
turn forwards and backwards (A B, B A, A B), so that a machine whose speed drifts slows all of them alike. All runs start
from the same weights, have the same number of episodes and optimiser steps, and get their searches from one cassette with
recorded latencies. The first and the last step are not timed: between them, a run with rollouts ahead of training rolls
out as much as it trains.

    ideal = sum / max(R, I, T, cpu_seconds / cores)

R, I and T are the seconds of rollout, log-probs and training in a step of the sequential run; `sum` is their total. An
ideal schedule keeps its longest stage, or all cores, busy all the time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
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
EVERYWHERE = (SEQUENTIAL, PIPELINED, *ASYNC)
"""Schedules measured at every latency; the others are measured at the recorded one."""
SCHEDULES = (COLOCATED, *EVERYWHERE, FINISH, ONE_UPDATE, OWN)
RECORDED = 1.0
LATENCIES = {"recorded": RECORDED, "none": 0.0, "4x": 4.0}
"""Search latency -> multiple of the recorded latencies."""
SUFFIXES = {RECORDED: "", 0.0: "_without_latency", 4.0: "_at_4x_latency"}
"""Multiple of the recorded latencies -> suffix of their key figures."""
TIMES = ("step_s", "rollout_s", "logprob_s", "train_s", "sync_s", "cpu_s", "search_misses", "steps")
"""Fields of `Measured` that are medians of its runs."""
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
    """Means over the measured steps of a run, or their medians over the runs of all rounds."""

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
    step_s_of_rounds: tuple[float, ...] = ()
    """Seconds of a step in each round."""

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
    rounds: Annotated[int, typer.Option(help="Runs of each row when speed is measured.", min=1)] = 2,
    latency: Annotated[list[str] | None, typer.Option(help=f"Repeat for several: {', '.join(LATENCIES)}.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Repeat for several: {'; '.join(one.name for one in SCHEDULES)}.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds for --em.", min=1)] = 3,
) -> None:
    """Measure the schedules on the demo's world."""
    console, plan = Console(), chosen(latency, only)
    cassette = record_searches()
    known = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    found = _exact_match(console, cassette, seeds) if em else _speed(console, cassette, steps, rounds, plan)
    OUT.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(known | found, indent=2) + "\n")
    console.print(f"Written to {RESULT}.", highlight=False)


def chosen(latencies: Sequence[str] | None, names: Sequence[str] | None) -> dict[float, list[Schedule]]:
    """Return multiple of the recorded latencies -> schedules to measure; None chooses all. Raises BadParameter."""
    unknown = [*({*(latencies or ())} - {*LATENCIES}), *({*(names or ())} - {one.name for one in SCHEDULES})]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is neither a latency nor a schedule; see --help")
    wanted = [LATENCIES[name] for name in latencies or LATENCIES]
    return {
        scale: [one for one in SCHEDULES if (one.name in names if names else one in EVERYWHERE or scale == RECORDED)]
        for scale in wanted
    }


def in_turn(schedules: Sequence[Schedule], rounds: int) -> list[Schedule]:
    """Return the schedules once per round, forwards and backwards in turn, so that a steady drift slows them alike."""
    return [one for number in range(rounds) for one in (schedules if number % 2 == 0 else reversed(schedules))]


def median_of(runs: Sequence[Measured]) -> Measured:
    return replace(
        runs[0],
        **{name: median(getattr(run, name) for run in runs) for name in TIMES},
        idle={group: median(run.idle[group] for run in runs) for group in GROUPS},
        step_s_of_rounds=tuple(run.step_s for run in runs),
    )


def _speed(
    console: Console, cassette: Path, steps: int, rounds: int, plan: Mapping[float, Sequence[Schedule]]
) -> dict[str, Any]:
    started = time.perf_counter()
    rows: list[Measured] = []
    for latency, schedules in plan.items():
        runs: dict[str, list[Measured]] = {one.name: [] for one in schedules}
        for schedule in in_turn(schedules, rounds):
            console.print(f"{schedule.name}, {latency:g} x the recorded search latency ...", highlight=False)
            runs[schedule.name].append(_measure(schedule, latency, cassette, steps))
        rows += [median_of(each) for each in runs.values()]
    console.print(_times(rows), _idle(rows))
    figures = {**key_figures(rows), "seconds": time.perf_counter() - started, "cores": os.cpu_count()}
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


def _row(rows: Sequence[Measured], schedule: Schedule, latency: float = RECORDED) -> Measured | None:
    return next((row for row in rows if (row.schedule, row.latency) == (schedule.name, latency)), None)


def key_figures(rows: Sequence[Measured]) -> dict[str, float]:
    """Return the key metrics of the rows that were measured; each compares rows of one latency."""
    found: dict[str, float] = {}

    def ratio(name: str, slower: Schedule, faster: Schedule, latency: float = RECORDED) -> None:
        one, other = _row(rows, slower, latency), _row(rows, faster, latency)
        if one and other:
            found[name] = one.step_s / other.step_s

    ratio("speedup_pipelined", SEQUENTIAL, PIPELINED)
    ratio("speedup_async1_finish", SEQUENTIAL, FINISH)
    ratio("speedup_own_logprobs", ONE_UPDATE, OWN)
    ratio("speedup_async1_vs_colocated", COLOCATED, ASYNC[0])
    for latency, suffix in SUFFIXES.items():
        for k, schedule in enumerate(ASYNC, start=1):
            ratio(f"speedup_async{k}{suffix}", SEQUENTIAL, schedule, latency)
        if sequential := _row(rows, SEQUENTIAL, latency):
            found[f"ideal{suffix}"] = sequential.ideal
            if speedup := found.get(f"speedup_async1{suffix}"):
                found[f"fraction_of_ideal_async1{suffix}"] = speedup / sequential.ideal
    return found


def _as_dict(row: Measured, rows: Sequence[Measured]) -> dict[str, Any]:
    shown = {
        "schedule": row.schedule,
        "latency_scale": row.latency,
        **{name: getattr(row, name) for name in TIMES},
        "step_s_of_rounds": row.step_s_of_rounds,
        **{f"idle_{group}": share for group, share in row.idle.items()},
    }
    if baseline := _row(rows, SEQUENTIAL, row.latency):
        speedup = baseline.step_s / row.step_s
        shown |= {"speedup": speedup, "ideal": baseline.ideal, "fraction_of_ideal": speedup / baseline.ideal}
    return shown


def _times(rows: Sequence[Measured]) -> Table:
    table = _table("Seconds per step", ("step", "rounds", "rollout", "score", "train", "cpu", "gain", "/ideal"))
    for row in rows:
        shown, spread = _as_dict(row, rows), " ".join(f"{each:.1f}" for each in row.step_s_of_rounds)
        times = (row.rollout_s, row.logprob_s, row.train_s, row.cpu_s)
        gains = (f"{shown['speedup']:.2f} x", f"{shown['fraction_of_ideal']:.2f}") if "speedup" in shown else ("", "")
        _add(table, row, [f"{row.step_s:.2f}", spread, *(f"{value:.2f}" for value in times), *gains])
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
