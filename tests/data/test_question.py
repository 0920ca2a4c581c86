"""Tests of questions read from rows of Search-R1, RLinf and FlashRAG, and of the source that hands them out."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rlsys.data.question import PromptSource, Question, SourceState, read_questions
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


def test_rows_of_rlinf_and_flashrag_are_read_as_questions(tmp_path: Path) -> None:
    rlinf = {"prompt": "Ask. Question: Who?\n", "solutions": ["me", "I"]}
    flashrag = {"id": "test_0", "question": "who", "golden_answers": ["me"]}
    one, two = read_questions(write_jsonl(tmp_path / "mixed.jsonl", [rlinf, flashrag]))
    assert (one.prompt, one.answers, one.text) == ("Ask. Question: Who?\n", ("me", "I"), "")
    assert two.prompt.startswith("Answer the given question. You must conduct reasoning inside <think> and </think>")
    assert two.prompt.endswith("Question: who?\n")
    assert (two.answers, two.text) == (("me",), "who")


def test_the_raw_question_of_a_row_is_kept(tmp_path: Path) -> None:
    beside = {**RIVER, "question": "Which river?"}
    within = {**RIVER, "extra_info": {"question": "Which river?", "index": 1}}
    found = read_questions(write_jsonl(tmp_path / "train.jsonl", [beside, within, target("Nile")]))
    assert [question.text for question in found] == ["Which river?", "Which river?", ""]
    assert found[2].answers == ("Nile",), "a single answer may be a string"


SIZE = st.integers(1, 20)
SEED = st.integers(0, 10**6)


def questions(count: int) -> list[Question]:
    return [Question(f"q:{number}", "?", ("yes",)) for number in range(count)]


def take(source: PromptSource, count: int) -> list[Question]:
    return [source.next() for _ in range(count)]


def uids(taken: list[Question]) -> list[str]:
    return [question.uid for question in taken]


def test_each_epoch_and_seed_has_a_different_order() -> None:
    source = PromptSource(questions(30), seed=1)
    orders = (take(source, 30), take(source, 30), take(PromptSource(questions(30), seed=2), 30), questions(30))
    assert len({tuple(uids(order)) for order in orders}) == 4


@given(SIZE, SEED, st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=50)
def test_every_epoch_hands_out_each_question_once_also_after_a_resume(
    size: int, seed: int, before: int, after: int
) -> None:
    first = PromptSource(questions(size), seed)
    taken = uids(take(first, before))
    second = PromptSource(questions(size), seed, SourceState(first.position, ()))
    rest = uids(take(second, after))
    assert rest == uids(take(first, after))
    assert second.position == before + after
    for start in range(0, before + after, size):
        epoch = [*taken, *rest][start : start + size]
        assert len(set(epoch)) == len(epoch)


@given(SIZE, SEED, st.lists(st.booleans(), max_size=40))
@settings(max_examples=50)
def test_returned_questions_are_asked_again_before_new_ones(size: int, seed: int, returns: list[bool]) -> None:
    source, untouched = PromptSource(questions(size), seed), PromptSource(questions(size), seed)
    new = []
    for back in returns:
        question = source.next()
        if back:
            source.give_back(question)
            assert source.state().given_back == (question,)
            assert source.next() is question
        new.append(question)
    assert uids(new) == uids(take(untouched, len(returns)))
    assert source.position == len(returns)


def test_a_resumed_source_asks_returned_questions_again() -> None:
    first = PromptSource(questions(5), seed=3)
    early = take(first, 3)
    first.give_back(early[2])
    first.give_back(early[0])
    state = first.state()
    second = PromptSource(questions(5), 3, state)
    assert second.state() == state == SourceState(3, (early[2], early[0]))
    assert uids(take(second, 4)) == uids([early[2], early[0], *take(first, 4)[2:]])
    assert state == SourceState(3, (early[2], early[0])), "a state does not change afterwards"


def test_a_returned_question_is_asked_again_even_if_the_file_has_lost_it() -> None:
    first = PromptSource(questions(5), seed=3)
    first.give_back(gone := first.next())
    second = PromptSource([Question("new:1", "?", ("no",))], 3, first.state())
    assert take(second, 1) == [gone]
    assert second.next().uid == "new:1"
