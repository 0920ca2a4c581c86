"""Tests of metrics and trackers from one file outside of rlsys, chosen by config."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest

from rlsys.config.schema import RunConfig
from rlsys.data.trajectory import Group
from rlsys.errors import Code
from rlsys.observe.records import read_metrics
from rlsys.observe.trackers import OwnMetrics, open_trackers
from rlsys.orchestrator.validate import find_problems
from tests.support.composed import composed
from tests.support.refusals import refused
from tests.support.trajectories import question, rewarded
from tests.support.written_episodes import episode, read, think

FILE = """
class Rows:
    made = []

    def __init__(self, run_dir, *, prefix: str = "row"):
        self.rows, self.prefix, self.closed = [], prefix, False
        self.made.append(self)

    def log(self, step, metrics):
        self.rows.append((self.prefix, step, metrics["loss"]))

    def close(self):
        self.closed = True

class Named(Rows):
    made, id = [], "mine"

class WithoutLog:
    def __init__(self, run_dir): ...
    def close(self): ...

class LogsNoStep(WithoutLog):
    def log(self, metrics): ...

class NeedsMore(WithoutLog):
    def log(self, step, metrics, *, kind): ...

class Breaks:
    def __init__(self, run_dir): ...
    def log(self, step, metrics): raise OSError("no room")
    def close(self): ...

class BreaksAtEnd(Rows):
    made, id = [], "mine"
    def close(self): raise OSError("no room")

def count(groups, *, factor: float = 1.0):
    return factor * len(groups)

def failing(groups):
    raise KeyError("score")

def text(groups):
    return "many"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tracking_toys.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def config_of(*overrides: str) -> RunConfig:
    return composed("tracking.wandb=false", "tracking.tensorboard=false", *overrides)


def group(*answers: str) -> Group:
    made = [read(episode(think("answer", answer))).trajectory for answer in answers]
    return Group(question(1), tuple(rewarded(one, 1.0) for one in made))


def test_tracker_gets_every_row_and_one_that_fails_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = "{kind: tracking_toys.Rows, prefix: a}, tracking_toys.Breaks, tracking_toys.BreaksAtEnd"
    config = config_of(f"tracking.trackers=[{kinds}]")
    trackers = open_trackers(config.tracking, folder, {})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            trackers.log(step, {"loss": step / 4})
        trackers.log_evaluation(2, {"loss": 1.0})
        trackers.close()
    import tracking_toys

    (rows,) = tracking_toys.Rows.made
    assert (rows.rows, rows.closed) == ([("a", 1, 0.25), ("a", 2, 0.5), ("a", 2, 1.0)], True)
    failed = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert failed == ["tracking_toys.Breaks", "tracking_toys.BreaksAtEnd"]
    assert trackers.ids == {"tracking_toys.BreaksAtEnd": "mine"}, "a resumed run must continue its curves"
    assert [row["loss"] for row in read_metrics(folder / "metrics.jsonl")] == [0.25, 0.5]


def test_every_tracker_of_a_class_gets_every_row_under_a_name_of_its_own(folder: Path) -> None:
    twice = "{kind: tracking_toys.Named, prefix: a}, {kind: tracking_toys.Named, prefix: b}"
    trackers = open_trackers(config_of(f"tracking.trackers=[{twice}]").tracking, folder, {})
    trackers.log(1, {"loss": 0.5})
    trackers.close()
    import tracking_toys

    assert [rows.rows for rows in tracking_toys.Named.made] == [[("a", 1, 0.5)], [("b", 1, 0.5)]]
    assert trackers.ids == {"tracking_toys.Named": "mine", "tracking_toys.Named[1]": "mine"}


def test_metrics_are_named_by_their_functions_and_one_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    names = "[{kind: tracking_toys.count, factor: 2}, tracking_toys.failing, tracking_toys.text]"
    own = OwnMetrics(config_of(f"tracking.metrics={names}").tracking.metrics)
    with caplog.at_level(logging.WARNING):
        assert [own.of([group("a")]), own.of([group("a"), group("b")])] == [{"own/count": 2.0}, {"own/count": 4.0}]
    failed = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert failed == ["own/failing", "own/text"]


@pytest.mark.parametrize(
    ("override", "code", "key"),
    [
        ("tracking.trackers=[{kind: tracking_toys.Rows, suffix: x}]", "unknown", "tracking.trackers[0].suffix"),
        ("tracking.metrics=[examples.extend.kl_estimator.bounded_k2]", "user_code", "tracking.metrics"),
        ("tracking.trackers=[examples.extend.tracker.Table]", "missing", "tracking.trackers[0].columns"),
    ],
)
def test_component_that_cannot_work_is_refused(override: str, code: Code, key: str) -> None:
    with refused(code, key):
        config_of(override)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("tracking.metrics=[tracking_toys.count, tracking_toys.count]", ("tracking.metrics", "conflict")),
        ("tracking.trackers=[tracking_toys.WithoutLog]", ("tracking.trackers", "user_code")),
        ("tracking.trackers=[tracking_toys.LogsNoStep]", ("tracking.trackers", "user_code")),
        ("tracking.trackers=[tracking_toys.NeedsMore]", ("tracking.trackers", "user_code")),
        ("tracking.trackers=[tracking_toys.Rows, tracking_toys.Breaks, tracking_toys.Rows]", None),
    ],
)
def test_component_that_cannot_work_with_the_others_is_a_problem_of_the_config(
    override: str, problem: tuple[str, str] | None
) -> None:
    found = {(one.key, one.code) for one in find_problems(config_of(override))}
    assert {one for one in found if one[0].startswith("tracking")} == ({problem} if problem else set())


def test_examples_write_a_table_and_count_words(folder: Path) -> None:
    table = "{kind: examples.extend.tracker.Table, columns: [loss, time]}"
    config = config_of(f"tracking.trackers=[{table}]", "tracking.metrics=[examples.extend.metric.answer_words]")
    trackers = open_trackers(config.tracking, folder, {})
    trackers.log(1, {"loss": 0.5, "time": 2.0})
    trackers.log_evaluation(1, {"eval/em": 1.0})
    trackers.close()
    assert list(csv.reader((folder / "metrics.csv").open())) == [["1", "0.5", "2.0"]]
    words = OwnMetrics(config.tracking.metrics).of([group("in Bamako", " ".join("a" * 12)), group("Chad")])
    assert words == {"own/answer_words/mean": 5.0, "own/answer_words/long_share": pytest.approx(1 / 3)}
