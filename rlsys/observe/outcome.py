"""Draws a run's curves (exact match, reward, stage times) as PNG files, and prints tables that summarise the run.

Uses matplotlib's object interface, which needs neither global figure state nor a display.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Rows = Sequence[Mapping[str, Any]]

INK, FAINT = "#24292f", "#8c959f"
EM_COLOUR, REWARD_COLOUR = "#0b5394", "#2a9d8f"
HOP_COLOURS = ("#5b9bd5", "#e08e45", "#8e6bbf", "#7f7f7f")
STAGES = (
    ("rollout", "time/rollout", "#5b9bd5"),
    ("rewards", "time/reward", "#c9a227"),
    ("log-probs", "time/inference", "#8e6bbf"),
    ("values", "time/values", "#b85c8e"),
    ("training", "time/training", "#e08e45"),
    ("weight sync", "time/sync_weights", "#7fb069"),
)
WALL_KEY = "time/step"
REWARD_KEY = "critic/score/mean"
DPI = 200
LABEL_GAP = 0.075
"""Minimum distance between two labels, in units of exact match."""
MANY_STEPS = 60
"""Minimum number of steps at which bars are drawn without gaps and points without markers."""
DASH = "-"
NAME_WIDTH = 44
"""Width of the first column, which aligns the three tables within 80 columns."""
STAGE_NAMES = {
    **{"step": "steps, wall time", "reward": "rewards", "logprob": "log-probs"},
    **{"train": "training", "sync": "weight sync", "eval": "evaluation"},
}
HOP_NAMES = {"1": "one hop", "2": "two hops"}
CHECKS = (
    ("oracle EM (ceiling)", "oracle_em", "{:.3f}"),
    ("search recall@3", "recall_at_3", "{:.3f}"),
    ("same answer from HF and engine", "hf_engine_agreement", "{:.1%}"),
    ("max log-prob difference, engine vs. trainer", "logprob_max_diff", "{:.2e}"),
    ("first update, max |ratio - 1|", "first_ratio_max_dev", "{:.2e}"),
    ("trained tokens changed by re-tokenisation", "tokens_differing_share", "{:.2%}"),
    ("prompt tokens read from the prefix cache", "cached_prompt_share", "{:.1%}"),
    ("weight syncs", "weight_syncs", "{:.0f}"),
    ("steps", "steps", "{:.0f}"),
    ("seed", "seed", "{:.0f}"),
)
"""Label, summary key and number format of each check."""


class _Line(NamedTuple):
    name: str
    points: list[tuple[int, float]]
    colour: str
    width: float


def draw_curves(history: Rows, evaluations: Rows, out_dir: Path) -> list[Path]:
    """Write em.png, reward.png, stage_times.png, and curves.png with all three; return the paths written.

    `history`: rows of metrics.jsonl. `evaluations`: rows {"step", "em", "em_by_hop": {hop: em}, "searches",
    "questions"}. A panel without data is left out.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    panels: list[tuple[str, Callable[[Axes], str]]] = []
    if evaluations:
        panels.append(("em", lambda axes: _draw_em(axes, evaluations)))
    if _points(history, REWARD_KEY)[0]:
        panels.append(("reward", lambda axes: _draw_reward(axes, history)))
    if any(_points(history, key)[0] for _, key, _ in STAGES):
        panels.append(("stage_times", lambda axes: _draw_stages(axes, history)))
    paths = [_save(out_dir / f"{name}.png", [draw]) for name, draw in panels]
    if len(panels) > 1:
        paths.append(_save(out_dir / "curves.png", [draw for _, draw in panels]))
    return paths


def _save(path: Path, drawings: Sequence[Callable[[Axes], str]]) -> Path:
    figure = Figure(figsize=(4.6 * len(drawings), 3.2), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    FigureCanvasAgg(figure)
    for column, draw in enumerate(drawings, start=1):
        axes = figure.add_subplot(1, len(drawings), column)
        _dress(axes, draw(axes))
    figure.savefig(path, dpi=DPI, facecolor="white")
    return path


def _draw_em(axes: Axes, evaluations: Rows) -> str:
    """Draw exact match; return the panel's title, as the other drawing functions do."""
    rows = sorted(evaluations, key=lambda row: row["step"])
    hops = _in_order({hop for row in rows for hop in row.get("em_by_hop") or {}})
    lines = []
    for number, hop in enumerate(hops):
        points = [(row["step"], row["em_by_hop"][hop]) for row in rows if hop in (row.get("em_by_hop") or {})]
        name = "1 hop" if hop == "1" else f"{hop} hops".replace("$", r"\$")  # No formula.
        lines.append(_Line(name, points, HOP_COLOURS[number % len(HOP_COLOURS)], 1.4))
    lines.append(_Line("all", [(row["step"], row["em"]) for row in rows], EM_COLOUR, 2.4))
    for line in lines:
        axes.plot(*zip(*line.points, strict=True), color=line.colour, linewidth=line.width, marker="o", markersize=3)
    first, last = rows[0]["step"], rows[-1]["step"]
    axes.set_xlim(first - 0.14 * max(last - first, 1), last + 0.05 * max(last - first, 1))
    axes.set_ylim(0.0, 1.0)
    _label_points(axes, lines, last=True)
    if last > first:
        _label_points(axes, lines, last=False)
    return "Exact match, held-out questions"


def _in_order(hops: Iterable[str]) -> list[str]:
    """Sort the questions' values of `hops`: numbers by value, then other text."""
    numbers = {hop for hop in hops if hop.isascii() and hop.isdecimal()}
    return [*sorted(numbers, key=lambda hop: (len(hop.lstrip("0")), hop.lstrip("0"), hop)), *sorted({*hops} - numbers)]


def _draw_reward(axes: Axes, history: Rows) -> str:
    steps, rewards = _points(history, REWARD_KEY)
    axes.plot(steps, rewards, color=REWARD_COLOUR, linewidth=1.0, alpha=0.35)
    marker = "o" if len(steps) < MANY_STEPS else None
    axes.plot(steps, _smoothed(rewards), color=REWARD_COLOUR, linewidth=2.2, marker=marker, markersize=3)
    return "Mean reward of sampled episodes"


def _draw_stages(axes: Axes, history: Rows) -> str:
    rows = sorted((row for row in history if row.get("step") is not None), key=lambda row: row["step"])
    steps = [row["step"] for row in rows]
    base = [0.0] * len(rows)
    crowded = len(rows) >= MANY_STEPS
    for name, key, colour in STAGES:
        heights = [row.get(key) or 0.0 for row in rows]
        if any(heights):
            width, smooth = (1.0, False) if crowded else (0.82, True)
            axes.bar(steps, heights, width, base, color=colour, label=name, linewidth=0, antialiased=smooth)
            base = [low + height for low, height in zip(base, heights, strict=True)]
    wall_steps, walls = _points(history, WALL_KEY)
    if walls:
        edges = [step + side for step in wall_steps for side in (-0.5, 0.5)]
        axes.plot(edges, [wall for wall in walls for _ in range(2)], color=INK, linewidth=1.4, label="wall time")
    axes.set_ylim(0.0, 1.3 * max(*base, *walls, 1e-9))
    axes.legend(loc="upper right", ncols=3, fontsize=7.5, frameon=False, handlelength=1.0, columnspacing=1.0)
    return "Seconds per step: stages stacked, wall time as a line"


def _points(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    known = sorted((row["step"], row[key]) for row in rows if row.get(key) is not None)
    return [step for step, _ in known], [value for _, value in known]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the moving average over a centred window of about a tenth of the run, narrower at the ends."""
    reach = max(1, len(values) // 20)
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _label_points(axes: Axes, lines: Sequence[_Line], last: bool) -> None:
    """Label each line: with name and value at its last point if `last`, else with the value at its first point.

    Overlapping labels are moved apart.
    """
    lowest = 0.0
    for line in sorted(lines, key=lambda line: line.points[-1 if last else 0][1]):
        step, value = line.points[-1 if last else 0]
        height = max(value, lowest)
        lowest = height + LABEL_GAP
        axes.annotate(
            f"{line.name} {value:.2f}" if last else f"{value:.2f}",
            xy=(step, height),
            xytext=(7 if last else -6, 0),
            textcoords="offset points",
            ha="left" if last else "right",
            va="center",
            color=line.colour,
            fontsize=8.5,
            fontweight="bold" if line.name == "all" else "normal",
            annotation_clip=False,
        )


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel("step", fontsize=8.5, color=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelsize=8, labelcolor=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)


def render_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print `summary` to `console`. An absent, null or NaN value shows as a dash.

    Keys: em_before, em_after, em_before_by_hop, em_after_by_hop (hop -> EM), searches_before,
    searches_after, oracle_em, recall_at_3, weight_syncs, overlap_s, hf_engine_agreement,
    logprob_max_diff, first_ratio_max_dev, tokens_differing_share, cached_prompt_share, steps, seed,
    seconds (stage -> seconds).
    """
    seconds, steps = dict(summary.get("seconds") or {}), summary.get("steps") or 0
    times = _table("Time by stage", "total", "per step")
    for stage, total in seconds.items():
        times.add_row(STAGE_NAMES.get(stage, stage), *_time(total, steps))
    times.add_row("scoring and training during rollout", *_time(summary.get("overlap_s"), steps), style="green")
    checks = _table("Checks", "value")
    for name, key, form in CHECKS:
        checks.add_row(name, _text(_number(summary.get(key)), form))
    console.print(Group(_learned(summary), Text(), times, Text(), checks))


def _learned(summary: Mapping[str, Any]) -> Table:
    table = _table("Held-out questions", "before", "after", "change")
    _add_change(table, "exact match", summary.get("em_before"), summary.get("em_after"), "bold")
    before, after = summary.get("em_before_by_hop") or {}, summary.get("em_after_by_hop") or {}
    for hop in _in_order({*before, *after}):
        name = HOP_NAMES.get(hop, f"{hop} hops")
        _add_change(table, escape(f"  {name}"), before.get(hop), after.get(hop))
    _add_change(table, "searches per question", summary.get("searches_before"), summary.get("searches_after"))
    return table


def _time(seconds: Any, steps: int) -> tuple[str, str]:
    """Format total seconds and mean seconds per step."""
    total = _number(seconds)
    return _text(total, "{:.1f} s"), _text(None if total is None or not steps else total / steps, "{:.2f} s")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("", min_width=NAME_WIDTH, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, min_width=8)
    return table


def _add_change(table: Table, name: str, before: Any, after: Any, style: str = "") -> None:
    old, new = _number(before), _number(after)
    change = None if old is None or new is None else new - old
    table.add_row(name, _text(old, "{:.3f}"), _text(new, "{:.3f}"), _text(change, "{:+.3f}"), style=style)


def _number(value: Any) -> float | None:
    if value is None or value != value:  # NaN is the one value that differs from itself
        return None
    return float(value)


def _text(value: float | None, form: str) -> str:
    return DASH if value is None else form.format(value)
