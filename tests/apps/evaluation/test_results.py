"""The files and the table of an evaluation."""

from __future__ import annotations

import hashlib
import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from rlsys.apps.evaluation.evaluation_inputs import Baseline, EngineName, EvaluationInputs, How, Model, Source
from rlsys.apps.evaluation.results import (
    ANSWERS,
    PAGE,
    PARTIAL,
    RESULTS,
    noting,
    render_table,
    settings_of,
    summarise,
    write_results,
)
from rlsys.config.schema import EvalConfig, RunConfig, TaskConfig
from rlsys.data.trajectory import Action
from rlsys.orchestrator.evaluation.heldout import Evaluation
from rlsys.orchestrator.evaluation.scores import wilson
from tests.apps.evaluation.answers import SEARCH, answered, asked, turn

EVALUATION = Evaluation(
    0,
    (
        answered(asked(1, "Nile", source="2wikimultihopqa", text="Which?", hops=1), "the Nile", 0, SEARCH),
        answered(asked(2, "Lyon", source="2wikimultihopqa", hops=2), None),
        answered(asked(3, "é", source="own[bold]"), "\ud800 é"),
    ),
)


def shown(evaluation: Evaluation) -> list[str]:
    console = Console(file=StringIO(), width=80)
    console.print(render_table(summarise(evaluation)))
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_files_say_what_was_asked_and_answered(tmp_path: Path) -> None:
    write_results(EVALUATION, tmp_path, {"engine": "sglang"}, 3, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ANSWERS, RESULTS, PAGE]
    results = json.loads((tmp_path / RESULTS).read_text())
    assert results["settings"] == {"engine": "sglang"}
    assert results["versions"]["python"]
    assert list(results["sets"]) == ["2wikimultihopqa", "own[bold]"]
    em, expected = results["sets"]["2wikimultihopqa"]["em"], wilson(1, 2)
    assert em == {"mean": 0.5, "low": expected.low, "high": expected.high}
    assert results["average"]["em"]["mean"] == 0.25
    rows = [json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines()]
    assert [row["em"] for row in rows] == [1.0, 0.0, 0.0]
    first = {key: rows[0][key] for key in ("set", "uid", "question", "golden_answers", "answer", "searches", "tokens")}
    assert first == {
        "set": "2wikimultihopqa",
        "uid": "q:1",
        "question": "Which?",
        "golden_answers": ["Nile"],
        "answer": "the Nile",
        "searches": 1,
        "tokens": 8,
    }
    assert (rows[1]["answer"], rows[1]["finish"]) == (None, "turn_limit")
    assert rows[2]["answer"] == "? é"


def test_the_settings_say_all_that_was_chosen(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_bytes(b"{}\n")
    config = RunConfig(eval=EvalConfig(limit=5, samples=2, temperature=0.5))
    config.model.path, config.task = "original", TaskConfig(train_path="t", eval_path="e")
    wanted = EvaluationInputs([Source("own", file)], Model(Path("actor"), Path("original"), 12), config)
    settings = settings_of(wanted, How(EngineName.transformers, Baseline.cot), 1000.0, 1002.54)
    assert settings.pop("config")["eval"]["samples"] == 2
    assert settings.pop("started").startswith("1970-01-01T")
    assert settings == {
        "model": "actor",
        "original": "original",
        "step": 12,
        "data": [{"set": "own", "path": str(file), "sha256": hashlib.sha256(b"{}\n").hexdigest()}],
        "limit": 5,
        "engine": "transformers",
        "baseline": "cot",
        "samples": 2,
        "temperature": 0.5,
        "seconds": 2.5,
    }


def test_answers_are_on_disk_before_the_evaluation_ends(tmp_path: Path) -> None:
    with noting(tmp_path) as note:
        note(EVALUATION.answered[0])
        assert json.loads((tmp_path / PARTIAL).read_text())["uid"] == "q:1"
    assert (tmp_path / PARTIAL).exists()
    write_results(EVALUATION, tmp_path, {}, 3, seed=0)
    assert not (tmp_path / PARTIAL).exists()


def test_an_evaluation_without_an_answer_leaves_no_file(tmp_path: Path) -> None:
    with noting(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_table_fits_80_columns_and_has_a_row_for_everything() -> None:
    lines = shown(EVALUATION)
    assert max(map(len, lines)) <= 80
    firsts = [line[:16].strip() for line in lines]
    assert [first for first in firsts if first in ("2WikiMultiHopQA", "1 hop", "2 hops", "own[bold]", "average")] == [
        "2WikiMultiHopQA",
        "1 hop",
        "2 hops",
        "own[bold]",
        "average",
    ]
    row = next(line.split() for line in lines if line.startswith("2Wiki"))
    assert row == ["2WikiMultiHopQA", "2", "50.0", "50.0", "50.0", "50.0", "0.50", "4"]
    interval = lines[lines.index(next(line for line in lines if line.startswith("2Wiki"))) + 1].split()
    assert interval[0] == "9.5-90.5"


def test_the_average_stands_out_and_no_set_of_its_name() -> None:
    answers = [answered(asked(n, "x", source=name), "x") for n, name in enumerate(("average", "own"))]
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(render_table(summarise(Evaluation(0, tuple(answers)))))
    assert isinstance(console.file, StringIO)
    rows = [line for line in console.file.getvalue().splitlines() if "average" in line.split("EM")[0]]
    assert ["\x1b[1m" in row for row in rows if "weighs" not in row] == [False, True]


def test_one_set_has_no_average_and_a_failed_search_is_said() -> None:
    failed = turn(Action.SEARCH, "x", "Search failed", error="no answer")
    lines = shown(Evaluation(0, (answered(asked(1, "a"), "a", 0, failed),)))
    assert not [line for line in lines if line.startswith("average")]
    assert [line for line in lines if line.startswith("1 searches failed")]


def test_several_answers_have_their_chances() -> None:
    answers = tuple(answered(asked(1, "a"), said, n) for n, said in enumerate("axxx"))
    lines = shown(Evaluation(0, answers))
    header = next(line for line in lines if "pass@1" in line)
    assert header.split()[-3:] == ["pass@1", "pass@2", "pass@4"]
    row = [line for line in lines if line.startswith("NQ")][1]
    assert row.split() == ["NQ", "25.0", "50.0", "100"]
