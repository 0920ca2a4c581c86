"""Questions in all forms that the API takes, to files that a run reads."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.apps.api.arguments import Files, read_data, training_files
from rlsys.data.question import Question, read_questions, search_prompt
from rlsys.errors import Code, UserError

HAMLET: dict[str, Any] = {"question": "who wrote Hamlet", "golden_answers": ["Shakespeare"]}
OWN = {"query": "who wrote Hamlet", "answers": "Shakespeare", "hops": 1}
SEARCH_R1 = {"prompt": [{"role": "user", "content": "Q?"}], "reward_model": {"ground_truth": {"target": ["A"]}}}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_questions_come_back_whole(tmp_path: Path) -> None:
    given = Question("x:1", "My own prompt", ("a", "b"), "mine", {"hops": 2}, "raw?")
    (found,) = read_questions(read_data([given], "train_data").path(tmp_path))
    assert (found.prompt, found.answers, found.data_source, dict(found.extra), found.text) == (
        given.prompt, given.answers, given.data_source, given.extra, given.text,
    )  # fmt: skip


def test_a_file_that_a_run_reads_is_used_as_it_is(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "t.jsonl", HAMLET, SEARCH_R1)
    other = jsonl(tmp_path / "h.jsonl", {**SEARCH_R1, "prompt": "Another?"})
    assert training_files(train, str(other), None, 0, tmp_path / "files") == Files(train, other, 2)
    assert not (tmp_path / "files").exists()


def test_a_file_of_own_names_and_a_table_are_written_anew(tmp_path: Path) -> None:
    table = tmp_path / "q.csv"
    table.write_text("question,answer\nwho wrote Hamlet,Shakespeare\n")
    for source in (jsonl(tmp_path / "own.jsonl", OWN), table):
        path = read_data(source, "train_data").path(tmp_path / "files")
        (found,) = read_questions(path)
        assert found.prompt == search_prompt("who wrote Hamlet")
        assert path.parent == tmp_path / "files"


def test_the_same_questions_are_the_same_file(tmp_path: Path) -> None:
    rows = [{"question": f"what is {n}", "answers": [str(n)]} for n in range(20)]
    first = training_files(rows, None, 5, 0, tmp_path)
    assert training_files(list(rows), None, 5, 0, tmp_path) == first
    assert training_files(rows[:-1], None, 5, 0, tmp_path) != first
    asked = [{one.text for one in read_questions(path)} for path in (first.train, first.heldout)]
    assert first.questions == 15
    assert (len(asked[0]), len(asked[1]), asked[0] & asked[1]) == (15, 5, set())


@pytest.mark.parametrize(
    ("data", "code", "key"),
    [
        ([HAMLET, {"question": "and the answer?"}], None, "line 2"),
        ([], "empty", "train_data"),
        (7, "wrong_type", "train_data"),
        ([{**OWN, "asked": datetime.date(2020, 1, 1)}], "wrong_type", "line 1"),
        (Path(__file__).parent, "not_found", str(Path(__file__).parent)),
    ],
)
def test_a_row_without_a_question_is_refused_by_its_place(
    tmp_path: Path, data: Any, code: Code | None, key: str
) -> None:
    with pytest.raises(UserError) as caught:
        training_files(data, None, None, 0, tmp_path)
    assert code in (None, caught.value.code)
    assert key in f"{caught.value.key} {caught.value}"
    assert not list(tmp_path.iterdir())


def test_scalars_and_arrays_of_a_data_frames_rows_are_what_they_hold(tmp_path: Path) -> None:
    row = {"question": "who?", "answers": np.array(["a", "b"]), "id": np.int64(3), "score": np.float32(0.5)}
    path = read_data([row], "train_data").path(tmp_path)
    assert json.loads(path.read_text()) == {
        "question": "who?", "golden_answers": ["a", "b"], "id": 3, "score": 0.5,
    }  # fmt: skip
