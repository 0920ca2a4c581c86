"""A run's rows: how updates become one, where times go, and what guards leave behind."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.guards import GuardsConfig
from rlsys.config.schema import RunConfig, TrackingConfig
from rlsys.observe.metrics import read_metrics
from rlsys.observe.progress import Progress
from rlsys.observe.spans import Tracer
from rlsys.pipeline.flops import Flops
from rlsys.pipeline.group import Group
from rlsys.record import RunRecord, update_figures
from tests.pipeline.build import question, rewarded, trajectory

S = 1_000_000_000
GROUPS = [Group(question(1), (rewarded(trajectory(range(5), version=0), 1.0),))]
NAN = float("nan")


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> int:
        return self.seconds * S


class Run:
    """A record whose tracers go by one clock."""

    def __init__(
        self, folder: Path, cost: Flops | None = None, peak: float | None = None, **guards: Any
    ) -> None:
        config = RunConfig(
            tracking=TrackingConfig(tensorboard=False, wandb=False),
            guards=GuardsConfig(**guards),
            algorithm=AlgorithmConfig(kl_coef=0.25),
        )
        self.clock, self.printed, self.folder = Clock(), io.StringIO(), folder
        console = Console(file=self.printed, width=500)
        self.record = RunRecord(config, folder, Progress(console), cost)
        self.record.actor_peak = peak
        self.record.tracers |= {name: Tracer(name, self.clock) for name in self.record.tracers}

    @contextmanager
    def working(self, group: str, name: str, seconds: int) -> Iterator[None]:
        with self.record.tracers[group].span(name):
            yield
            self.clock.seconds += seconds

    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")


def test_updates_become_one_by_mean_maximum_and_minimum() -> None:
    updates: list[Mapping[str, float]] = [
        {"actor/ratio": 1.0, "actor/ratio_max": 2.0, "actor/ratio_min": 0.5, "actor/ratio_dev_max": 0.1},
        {"actor/ratio": 2.0, "actor/ratio_max": 1.5, "actor/ratio_min": 0.25, "actor/ratio_dev_max": 0.3},
    ]
    assert update_figures(updates) == {
        "actor/ratio": 1.5,
        "actor/ratio_max": 2.0,
        "actor/ratio_min": 0.25,
        "actor/ratio_dev_max": 0.3,
        "actor/first_ratio_dev_max": 0.1,
    }


@pytest.mark.parametrize("name", ["actor/ratio", "actor/ratio_max", "actor/ratio_min"])
@pytest.mark.parametrize("values", [(NAN, 1.0), (1.0, NAN)])
def test_what_is_not_a_number_stays_so(name: str, values: tuple[float, float]) -> None:
    assert math.isnan(update_figures([{name: value} for value in values])[name])


def test_a_critic_that_warms_up_learns_alone() -> None:
    assert update_figures([{"critic/lr": 1.0}, {"critic/lr": 3.0}]) == {"critic/lr": 2.0}


def test_times_of_a_step_by_hand(tmp_path: Path) -> None:
    run = Run(tmp_path, Flops(per_token=1e12), peak=1e13)
    with run.working("driver", "eval.ask", 50):
        pass
    run.record.begin_step()
    with run.working("rollout", "rollout.group", 4):
        with run.working("inference", "logprob.compute", 2):
            pass
        with run.working("actor", "train.accumulate", 3):
            pass
        with run.working("critic", "train.accumulate", 2):
            pass
    with run.working("driver", "sync.transfer", 1):
        pass
    run.record.step(1, GROUPS, [{"actor/lr": 1.0}], {"extra": 7.0})
    (row,) = run.rows()
    assert (row["time/step"], row["time/rollout"], row["time/inference"]) == (12, 11, 2)
    assert (row["time/training"], row["time/sync_weights"], row["time/reward"]) == (5, 1, 0)
    assert row["time/overlap"] == 7
    assert (row["idle/actor"], row["idle/critic"]) == (pytest.approx(9 / 12), pytest.approx(10 / 12))
    assert (row["extra"], row["actor/lr"]) == (7.0, 1.0)
    assert row["perf/actor_tflops"] == pytest.approx(3 * 5 / 3)
    assert row["mfu/actor"] == pytest.approx(3 * 5 / 3 / 10)
    assert not [key for key in row if key.startswith("time/eval")], "what lies between steps counts to none"


def test_a_rate_needs_a_model_and_a_share_needs_a_peak(tmp_path: Path) -> None:
    for name, cost, expected in (("a", None, set()), ("b", Flops(1.0), {"perf/actor_tflops"})):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, cost)
        run.record.begin_step()
        with run.working("actor", "train.apply", 1):
            pass
        run.record.step(1, GROUPS, [{}], {})
        assert {key for key in run.rows()[0] if key.startswith(("perf/", "mfu/"))} == expected


def test_guards_leave_a_mark_in_every_row_and_one_line_when_they_begin(tmp_path: Path) -> None:
    run = Run(tmp_path, patience=2, entropy_floor=0.5, same_answer_ceiling=None)
    found = []
    for step, entropy in enumerate([0.1, 0.1, 0.1, 0.9, 0.1, 0.1], start=1):
        run.record.begin_step()
        run.clock.seconds += 1
        alarms = run.record.step(step, GROUPS, [{"actor/entropy": entropy}], {})
        found.append([alarm.guard for alarm in alarms])
    assert found == [[], ["entropy"], ["entropy"], [], [], ["entropy"]]
    assert [row["guard/entropy"] for row in run.rows()] == [0, 1, 1, 0, 0, 1]
    assert {row["guard/kl"] for row in run.rows()} == {0}
    assert "guard/same_answer" not in run.rows()[0]
    lines = [
        line for line in run.printed.getvalue().splitlines() if line.startswith("Warning: actor/entropy")
    ]
    assert [line.split(" at step ")[1][0] for line in lines] == ["2", "6"]
