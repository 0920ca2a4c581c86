"""The files and the table of an evaluation."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from rlsys.apps.evaluation.results import (
    ANSWERS,
    PAGE,
    PARTIAL,
    RESULTS,
    noting,
    render_table,
    summarise,
    write_results,
)
from rlsys.orchestrator.evaluation.heldout import Evaluation
from rlsys.orchestrator.evaluation.scores import wilson
from tests.apps.evaluation.answers import SEARCH, answered, asked

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
    assert (rows[0]["uid"], rows[0]["question"], rows[0]["golden_answers"]) == ("q:1", "Which?", ["Nile"])
    assert (rows[0]["answer"], rows[0]["searches"], rows[0]["tokens"]) == ("the Nile", 1, 8)
    assert (rows[1]["answer"], rows[1]["finish"]) == (None, "turn_limit")
    assert rows[2]["answer"] == "? é"


def test_answers_are_on_disk_before_the_evaluation_ends(tmp_path: Path) -> None:
    with noting(tmp_path) as note:
        note(EVALUATION.answered[0])
        assert json.loads((tmp_path / PARTIAL).read_text())["uid"] == "q:1"
    assert (tmp_path / PARTIAL).exists()
    write_results(EVALUATION, tmp_path, {}, 3, seed=0)
    assert not (tmp_path / PARTIAL).exists()


def test_the_table_fits_80_columns_and_has_a_row_for_everything() -> None:
    lines = shown(EVALUATION)
    assert max(map(len, lines)) <= 80
    firsts = [line[:16].strip() for line in lines]
    sets = ["2WikiMultiHopQA", "1 hop", "2 hops", "own[bold]", "average"]
    assert [first for first in firsts if first in sets] == sets
    row = next(line.split() for line in lines if line.startswith("2Wiki"))
    assert row == ["2WikiMultiHopQA", "2", "50.0", "50.0", "50.0", "50.0", "0.50", "4"]
    interval = lines[lines.index(next(line for line in lines if line.startswith("2Wiki"))) + 1].split()
    assert interval[0] == "9.5-90.5"
