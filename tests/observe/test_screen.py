"""Progress, the final table and the curves: what a person sees."""

import io
from pathlib import Path

import numpy as np
from matplotlib import image
from rich.console import Console

from rlsys.observe.outcome import draw_curves, render_summary
from rlsys.observe.status import PLAIN_INTERVAL_S, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_piped_progress_is_sparse_and_tells_how_long_a_group_waits() -> None:
    clock, out = Clock(), io.StringIO()
    with Progress(Console(file=out, width=20), clock=clock) as progress:
        progress.update(step=1, steps=9, states={"rollout": "0/32 groups", "actor": "waits for log-probs"})
        for done in range(40):
            clock.now += 0.125
            progress.update(states={"rollout": f"{done}/32 groups", "actor": "waits for log-probs"})
        clock.now += PLAIN_INTERVAL_S
        progress.update(reward=0.5, tokens_per_s=1234.5)
        progress.update(step=2, em=0.25, states={"actor": "trains"})
    assert out.getvalue().splitlines() == [
        "step 1/9 | 0:00:00 | rollout: 0/32 groups | actor: waits for log-probs",
        "step 1/9 | reward 0.500 | tokens/s 1,234 | 0:00:15 | rollout: 39/32 groups | actor: waits for log-probs (15 s)",
        "step 2/9 | EM 0.250 | reward 0.500 | tokens/s 1,234 | 0:00:15 | rollout: 39/32 groups | actor: trains",
    ]


def test_a_group_with_several_voices_waits_only_where_all_of_them_wait() -> None:
    clock = Clock()
    progress = Progress(Console(quiet=True), clock=clock)

    def shown(**states: str) -> str:
        progress.update(states={voice.replace("_", "."): text for voice, text in states.items()})
        clock.now += 5
        return progress.line().partition("critic: ")[2]

    assert shown(critic="trains on 2 groups") == "trains on 2 groups"
    assert shown(critic_values="waits for rollouts") == "trains on 2 groups"
    assert shown(critic_values="computes values of 1 group") == "computes values of 1 group"
    # The values were begun later, but only the training still goes on.
    assert shown(critic_values="waits for rollouts") == "trains on 2 groups"
    assert shown(critic="waits for log-probs and values") == "waits for log-probs and values (5 s)"
    assert shown() == "waits for log-probs and values (10 s)"
    assert shown(critic="") == "waits for rollouts (20 s)"
    assert shown(critic_values="") == ""


SUMMARY = {
    "em_before": 0.142,
    "em_after": 0.731,
    "em_before_by_hop": {"1": 0.2, "2": 0.08},
    "em_after_by_hop": {"1": 0.77, "2": 0.69},
    "oracle_em": None,
    "logprob_max_diff": 2.34e-5,
    "first_ratio_max_dev": float("nan"),
    "overlap_s": 12.0,
    "steps": 15,
}


def test_the_final_table_holds_every_figure_within_its_width() -> None:
    out = io.StringIO()
    render_summary(SUMMARY, Console(file=out, width=80))
    lines = out.getvalue().splitlines()

    def figures(name: str) -> list[str]:
        (line,) = [line for line in lines if line.strip().startswith(name + " ")]
        return line.strip()[len(name) :].split()

    assert max(len(line.rstrip()) for line in lines) <= 80
    assert figures("exact match") == ["0.142", "0.731", "+0.589"]
    assert figures("two hops") == ["0.080", "0.690", "+0.610"]
    assert figures("hidden behind rollout") == ["12.0", "s", "0.80", "s"]
    assert figures("log-prob, engine vs. trainer, max difference") == ["2.34e-05"]
    for absent in ("oracle EM (ceiling)", "first update, max |ratio - 1|"):
        assert figures(absent) == ["-"]
    render_summary({}, Console(file=out, width=80))
    assert "nan" not in out.getvalue().lower(), "a summary of nothing is dashes"


def _row(step: int) -> dict[str, float]:
    return {"step": step, "critic/score/mean": 0.1 * step, "time/step": 9.0, "time/rollout": 7.0, "time/training": 4.0}


def test_curves_are_pictures_with_something_on_them(tmp_path: Path) -> None:
    assert draw_curves([], [], tmp_path) == []
    rows = [_row(1), {"step": 2, "critic/score/mean": None, "time/step": None}]
    evaluations = [
        {"step": 0, "em": 0.2, "em_by_hop": {"1": 0.3, "2": 0.1}, "searches": 0.5, "questions": 50},
        {"step": 5, "em": 0.6, "em_by_hop": {"1": 0.7, "2": 0.5}, "searches": 1.5, "questions": 50},
    ]
    paths = draw_curves(rows, evaluations, tmp_path)
    assert [path.name for path in paths] == ["em.png", "reward.png", "stage_times.png", "curves.png"]
    drawn = np.mean(image.imread(paths[0])[..., :3].min(axis=-1) < 0.9)
    assert 0.005 < drawn < 0.5
