"""Tests of the results of a training and an evaluation, read from whole and from damaged files."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.apps.api import EvaluationResult, HttpRetriever, TrainingResult, training_result
from rlsys.apps.api.arguments import RunSettings
from rlsys.errors import UserError
from tests.support.damage import DAMAGES, OBJECTS
from tests.support.jsonl import read_rows
from tests.support.made_run import made_run
from tests.support.refusals import refused

AVERAGE = {"em": {"mean": 0.25}, "f1": {"mean": 0.5}, "searches": 1.5, "questions": 4}


@pytest.fixture
def trained(tmp_path: Path) -> TrainingResult:
    """The result of a run of three steps."""
    run = made_run(tmp_path / "run")
    overrides = ("search.url=http://old:1", "search.token_env=OLD", "search.timeout_s=77")
    settings = RunSettings("searchr1_tiny_cpu", overrides, frozenset({"search.url", "search.token_env"}))
    trained = {"checkpoint": "examples/searchr1/tiny/policy"}
    return TrainingResult(run, trained, settings, HttpRetriever("http://new:2"))


@pytest.fixture
def evaluated(tmp_path: Path) -> EvaluationResult:
    """The result of two answers."""
    (tmp_path / "results.json").write_text(json.dumps({"sets": {}, "average": AVERAGE}))
    (tmp_path / "answers.jsonl").write_text('{"uid": "a\u2028b"}\n{"uid": "c"}\n')
    return EvaluationResult(tmp_path)


def test_a_whole_run_has_its_history_and_its_report(trained: TrainingResult) -> None:
    (trained.run_dir / "run.json").write_text("{")  # The history does not need this file.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = trained.history
    assert rows == read_rows(trained.run_dir / "metrics.jsonl")
    report = trained.report()
    model = re.search(r'<script type="application/json" id="model">(.*?)</script>', report.read_text())
    assert model is not None
    (run,) = json.loads(model[1])["runs"]
    assert run["metrics"]["actor/entropy"] == [row["actor/entropy"] for row in rows]


@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {*OBJECTS}))
def test_an_unreadable_file_is_refused(damage: str, trained: TrainingResult, evaluated: EvaluationResult) -> None:
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


def test_an_evaluation_is_read_and_a_missing_figure_is_refused(evaluated: EvaluationResult) -> None:
    assert (evaluated.em, evaluated.f1, evaluated.questions) == (0.25, 0.5, 4)
    assert [row["uid"] for row in evaluated.answers] == ["a\u2028b", "c"]
    for average in (None, {"em": 1.0}, {"em": {"mean": None}}):
        (evaluated.folder / "results.json").write_text(json.dumps({"average": average}))
        with refused("missing", evaluated.folder / "results.json"):
            _ = evaluated.em


def test_lasting_settings_of_the_run_are_passed_on_to_its_evaluation(
    trained: TrainingResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(training_result, "_rlsys", lambda *words: asked.append(words))
    trained.evaluate(limit=3)
    expected = ["search.timeout_s=77", "search.url='http://new:2'", "search.topk=3"]
    expected += ["search.replicas=[]", "search.token_env=null"]
    assert [word for word in asked[0] if word.startswith("search.")] == expected
    assert "--limit=3" in asked[0]
