"""Rows of Search-R1: both formats say the same, and every bad row is named by its line."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rlsys.data.question import Question, read_questions
from rlsys.errors import UserError

CAPITAL: dict[str, Any] = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "What is the capital of Côte d'Ivoire?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Yamoussoukro", "Yamusukro"]}},
    "extra_info": {"split": "train", "index": 0, "hops": 1},
}
RIVER: dict[str, Any] = {
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": "Which river?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Nile"]}},
    "extra_info": {"split": "train", "index": 0},
}


def write_jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_a_row_becomes_a_question(tmp_path: Path) -> None:
    assert read_questions(write_jsonl(tmp_path / "train.jsonl", [CAPITAL])) == [
        Question(
            uid="train:1",
            prompt="What is the capital of Côte d'Ivoire?",
            answers=("Yamoussoukro", "Yamusukro"),
            data_source="nq",
            extra={"split": "train", "index": 0, "hops": 1},
        )
    ]


def test_both_formats_give_the_same_questions(tmp_path: Path) -> None:
    """Though parquet holds a null where a row of jsonl has no field."""
    rows = [CAPITAL, RIVER] * 700
    lines = read_questions(write_jsonl(tmp_path / "train.jsonl", rows))
    columns = read_questions(write_parquet(tmp_path / "train.parquet", rows))
    assert lines == columns
    assert "hops" not in columns[1].extra


def test_ids_are_unique_though_merged_data_repeats_its_index(tmp_path: Path) -> None:
    train = read_questions(write_jsonl(tmp_path / "train.jsonl", [CAPITAL, RIVER, CAPITAL]))
    test = read_questions(write_jsonl(tmp_path / "test.jsonl", [CAPITAL, RIVER]))
    assert len({question.uid for question in train + test}) == 5


def test_a_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "train.jsonl", [CAPITAL, RIVER, "not a row"])
    assert [question.uid for question in read_questions(file, limit=2)] == ["train:1", "train:2"]


def test_empty_lines_are_passed_over_but_counted(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(f"\n{json.dumps(CAPITAL)}\n\n{json.dumps(RIVER)}\n")
    assert [question.uid for question in read_questions(file)] == ["train:2", "train:4"]


def test_a_single_answer_may_be_a_string(tmp_path: Path) -> None:
    row = {**RIVER, "reward_model": {"ground_truth": {"target": "Nile"}}}
    assert read_questions(write_jsonl(tmp_path / "a.jsonl", [row]))[0].answers == ("Nile",)


def target(value: Any) -> dict[str, Any]:
    return {**RIVER, "reward_model": {"ground_truth": {"target": value}}}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ([1, 2], "is not an object"),
        ("text", "is not an object"),
        ({}, '"prompt"'),
        ({**RIVER, "prompt": 7}, '"prompt"'),
        ({**RIVER, "prompt": []}, '"prompt"'),
        ({**RIVER, "prompt": [{"role": "system", "content": "Be kind."}, *RIVER["prompt"]]}, '"prompt"'),
        ({**RIVER, "prompt": [{"role": "system", "content": "Which river?"}]}, '"prompt"'),
        ({**RIVER, "prompt": ["Which river?"]}, '"prompt"'),
        ({**RIVER, "prompt": [{"role": "user", "content": ""}]}, '"prompt"'),
        ({**RIVER, "prompt": [{"role": "user", "content": 7}]}, '"prompt"'),
        ({**RIVER, "reward_model": None}, '"reward_model.ground_truth.target"'),
        ({**RIVER, "reward_model": "rule"}, '"reward_model.ground_truth.target"'),
        ({**RIVER, "reward_model": {"ground_truth": "Nile"}}, '"reward_model.ground_truth.target"'),
        (target([]), '"reward_model.ground_truth.target"'),
        (target([3]), '"reward_model.ground_truth.target"'),
        (target({"a": 1}), '"reward_model.ground_truth.target"'),
        ({**RIVER, "extra_info": "train"}, '"extra_info"'),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, named: str) -> None:
    file = write_jsonl(tmp_path / "train.jsonl", [CAPITAL, row])
    with pytest.raises(UserError) as caught:
        read_questions(file)
    assert str(caught.value).startswith(f"{file}, line 2")
    assert named in str(caught.value)


def test_a_bad_row_of_parquet_is_named_by_its_number(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "train.parquet", [RIVER, {**RIVER, "reward_model": None}])
    with pytest.raises(UserError, match=r"train\.parquet, line 2: .*target"):
        read_questions(file)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("cut.jsonl", b'{"prompt": [', "cut.jsonl, line 1 is not JSON"),
        ("latin.jsonl", '{"prompt": "Côte"}'.encode("latin-1"), "latin.jsonl, line 1 is not UTF-8"),
        ("empty.jsonl", b"", "holds no question"),
        ("table.csv", b"a,b", "neither .jsonl nor .parquet"),
        ("fake.parquet", b"PAR2", "is not a parquet file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_questions(tmp_path / name)
    assert str(tmp_path) in str(caught.value)
    assert named in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.jsonl does not exist"):
        read_questions(tmp_path / "gone.jsonl")


def test_rows_of_rlinf_and_of_flashrag_are_questions_too(tmp_path: Path) -> None:
    rlinf = {"prompt": "Ask. Question: Who?\n", "solutions": ["me", "I"]}
    flashrag = {"id": "test_0", "question": "who", "golden_answers": ["me"]}
    one, two = read_questions(write_jsonl(tmp_path / "mixed.jsonl", [rlinf, flashrag]))
    assert (one.prompt, one.answers, one.text) == ("Ask. Question: Who?\n", ("me", "I"), "")
    assert two.prompt.startswith("Answer the given question. You must conduct reasoning inside <think> and </think>")
    assert two.prompt.endswith("Question: who?\n")
    assert (two.answers, two.text) == (("me",), "who")


def test_the_raw_question_is_kept_where_a_row_has_it(tmp_path: Path) -> None:
    beside = {**RIVER, "question": "Which river?"}
    within = {**RIVER, "extra_info": {"question": "Which river?", "index": 1}}
    found = read_questions(write_jsonl(tmp_path / "train.jsonl", [beside, within, RIVER]))
    assert [question.text for question in found] == ["Which river?", "Which river?", ""]


def test_what_no_checkpoint_could_hold_is_refused_at_once(tmp_path: Path) -> None:
    """A parquet column may hold times and bytes."""
    row = {**RIVER, "extra_info": {"asked": datetime(2026, 1, 1)}}
    with pytest.raises(UserError, match=r"line 1: \"extra_info\" holds what JSON cannot"):
        read_questions(write_parquet(tmp_path / "train.parquet", [row]))
