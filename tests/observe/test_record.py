"""Tests of a run's record: merged updates, times of a step, its spans, and resumption."""

import asyncio
import gc
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from rich.console import Console

from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.schema import GuardsConfig, RunConfig, TrackingConfig
from rlsys.data.trajectory import Finish, Group
from rlsys.observe.environment import read_launches
from rlsys.observe.faults import FaultKind, Outcome
from rlsys.observe.guards import Alarm
from rlsys.observe.kept import trajectory_steps, write_row
from rlsys.observe.outcome import draw_curves, render_summary
from rlsys.observe.records import read_metrics
from rlsys.observe.run_folder import open_run
from rlsys.observe.spans import Span, Tracer
from rlsys.observe.status import Progress
from rlsys.observe.trackers import open_trackers
from rlsys.orchestrator import run_logger
from rlsys.orchestrator.evaluation.heldout import Answered, Evaluation
from rlsys.orchestrator.evaluation.scores import scores_of
from rlsys.orchestrator.pipeline.scheduler import DropReason, GroupOutcome, GroupStage
from rlsys.orchestrator.run_logger import History, RunLogger, update_metrics
from rlsys.weights.flops import Flops
from tests.support.jsonl import read_rows
from tests.support.trajectories import question, rewarded, trajectory

S = 1_000_000_000
SCORED = replace(rewarded(trajectory(range(5), version=0), 1.0), old_logprobs=np.zeros(5, np.float32))
GROUPS = [Group(question(1), (SCORED,))]


@pytest.fixture(autouse=True)
def _no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no charts when a record is closed: they take a second."""
    monkeypatch.setattr(run_logger, "draw_curves", lambda *_: [])


class Clock:
    """A clock that moves only when `seconds` is changed."""

    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> int:
        return self.seconds * S


class RecordedRun:
    def __init__(self, folder: Path, cost: Flops | None = None, history: History | None = None, **guards: Any) -> None:
        config = RunConfig(
            tracking=TrackingConfig(tensorboard=False, wandb=False),
            guards=GuardsConfig(**guards),
            algorithm=AlgorithmConfig(kl_coef=0.25),
        )
        folder.mkdir(exist_ok=True)
        self.clock, self.printed = Clock(), io.StringIO()
        console = Console(file=self.printed, width=500)
        self.record = RunLogger(config, folder, Progress(console), cost, history, str)
        self.record.tracers |= {name: Tracer(name, self.clock) for name in self.record.tracers}

    @contextmanager
    def working(self, group: str, name: str, seconds: int) -> Iterator[None]:
        with self.record.tracers[group].span(name):
            yield
            self.clock.seconds += seconds

    def step(self, step: int, entropy: float = 1.0) -> list[Alarm]:
        """Record a step of one second, and two prompts that end with it."""
        self.record.begin_step()
        with self.working("actor", "train.apply", 1):
            pass
        alarms = self.record.step(step, GROUPS, [{"actor/entropy": entropy}], {})
        asyncio.run(self.kept(step))
        ends = (
            GroupOutcome(2 * step, f"q:{2 * step}", GroupStage.trained),
            GroupOutcome(2 * step + 1, "q:x", DropReason.stale),
        )
        self.record.prompts(step, ends)
        return alarms

    async def kept(self, step: int) -> None:
        await self.record.trajectories(step, GROUPS)
        await self.record.trajectories_written()


def test_updates_are_merged_by_mean_maximum_and_minimum() -> None:
    updates: list[Mapping[str, float]] = [
        {"actor/ratio": 1.0, "actor/ratio_max": 2.0, "actor/ratio_min": 0.5, "actor/ratio_dev_max": 0.1},
        {"actor/ratio": 2.0, "actor/ratio_max": 1.5, "actor/ratio_min": 0.25, "actor/ratio_dev_max": 0.3},
    ]
    assert update_metrics(updates) == {
        "actor/ratio": 1.5,
        "actor/ratio_max": 2.0,
        "actor/ratio_min": 0.25,
        "actor/ratio_dev_max": 0.3,
        "actor/first_ratio_dev_max": 0.1,
    }
    for name in ("actor/ratio", "actor/ratio_max", "actor/ratio_min"):
        for values in ((math.nan, 1.0), (1.0, math.nan)):
            assert math.isnan(update_metrics([{name: value} for value in values])[name])


def test_times_of_a_step_by_hand(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, Flops(per_token=1e12))
    run.record.actor_peak = 1e13
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
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["time/step"], row["time/rollout"], row["time/inference"]) == (12, 11, 2)
    assert (row["time/training"], row["time/sync_weights"], row["time/reward"]) == (5, 1, 0)
    assert row["time/overlap"] == 7
    assert (row["idle/actor"], row["idle/critic"]) == (pytest.approx(9 / 12), pytest.approx(10 / 12))
    assert (row["extra"], row["actor/lr"]) == (7.0, 1.0)
    assert row["perf/actor_tflops"] == pytest.approx(3 * 5 / 3)
    assert row["mfu/actor"] == pytest.approx(3 * 5 / 3 / 10)
    assert not [key for key in row if key.startswith("time/eval")], "time between steps must not count"


def evaluation(step: int, em: float) -> Evaluation:
    scores = scores_of("yes" if em else "no", ("yes",))
    return Evaluation(step, (Answered(question(1), trajectory(), scores),))


def test_episodes_of_an_evaluation_that_were_cut_off_are_counted_in_a_warning(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    (answer,) = evaluation(1, 0.0).answered
    cut = replace(answer, trajectory=replace(answer.trajectory, finish=Finish.ABORTED))
    run.record.evaluation(Evaluation(1, (answer, answer)))
    run.record.evaluation(Evaluation(2, (answer, cut, cut)))
    (warning,) = [line for line in run.printed.getvalue().splitlines() if line.startswith("Warning")]
    assert re.findall(r"\d+", warning) == ["2", "3"]


def content(folder: Path) -> list[list[Any]]:
    """Recorded metrics, prompt ends and trajectories of a run, without clock times."""
    rows, ends = (read_rows(folder / name) for name in ("metrics.jsonl", "prompts.jsonl"))
    for row in rows:
        del row["time"], row["time/cpu"]
    return [rows, ends, [*map(write_row, open_run(folder).trajectories())]]


def test_resumed_run_records_the_same_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """One run has six steps; another is killed in step 5 and resumes after step 3."""
    entropies = {1: 1.0, 2: 0.1, 3: 0.1, 4: 0.1, 5: 0.1, 6: 1.0}
    whole = RecordedRun(tmp_path / "whole", patience=3, entropy_floor=0.5)
    expected = {step: [str(alarm) for alarm in whole.step(step, entropies[step])] for step in entropies}
    whole.record.close()
    assert [step for step in expected if expected[step]] == [4, 5]

    folder = tmp_path / "killed"
    killed = RecordedRun(folder, patience=3, entropy_floor=0.5)
    for step in (1, 2, 3):
        killed.step(step, entropies[step])
    history = killed.record.history(3)
    for step in (4, 5):
        killed.step(step, 1.0)  # The metrics differ, as if prompts had come in another order.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "actor/ent')

    resumed = RecordedRun(folder, history=history, patience=3, entropy_floor=0.5)
    assert resumed.record.history(3) == history
    # Readers that come before the next step must see nothing of the lost steps.
    assert [one.step for one in open_run(folder).timeline()] == trajectory_steps(folder) == [1, 2, 3]
    for step in (4, 5, 6):
        assert [str(alarm) for alarm in resumed.step(step, entropies[step])] == expected[step]
    resumed.record.close()
    assert content(folder) == content(tmp_path / "whole")
    assert [one.step for one in open_run(folder).timeline()] == [1, 2, 3, 4, 5, 6]
    assert [life.after_step for life in read_launches(folder)] == [0, 3]
    assert resumed.printed.getvalue().count("Warning: actor/entropy") == 1


def test_timeline_has_every_span_once_and_in_each_step_that_it_overlaps(tmp_path: Path) -> None:
    """Spans lie in a step, between steps, across one or two steps' ends, and after the last step."""
    run = RecordedRun(tmp_path)
    with run.working("inference", "logprob.compute", 0):
        with run.working("rollout", "rollout.group", 1):
            run.step(1)
        with run.working("driver", "eval.ask", 5):
            pass
        run.step(2)
    with run.working("driver", "eval.last", 1):
        pass
    run.record.close()
    rows = read_rows(tmp_path / "timeline.jsonl")
    assert [(row["step"], row["window"], [span[0] for span in row["spans"]]) for row in rows] == [
        (1, [0, S], ["train.apply"]),
        (2, [7 * S, 8 * S], ["eval.ask", "rollout.group", "train.apply"]),
        (None, None, ["eval.last", "logprob.compute"]),
    ]
    shown = [{span.name for span in one.spans} for one in open_run(tmp_path).timeline()]
    assert shown == [{"logprob.compute", "rollout.group", "train.apply"}, {"logprob.compute", "train.apply"}]


def test_spans_are_kept_on_disk_and_traced_for_the_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.orchestrator.run_logger.TRACED_ROWS", 3)
    run = RecordedRun(tmp_path)

    def spans_in_memory() -> int:
        return sum(type(one) is Span for one in gc.get_objects())

    run.step(1)
    before = spans_in_memory()
    for step in range(2, 42):
        run.step(step)
    assert spans_in_memory() - before < 10
    run.record.faults.begin("engine 0", FaultKind.died, "before the first traced span", at_s=1.0)
    run.record.faults.end(run.record.faults.begin("engine 1", FaultKind.died, ""), Outcome.given_up, "")
    summary = run.record.summary(0)
    assert summary["seconds"] == {"step": 41.0, "train": 41.0}
    assert (summary["faults"]["count"], summary["faults"]["given_up"]) == (2, 1)
    run.record.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    *worked, fault = (event for event in events if event["ph"] == "X")
    assert [(event["name"], event["ts"]) for event in worked] == [("train.apply", second * 1e6) for second in range(3)]
    assert fault["name"] == "engine 1 died"


def test_resume_keeps_evaluations_up_to_its_step_and_removes_partial_files(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    for step, em in ((0, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)):
        if step:
            run.step(step)
        run.record.evaluation(evaluation(step, em))
    for left in ("evaluations/.step_000003.json.123.part", "trajectories/.step_000003.jsonl.gz.123.part"):
        (tmp_path / left).write_text("half")
    (tmp_path / "evaluations" / "step_000009.json.old").write_text("a user's own file")
    resumed = RecordedRun(tmp_path, history=replace(run.record.history(3), step=3))
    assert [resumed.record.em_of(step) for step in range(5)] == [0.0, None, 1.0, 1.0, None]
    left_over = {path.name for path in (tmp_path / "evaluations").iterdir() if path.suffix != ".jsonl"}
    assert left_over == {"step_000000.json", "step_000002.json", "step_000003.json", "step_000009.json.old"}
    assert trajectory_steps(tmp_path) == [2, 3]
    assert len(list((tmp_path / "trajectories").iterdir())) == 2
    resumed.record.evaluation(evaluation(4, 0.0))
    assert resumed.record.em_of(4) == 0.0


def test_resume_keeps_an_evaluation_that_ended_after_a_later_checkpoint(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    for step in (1, 2, 3):
        run.step(step)
    saved = run.record.history(3)
    run.record.evaluation(evaluation(2, 1.0))
    kept = tmp_path / "evaluations"
    (kept / "step_000001.json").write_text('{"step": 1, "em"')
    (kept / "step_000003-mine.json").write_text('{"step": 3, "em": 1.0, "figures": {}}')
    with patch("rlsys.orchestrator.run_logger.open_trackers", wraps=open_trackers) as opened:
        resumed = RecordedRun(tmp_path, history=saved)
    assert [resumed.record.em_of(step) for step in (1, 2, 3)] == [None, 1.0, None]
    warned = re.findall(r"evaluations/(\S+) is", resumed.printed.getvalue())
    assert sorted(warned) == ["step_000001.json", "step_000003-mine.json"]
    assert [row.step for row in opened.call_args.args[3].logged if "eval/em" in row.metrics] == [2]


def test_hops_of_any_text_are_drawn_and_shown_in_order(tmp_path: Path) -> None:
    """`hops` of a question is the user's own, such as a float column of a parquet file."""
    by_hop = {"2hop": 0.1, "10": 0.2, "2": 0.3, "2.0": 0.4, "1": 0.5, "[/]": 0.6, "z$a_{$": 0.7}
    draw_curves([], [{"step": 0, "em": 0.1, "em_by_hop": by_hop}], tmp_path)
    assert (tmp_path / "em.png").is_file()
    printed = io.StringIO()
    render_summary({"em_before": 0.1, "em_before_by_hop": by_hop}, Console(file=printed, width=100))
    shown = re.findall(r"(\S+) hops? ", printed.getvalue())
    assert shown == ["one", "two", "10", "2.0", "2hop", "[/]", "z$a_{$"]
