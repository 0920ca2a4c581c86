"""Compares the presets of configs/algorithm/ on the demo: held-out exact match after a few updates, over seeds.

    python -m bench.algorithms                      # every preset, three seeds; about an hour and a half on two cores
    python -m bench.algorithms --preset grpo --preset grpo_muon --seeds 5

Every run is an `rlsys train` with the settings of its row (`ROWS`): a preset, or GRPO with Muon. Weights, questions,
episodes and optimiser steps are the same for all rows. Held-out exact match is measured with greedy decoding before the
first step and after each step. Results are added to outputs/bench/algorithms.json after each run; a seed that the file
has with the same steps and questions is not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from bench.record_searches import record_searches
from bench.training_run import training_run
from rlsys.config.compose import PROJECT_CONFIGS

OUT = Path("outputs/bench")
RESULT = OUT / "algorithms.json"
PRESETS = tuple(sorted({file.stem for file in (PROJECT_CONFIGS / "algorithm").glob("*.yaml")} - {"opd"}))
"""All but the preset that needs a teacher, which bench/distil.py compares with RL."""
_MUON = ("actor.optimizer=muon", "actor.optimizer.beta2=0.95")
ROWS: dict[str, tuple[str, ...]] = {
    **{name: (f"algorithm={name}",) for name in PRESETS},
    # The published update period of ten steps is longer than these runs.
    "ema_pg": ("algorithm=ema_pg", "algorithm.ref_policy_ema_update_period=1"),
    "grpo_muon": ("algorithm=grpo", *_MUON),
    "grpo_muon_5_lr": ("algorithm=grpo", *_MUON, "actor.optimizer.lr=5e-4"),
}
"""Settings of each row of the table: the presets, and GRPO with Muon at the demo's learning rate and at five times it."""
COLUMNS = 4
GREY, INK, LEAD = "#c4cad1", "#24292f", "#0b5394"

Entry = dict[str, Any]
Results = dict[str, list[Entry]]
"""Preset -> one entry per seed: seed, em_before, em_after, updates, and curve, a list of (updates, EM)."""


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Row to run; repeat for several. Default: all.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs per preset, with seeds 1, 2, ...", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps per run, of four updates each.", min=2)] = 4,
    questions: Annotated[int, typer.Option(help="Held-out questions per evaluation.", min=1)] = 200,
) -> None:
    """Run the presets on the demo's world, then print a table and draw curves of all runs with these settings."""
    unknown = sorted(set(preset or ()) - set(ROWS))
    if unknown:
        raise typer.BadParameter(f"--preset {unknown[0]} is not a row: there are {', '.join(ROWS)}.")
    console = Console()
    cassette = record_searches()
    results: Results = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    for seed in range(1, seeds + 1):
        for name in preset or ROWS:
            if any(_setting(one) == (seed, steps, questions) for one in results.get(name, [])):
                continue
            console.print(f"{name}, seed {seed} ...", highlight=False)
            entry = _entry(name, seed, steps, questions, cassette)
            kept = [one for one in results.get(name, []) if one["seed"] != seed]
            results[name] = sorted([*kept, entry], key=lambda one: int(one["seed"]))
            OUT.mkdir(parents=True, exist_ok=True)
            RESULT.write_text(json.dumps(results, indent=2) + "\n")
    shown = {
        name: alike
        for name, entries in results.items()
        if (alike := [one for one in entries if _setting(one)[1:] == (steps, questions)])
    }
    console.print(table(shown))
    draw(shown, RESULT.with_suffix(".png"))
    console.print(f"Written to {RESULT} and {RESULT.with_suffix('.png')}.", highlight=False)


def _entry(name: str, seed: int, steps: int, questions: int, cassette: Path) -> Entry:
    settings = [
        *ROWS[name],
        f"trainer.seed={seed}",
        f"trainer.steps={steps}",
        "eval.interval=1",
        f"eval.limit={questions}",
    ]
    run = training_run(OUT / "algorithms" / f"{name}-{seed}", settings, cassette)
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    per_step = int(yaml.safe_load((run / "config.yaml").read_text())["trainer"]["mini_batches"])
    return {
        "seed": seed,
        "em_before": summary["em_before"],
        "em_after": summary["em_after"],
        "updates": per_step * steps,
        "steps": steps,
        "questions": questions,
        "curve": [[one["step"] * per_step, one["em"]] for one in summary["evaluations"]],
        "reward": [row["critic/score/mean"] for row in rows],
        "step_s": fmean(row["time/step"] for row in rows[1:]),
    }


def table(results: Results) -> Table:
    """Return a table with one row per preset, the best first."""
    shown = Table(
        title="Held-out exact match of the demo's policy: mean and standard deviation over seeds",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("preset", no_wrap=True)
    for column in ("seeds", "updates", "before", "after", "dev.", "gain", "s/step"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name in _best_first(results):
        entries = results[name]
        before, after = (_mean(entries, key) for key in ("em_before", "em_after"))
        spread = stdev(one["em_after"] for one in entries) if len(entries) > 1 else 0.0
        numbers = (f"{before:.3f}", f"{after:.3f}", f"{spread:.3f}", f"{after - before:+.3f}")
        seconds = f"{_mean(entries, 'step_s'):.1f}"
        shown.add_row(name, str(len(entries)), str(entries[0]["updates"]), *numbers, seconds)
    return shown


def draw(results: Results, path: Path) -> None:
    """Draw exact match over updates to `path`: one panel per preset with its seeds and mean; the means of
    other presets are grey."""
    names = _best_first(results)
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(3.0 * COLUMNS, 2.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    for panel, name in zip(axes, names, strict=False):
        for other in names:
            panel.plot(*_mean_curve(results[other]), color=GREY, linewidth=0.8)
        for entry in results[name]:
            panel.plot(*zip(*entry["curve"], strict=True), color=LEAD, linewidth=0.8, alpha=0.5)
        updates, ems = _mean_curve(results[name])
        panel.plot(updates, ems, color=LEAD, linewidth=2.2, marker="o", markersize=3.5)
        panel.set_title(f"{name}   {ems[-1]:.2f}", loc="left", fontsize=10, color=INK)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e4e8ec", linewidth=0.6)
        panel.set_ylim(0.0, 1.0)
    for panel in axes[len(names) :]:
        panel.set_visible(False)
    figure.supxlabel("optimiser steps", fontsize=10)
    figure.supylabel("held-out exact match", fontsize=10)
    figure.savefig(path, dpi=150, facecolor="white")


def _setting(entry: Entry) -> tuple[int, int, int]:
    """Return seed, steps and questions; entries are comparable only if steps and questions are equal."""
    return entry["seed"], entry["steps"], entry["questions"]


def _best_first(results: Results) -> list[str]:
    return sorted(results, key=lambda name: _mean(results[name], "em_after"), reverse=True)


def _mean(entries: Sequence[Entry], key: str) -> float:
    return fmean(one[key] for one in entries)


def _mean_curve(entries: Sequence[Entry]) -> tuple[list[int], list[float]]:
    points = zip(*(entry["curve"] for entry in entries), strict=True)
    return [at for at, _ in entries[0]["curve"]], [fmean(em for _, em in point) for point in points]


if __name__ == "__main__":
    typer.run(main)
