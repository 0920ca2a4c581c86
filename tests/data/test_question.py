"""Tests of questions read from rows of Search-R1, RLinf and FlashRAG."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rlsys.data.question import Question, read_questions
from rlsys.errors import Code
from tests.support.refusals import refused

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
    "reward_model": {"ground_truth": {"target": ["Nile"]}},
    "extra_info": {"split": "train", "index": 0},
}


def write_jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_both_formats_give_the_same_questions(tmp_path: Path) -> None:
    """Parquet holds a null where a row of jsonl has no field."""
    lines = read_questions(write_jsonl(tmp_path / "train.jsonl", [CAPITAL, RIVER]))
    assert lines == read_questions(write_parquet(tmp_path / "train.parquet", [CAPITAL, RIVER]))
    assert lines[0] == Question(
        uid="train:1",
        prompt="What is the capital of Côte d'Ivoire?",
        answers=("Yamoussoukro", "Yamusukro"),
        data_source="nq",
        extra={"split": "train", "index": 0, "hops": 1},
    )
    assert "hops" not in lines[1].extra


def test_reading_stops_at_the_limit_and_empty_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(f"\n{json.dumps(CAPITAL)}\n\n{json.dumps(RIVER)}\nnot a row\n")
    assert [question.uid for question in read_questions(file, limit=2)] == ["train:2", "train:4"]


def target(value: Any) -> dict[str, Any]:
    return {**RIVER, "reward_model": {"ground_truth": {"target": value}}}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ([1, 2], ""),
        ({}, '"prompt"'),
        ({**RIVER, "prompt": [{"role": "system", "content": "Be kind."}, *RIVER["prompt"]]}, '"prompt"'),
        ({**RIVER, "prompt": [{"role": "user", "content": ""}]}, '"prompt"'),
        ({**RIVER, "reward_model": {"ground_truth": "Nile"}}, '"reward_model.ground_truth.target"'),
        (target([]), '"reward_model.ground_truth.target"'),
        (target([3]), '"reward_model.ground_truth.target"'),
        ({**RIVER, "extra_info": "train"}, '"extra_info"'),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_field(tmp_path: Path, row: Any, named: str) -> None:
    file = write_jsonl(tmp_path / "train.jsonl", [CAPITAL, row])
    with refused("malformed", file) as caught:
        read_questions(file)
    assert str(caught.value).startswith(f"{file}, line 2")
    assert named in str(caught.value)


def test_a_bad_row_of_parquet_is_refused_with_its_number(tmp_path: Path) -> None:
    """A parquet column may hold times and bytes, which no checkpoint could hold."""
    rows = [{**RIVER, "extra_info": {"asked": asked}} for asked in (None, datetime(2026, 1, 1))]
    file = write_parquet(tmp_path / "train.parquet", rows)
    with refused("malformed", file) as caught:
        read_questions(file)
    assert f"{file}, line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("cut.jsonl", b'{"prompt": [', "malformed"),
        ("latin.jsonl", '{"prompt": "Côte"}'.encode("latin-1"), "malformed"),
        ("half.jsonl", b'{"question": "a\\ud83d", "golden_answers": ["x"]}', "malformed"),
        ("raw.jsonl", b'{"question": "a\xed\xa0\xbd", "golden_answers": ["x"]}', "malformed"),
        ("digits.jsonl", b'{"question": ' + b"1" * 5000 + b"}", "malformed"),
        ("deep.jsonl", b"[" * 100_000, "malformed"),
        ("fake.parquet", b"PAR2", "malformed"),
        ("empty.jsonl", b"", "empty"),
        ("table.csv", b"a,b", "unsupported"),
        ("gone.jsonl", None, "not_found"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, content: bytes | None, code: Code) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refused(code, tmp_path / name):
        read_questions(tmp_path / name)


def test_damaged_pages_of_parquet_are_refused_and_an_escaped_pair_is_read(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "train.parquet", [RIVER] * 50)
    content = bytearray(file.read_bytes())
    content[4:60] = bytes(56)
    file.write_bytes(content)
    with refused("malformed", file):
        read_questions(file)
    escaped = tmp_path / "escaped.jsonl"
    escaped.write_text('{"question": "a\\ud83d\\ude00", "golden_answers": ["x"]}')
    assert read_questions(escaped)[0].text == "a\U0001f600"


def test_rows_of_rlinf_and_flashrag_are_read_as_questions(tmp_path: Path) -> None:
    rlinf = {"prompt": "Ask. Question: Who?\n", "solutions": ["me", "I"]}
    flashrag = {"id": "test_0", "question": "who", "golden_answers": ["me"]}
    one, two = read_questions(write_jsonl(tmp_path / "mixed.jsonl", [rlinf, flashrag]))
    assert (one.prompt, one.answers, one.text) == ("Ask. Question: Who?\n", ("me", "I"), "")
    assert two.prompt.startswith("Answer the given question. You must conduct reasoning inside <think> and </think>")
    assert two.prompt.endswith("Question: who?\n")
    assert (two.answers, two.text) == (("me",), "who")


def test_questions_of_a_source_have_its_name_before_their_id(tmp_path: Path) -> None:
    """So files of the same name, such as train.jsonl of two sources, give distinct ids."""
    file = write_jsonl(tmp_path / "train.jsonl", [CAPITAL])
    (plain,), (named,) = read_questions(file), read_questions(file, source="rivers")
    assert (named.uid, named.source, named.set_name) == ("rivers/train:1", "rivers", "rivers")
    assert (plain.uid, plain.source, plain.set_name) == ("train:1", "", "nq")


def test_the_raw_question_of_a_row_is_kept(tmp_path: Path) -> None:
    beside = {**RIVER, "question": "Which river?"}
    within = {**RIVER, "extra_info": {"question": "Which river?", "index": 1}}
    found = read_questions(write_jsonl(tmp_path / "train.jsonl", [beside, within, target("Nile")]))
    assert [question.text for question in found] == ["Which river?", "Which river?", ""]
    assert found[2].answers == ("Nile",), "a single answer may be a string"
