"""Draws when each worker group was busy under three schedules, from the timelines of real runs.

    python -m bench.timeline          # three runs of the demo's world, about 6 minutes; writes docs/images/schedules.png

All runs start from the same weights, and their searches are answered from one cassette after the recorded latencies. A
panel starts with a step in the middle of its run; each colour is one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.pipeline import ASYNC, OUT, PIPELINED, SEQUENTIAL, Schedule
from bench.record_searches import record_searches
from bench.training_run import training_run
from rlsys.observe.records import StepTimeline
from rlsys.observe.run_folder import open_run
from rlsys.observe.spans import merge_intervals

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
"""Row of a panel -> beginnings of the names of its spans, from top to bottom."""
COLOURS = ("#5b9bd5", "#e08e45", "#7fb069", "#8e6bbf")
INK, FAINT = "#24292f", "#8c959f"


def main() -> None:
    """Run the demo's world under each schedule and draw the timelines one below the other."""
    cassette, timelines = record_searches(), []
    for schedule in SCHEDULES:
        settings = [*schedule.settings, "eval.interval=0", "eval.limit=8", f"trainer.steps={STEPS}"]
        run = training_run(OUT / "timeline" / schedule.name.replace(" ", "-"), settings, cassette)
        timelines.append((schedule, open_run(run).timeline()))
    print(f"Written to {draw(timelines, PICTURE)}.")


def draw(timelines: list[tuple[Schedule, tuple[StepTimeline, ...]]], path: Path) -> Path:
    """Draw a panel for each run, all with the time axis of the first run, which is the longest."""
    figure = Figure(figsize=(9.2, 1.45 * len(timelines) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True)
    for axes, (schedule, steps) in zip(panels, timelines, strict=True):
        _draw_panel(axes, steps)
        axes.set_title(schedule.name, loc="left", fontsize=10, color=INK, fontweight="bold")
    shown = [step.window for step in timelines[0][1] if FIRST <= step.step < FIRST + 2]
    panels[-1].set_xlim(0, (shown[-1][1] - shown[0][0]) / 1e9)
    panels[-1].set_xlabel("seconds since the start of a step; each colour is one step", fontsize=9, color=INK)
    figure.savefig(path, dpi=150, facecolor="white")
    return path


def _draw_panel(axes: Axes, steps: tuple[StepTimeline, ...]) -> None:
    origin = next(step.window[0] for step in steps if step.step == FIRST)
    for row, names in enumerate(LANES.values()):
        for step, pieces in _by_step(steps, names):
            bars = [((start - origin) / 1e9, (end - start) / 1e9) for start, end in merge_intervals(pieces)]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[step % len(COLOURS)], linewidth=0)
    axes.set_yticks(range(len(LANES)), LANES, fontsize=8.5, color=INK)
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.grid(axis="x", color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _by_step(steps: tuple[StepTimeline, ...], names: tuple[str, ...]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield the number of each step and the intervals of the spans that worked for it."""
    found: dict[int, set[tuple[int, int]]] = {}
    for timeline in steps:
        for span in timeline.spans:
            if span.name.startswith(names):
                number = int(span.args.get("step", timeline.step))  # type: ignore[arg-type]
                found.setdefault(number, set()).add((span.start_ns, span.end_ns))
    for number, pieces in sorted(found.items()):
        yield number, sorted(pieces)


if __name__ == "__main__":
    main()
