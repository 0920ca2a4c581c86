"""Draws when each worker group was busy under three schedules, from the timelines of real runs.

    python -m bench.timeline          # three runs of the demo's world, about 6 minutes; writes docs/images/schedules.png

All runs start from the same weights, and their searches are answered from one cassette after the recorded latencies. A
panel starts with a step in the middle of its run; each colour is one step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.pipeline import ASYNC, OUT, PIPELINED, SEQUENTIAL
from bench.record_searches import record_searches
from bench.training_run import training_run
from rlsys.observe.records import StepTimeline
from rlsys.observe.run_folder import open_run
from rlsys.observe.spans import Interval, merge_intervals

PICTURE = Path(__file__).resolve().parents[1] / "docs/images/schedules.png"
SCHEDULES = (SEQUENTIAL, PIPELINED, ASYNC[0])
STEPS, FIRST = 6, 3
"""Number of steps of a run, and the first step in a panel."""
LANES = {
    "rollout": ("rollout.group",),
    "log-probs": ("logprob.compute",),
    "training": ("train.accumulate", "train.apply"),
    "weight sync": ("sync",),
}
"""Rows of a panel, from top to bottom: row -> prefixes of the names of its spans."""
COLOURS = ("#5b9bd5", "#e08e45", "#7fb069", "#8e6bbf")
INK, FAINT = "#24292f", "#8c959f"


def main() -> None:
    """Run the demo's world under each schedule and draw one timeline below the other."""
    cassette, runs = record_searches(), []
    for schedule in SCHEDULES:
        settings = [*schedule.settings, "eval.interval=0", "eval.limit=8", f"trainer.steps={STEPS}"]
        run = training_run(OUT / "timeline" / schedule.name.replace(" ", "-"), settings, cassette)
        runs.append(run)
    print(f"Written to {draw(runs, PICTURE)}.")


def draw(runs: Sequence[Path], path: Path) -> Path:
    """Draw a panel for each run, in the order of `SCHEDULES`. All have the time axis of the first, longest run."""
    figure = Figure(figsize=(9.2, 1.45 * len(runs) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(runs), 1, sharex=True)
    for axes, schedule, run in zip(panels, SCHEDULES, runs, strict=True):
        _draw_panel(axes, run)
        axes.set_title(schedule.name, loc="left", fontsize=10, color=INK, fontweight="bold")
    shown = [step.window for step in open_run(runs[0]).timeline() if FIRST <= step.step < FIRST + 2]
    panels[-1].set_xlim(0, (shown[-1][1] - shown[0][0]) / 1e9)
    panels[-1].set_xlabel("seconds since the start of a step; each colour is one step", fontsize=9, color=INK)
    figure.savefig(path, dpi=150, facecolor="white")
    return path


def _draw_panel(axes: Axes, run: Path) -> None:
    steps = open_run(run).timeline()
    prompts = [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]
    trained = {prompt["uid"]: prompt["step"] for prompt in prompts}
    origin = next(step.window[0] for step in steps if step.step == FIRST)
    for row, names in enumerate(LANES.values()):
        for step, pieces in _by_step(steps, names, trained):
            bars = [((start - origin) / 1e9, (end - start) / 1e9) for start, end in merge_intervals(pieces)]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[step % len(COLOURS)], linewidth=0)
    axes.set_yticks(range(len(LANES)), LANES, fontsize=8.5, color=INK)
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.grid(axis="x", color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _by_step(
    timeline: Sequence[StepTimeline], names: tuple[str, ...], trained: Mapping[str, int]
) -> Iterator[tuple[int, list[Interval]]]:
    """Yield each step and the intervals of the spans that worked for it; a rollout works for the step that trains it."""
    found: dict[int, set[Interval]] = {}
    for span in (span for step in timeline for span in step.spans if span.name.startswith(names)):
        step = trained.get(str(span.args.get("question"))) or int(span.args["step"])  # type: ignore[arg-type]
        found.setdefault(step, set()).add((span.start_ns, span.end_ns))
    for step, intervals in sorted(found.items()):
        yield step, sorted(intervals)


if __name__ == "__main__":
    main()
