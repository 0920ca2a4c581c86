"""Checks the pipeline's properties over many seeds: whole runs with scripted workers under a virtual clock.

    python -m bench.interleavings --seeds 100000           # 15 minutes on one core; the test suite runs fewer seeds
    python -m bench.interleavings --first 4711 --seeds 1   # repeats one seed

Each seed is run once without interruption, and again with the run killed and resumed one or two times. docs/pipeline.md
explains what a seed decides and which properties are checked. Each failing seed is printed with the property that it
violates; the exit status is then 1.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.orchestrator.pipeline.simulation import Simulation, simulate, simulate_lives
from tests.orchestrator.pipeline.watched import Breach

RESULT = Path("outputs/bench/interleavings.json")
SHOWN = 20
"""Failures listed in the table."""


def main(
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 100_000,
    first: Annotated[int, typer.Option(help="First seed.", min=0)] = 0,
) -> None:
    """Run every seed, print counts and failures, and write the result file."""
    console = Console()
    failures: dict[int, str] = {}
    seen: Counter[str] = Counter()
    started, started_cpu = time.perf_counter(), time.process_time()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("no failure", total=seeds)
        for seed in range(first, first + seeds):
            try:
                seen += _seen(simulate(seed))
                seen += _seen_saved(simulate_lives(seed))
            except Exception as error:  # noqa: BLE001, each is a finding; the other seeds still run
                failures[seed] = str(error) if isinstance(error, Breach) else repr(error)
                progress.update(task, description=f"[red]{len(failures)} failures")
            progress.advance(task)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    console.print(_table(seeds, cpu_seconds, seen, failures))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "first": first,
        "seeds": seeds,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "seeds_per_s": seeds / seconds,
        "seeds_per_cpu_s": seeds / cpu_seconds,
        "seen": dict(seen),
        "failures": failures,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    raise typer.Exit(bool(failures))


def _seen(simulation: Simulation) -> Counter[str]:
    """Count the run's events. The counts show that the seeds cover each kind of event."""
    record = simulation.record
    dropped = Counter(f"dropped: {reason}" for _, reason in record.dropped)
    counts = {
        f"runs ended by {simulation.script.ending}": 1,
        "prompt groups": len(record.prompt_groups),
        "groups trained": len(record.trained),
        "policy updates": record.version,
    }
    return dropped + Counter(counts)


def _seen_saved(lives: Sequence[Simulation]) -> Counter[str]:
    """Count the prompt groups that were in flight when the launches of a run were saved."""
    counts: Counter[str] = Counter()
    for state in (life.saved.state.pipeline for life in lives if life.saved is not None):
        counts += Counter(
            {
                "runs killed and resumed": 1,
                "saved: groups in rollout": len(state.scheduler.rolling),
                "saved: groups in rollout with partial episodes": len(state.progress),
                "saved: groups waiting for scores": len(state.rewarded),
                "saved: scored groups": len(state.scored),
            }
        )
    return counts


def _table(seeds: int, cpu_seconds: float, seen: Counter[str], failures: dict[int, str]) -> Table:
    rate = f"{seeds:,} seeds, {seeds / cpu_seconds:.0f} per second on one core"
    table = Table(title=rate, title_justify="left", show_header=False)
    table.add_column("event")
    table.add_column("count", justify="right")
    for name, count in sorted(seen.items()):
        table.add_row(name, f"{count:,}")
    table.add_row("[red]failures" if failures else "failures", str(len(failures)), style="bold")
    for seed, failure in list(failures.items())[:SHOWN]:
        table.add_row(f"  --first {seed} --seeds 1: {failure}", "")
    return table


if __name__ == "__main__":
    typer.run(main)
