"""Results whose files are damaged or missing: what is left out is said, and nothing is a stack trace."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.apps.api import EvaluationResult, HttpRetriever, TrainingResult
from rlsys.apps.api.arguments import RunSettings
from rlsys.errors import UserError
from rlsys.observe.records import read_metrics
from tests.support.damage import DAMAGES, OBJECTS
from tests.support.made_run import made_run
from tests.support.refusals import refused

AVERAGE = {"em": {"mean": 0.25}, "f1": {"mean": 0.5}, "searches": 1.5, "questions": 4}


@pytest.fixture
def trained(tmp_path: Path) -> TrainingResult:
    """The result of a run of three steps."""
    run = made_run(tmp_path / "run")
    return TrainingResult(run, {}, RunSettings("searchr1_tiny_cpu", ()), HttpRetriever("http://a:1"))


@pytest.fixture
def evaluated(tmp_path: Path) -> EvaluationResult:
    """The result of two answers."""
    (tmp_path / "results.json").write_text(json.dumps({"sets": {}, "average": AVERAGE}))
    (tmp_path / "answers.jsonl").write_text('{"uid": "a\u2028b"}\n{"uid": "c"}\n')
    return EvaluationResult(tmp_path)


def steps(result: TrainingResult) -> list[int]:
    return [row["step"] for row in result.history]


def test_a_whole_run_has_its_history_and_its_report(trained: TrainingResult) -> None:
    (trained.run_dir / "run.json").write_text("{")  # Not of the history's concern.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = trained.history
    assert rows == [json.loads(line) for line in (trained.run_dir / "metrics.jsonl").read_text().splitlines()]
    report = trained.report()
    assert report == trained.run_dir / "report.html"
    model = re.search(r'<script type="application/json" id="model">(.*?)</script>', report.read_text())
    assert model is not None
    (run,) = json.loads(model[1])["runs"]
    assert run["metrics"]["actor/entropy"] == [row["actor/entropy"] for row in rows]


@pytest.mark.parametrize("line", ["{", "[1]", '{"step": "two"}', "\0"])
def test_a_damaged_row_of_the_history_is_named(trained: TrainingResult, line: str) -> None:
    file = trained.run_dir / "metrics.jsonl"
    first, _, third = file.read_text().splitlines()
    file.write_text("\n".join([first, line, third]) + "\n")
    with pytest.warns(UserWarning, match="line 2") as caught:
        assert steps(trained) == [1, 3]
    (warning,) = caught
    assert warning.filename == __file__
    assert [row["step"] for row in read_metrics(file)] == [1, 3]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {*OBJECTS}))
def test_a_file_of_which_nothing_can_be_read_is_a_sentence(
    damage: str, trained: TrainingResult, evaluated: EvaluationResult
) -> None:
    asked: list[tuple[Path, Callable[[], Any]]] = [
        (trained.run_dir / "metrics.jsonl", lambda: trained.history),
        (evaluated.folder / "results.json", lambda: evaluated.em),
        (evaluated.folder / "answers.jsonl", lambda: evaluated.answers),
    ]
    for file, ask in asked:
        DAMAGES[damage](file)
        with pytest.raises(UserError) as caught:
            ask()
        assert caught.value.code in ("not_found", "malformed", "empty")
        assert caught.value.key == str(file)


def test_a_folder_that_is_gone_is_a_sentence(trained: TrainingResult, tmp_path: Path) -> None:
    trained.run_dir.rename(tmp_path / "moved")
    for ask in (lambda: trained.history, trained.report):
        with pytest.raises(UserError, match=str(trained.run_dir)):
            ask()


def test_an_evaluation_is_read(evaluated: EvaluationResult) -> None:
    assert (evaluated.em, evaluated.f1, evaluated.questions) == (0.25, 0.5, 4)
    assert str(evaluated).startswith("EM 0.250, F1 0.500, 1.50 searches per question, 4 questions; see ")
    assert [row["uid"] for row in evaluated.answers] == ["a\u2028b", "c"]


@pytest.mark.parametrize("average", [None, {"em": 1.0}, {"em": {"mean": None}}])
def test_a_figure_that_is_not_there_is_named(evaluated: EvaluationResult, average: Any) -> None:
    (evaluated.folder / "results.json").write_text(json.dumps({"average": average}))
    with refused("missing", evaluated.folder / "results.json"):
        _ = evaluated.em
