"""Tests of preparing questions: conversion, merging, prompts with tools, and the split into training and held-out."""

import functools
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from typer.testing import CliRunner

from rlsys.apps.cli.data import app
from rlsys.apps.data.download import Hub
from rlsys.apps.data.prepare import REPOSITORY, SETS, merge, prepare_file, split, split_file
from rlsys.data.question import read_questions, search_prompt
from rlsys.errors import Code, UserError
from rlsys.rollout.tools.interface import described, named_tools
from tests.support.fake_hub import FakeHub, running
from tests.support.jsonl import read_rows
from tests.support.refusals import refused

HAMLET = {"id": "test_0", "question": " who wrote Hamlet", "golden_answers": ["Shakespeare", "the Bard"]}
PARIS = {"id": "test_1", "question": "What is the capital of France?", "golden_answers": ["Paris"]}


def jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_public_row_becomes_a_row_of_search_r1_and_the_file_is_recorded_by_hash(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "raw.jsonl", HAMLET, PARIS, HAMLET)
    made = prepare_file(source, "nq", "test", tmp_path / "nq.jsonl", limit=2)
    first, second = read_rows(made.path)
    assert (first["data_source"], first["question"]) == ("nq", "who wrote Hamlet")
    assert first["prompt"][0]["content"].endswith("Question: who wrote Hamlet?\n")
    assert second["prompt"][0]["content"].endswith("Question: What is the capital of France?\n")
    assert first["reward_model"]["ground_truth"]["target"] == ["Shakespeare", "the Bard"]
    assert second["extra_info"] == {"split": "test", "index": 1}
    question = read_questions(made.path)[0]
    assert (question.text, question.answers) == ("who wrote Hamlet", ("Shakespeare", "the Bard"))
    assert json.loads((tmp_path / "nq.jsonl.json").read_text()) == {
        "rows": 2,
        "sha256": hashlib.sha256(made.path.read_bytes()).hexdigest(),
        "from": [{"file": str(source), "sha256": hashlib.sha256(source.read_bytes()).hexdigest()}],
    }


def test_all_bad_rows_are_reported_and_nothing_is_written(tmp_path: Path) -> None:
    bad = [{"question": "Who?"}, {"question": " ", "golden_answers": ["x"]}, [1], {**PARIS, "golden_answers": [""]}]
    source = jsonl(tmp_path / "raw.jsonl", HAMLET, *bad, PARIS)
    with refused("missing", f"{source}, line 2") as caught:
        prepare_file(source, "nq", "test", tmp_path / "out" / "nq.jsonl")
    lines = str(caught.value).splitlines()
    assert [line.partition("line ")[2][0] for line in lines] == ["2", "3", "4", "5"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_own_files_of_every_format_give_the_same_questions(kind: str, tmp_path: Path) -> None:
    rows = [{"query": "Größte Stadt, von allen?", "answer": "Tokio"}, {"query": "Who?", "answer": 'a "b"'}]
    file = tmp_path / f"mine.{kind}"
    if kind == "jsonl":
        jsonl(file, *rows)
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        text = 'query,answer\n"Größte Stadt, von allen?",Tokio\nWho?,"a ""b"""\n'
        file.write_text(text if kind == "csv" else re.sub(",(?! )", "\t", text), encoding="utf-8")
    made = prepare_file(file, "mine", "train", tmp_path / "out.jsonl")
    assert [(one.text, *one.answers, one.data_source) for one in read_questions(made.path)] == [
        ("Größte Stadt, von allen?", "Tokio", "mine"), ("Who?", 'a "b"', "mine"),
    ]  # fmt: skip


def test_field_names_can_be_given(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "mine.jsonl", {"q": "Who?", "question": "no", "gold": ["me", "I"], "answer": "no"})
    made = prepare_file(file, "mine", "train", tmp_path / "out.jsonl", question="q", answers="gold")
    (found,) = read_questions(made.path)
    assert (found.text, found.answers) == ("Who?", ("me", "I"))


def test_merged_files_hold_every_row_once_with_a_new_index(tmp_path: Path) -> None:
    one = prepare_file(jsonl(tmp_path / "a.jsonl", HAMLET, PARIS), "nq", "train", tmp_path / "nq.jsonl")
    two = prepare_file(jsonl(tmp_path / "b.jsonl", PARIS), "hotpotqa", "train", tmp_path / "hotpotqa.jsonl")
    expected = [("nq", "who wrote Hamlet"), ("nq", PARIS["question"]), ("hotpotqa", PARIS["question"])]
    shuffled = expected.copy()
    Random(3).shuffle(shuffled)
    assert shuffled != expected
    for seed, order in ((None, expected), (3, shuffled)):
        rows = read_rows(merge([one.path, two.path], tmp_path / "merged.jsonl", seed).path)
        assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
        assert [(row["data_source"], row["question"]) for row in rows] == order


@pytest.mark.parametrize(
    ("write", "code", "key"),
    [
        (lambda here: prepare_file(here / "a.jsonl", "nq", "test", here / "a.jsonl"), "conflict", "a.jsonl"),
        (lambda here: merge([here / "b.jsonl", here / "a.jsonl"], here / "a.jsonl", None), "conflict", "a.jsonl"),
        (lambda here: split_file(here / "a.jsonl", here / "a.jsonl", here / "h.jsonl", 1), "conflict", "a.jsonl"),
        (lambda here: split_file(here / "a.jsonl", here / "t.jsonl", here / "a.jsonl", 1), "conflict", "a.jsonl"),
        (
            lambda here: split_file(here / "a.jsonl", here / "t.jsonl", here / "b.jsonl", chosen=here / "b.jsonl"),
            "conflict",
            "b.jsonl",
        ),
        (lambda here: split_file(here / "a.jsonl", here / "t.jsonl", here / "t.jsonl", 1), "conflict", "t.jsonl"),
        (lambda here: split_file(here / "a.jsonl", here / "t.csv", here / "h.jsonl", 1), "unsupported", "t.csv"),
    ],
)
def test_no_source_is_overwritten_and_no_two_outputs_are_one_file(
    tmp_path: Path, write: Callable[[Path], object], code: Code, key: str
) -> None:
    for source in ("a.jsonl", "b.jsonl"):
        jsonl(tmp_path / source, HAMLET, PARIS)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with refused(code, tmp_path / key):
        write(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def prepare(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def test_the_command_finds_local_files_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    jsonl(tmp_path / "flashrag" / "nq" / "train.jsonl", HAMLET)
    jsonl(tmp_path / "flashrag" / "nq" / "test.jsonl", PARIS)
    done = prepare("nq", "--from", tmp_path / "flashrag", "--split", "train", "--split", "test", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert len(read_questions(tmp_path / "nq" / "train.jsonl")) == 1
    assert read_questions(tmp_path / "nq" / "test.jsonl")[0].text == PARIS["question"]
    with refused("unknown", "--split"):
        raise prepare("hotpotqa", "--split", "test", "--out", tmp_path).exception
    with refused("not_found", "--from"):
        raise prepare("popqa", "--from", tmp_path / "flashrag", "--out", tmp_path).exception


def test_without_local_files_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (json.dumps(PARIS) + "\n").encode()
    with running(FakeHub({f"{REPOSITORY}/{name}/{one.evaluated}.jsonl": content for name, one in SETS.items()})) as hub:
        monkeypatch.setattr("rlsys.apps.data.download.Hub", functools.partial(Hub, endpoint=hub.url))
        done = prepare("all", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    for name, one in SETS.items():
        assert [q.data_source for q in read_questions(tmp_path / name / f"{one.evaluated}.jsonl")] == [name]


CALCULATOR = "rlsys.rollout.tools.calculator.Calculator"


def own(tmp_path: Path, *arguments: object) -> list[str]:
    """Return the prompts that `prepare own` makes from two questions."""
    source, out = jsonl(tmp_path / "raw.jsonl", HAMLET, PARIS), tmp_path / "own.jsonl"
    done = prepare("own", source, "--out", out, *arguments)
    if done.exception:
        raise done.exception
    return [one.prompt for one in read_questions(out)]


def test_a_tool_is_described_after_the_search_or_in_its_place(tmp_path: Path) -> None:
    said = described(named_tools([CALCULATOR]))
    before, after = search_prompt("who wrote Hamlet").split("If you find no")
    assert own(tmp_path, "--tool", CALCULATOR)[0] == f"{before}{said} If you find no{after}"
    alone = own(tmp_path, "--tool", CALCULATOR, "--no-search")[0]
    assert "search" not in alone
    assert f"every time you get new information. {said} If you find no" in alone


@pytest.mark.parametrize(
    ("content", "arguments", "named"),
    [
        (b"no place", [], "{question}"),
        (b"{question}", ["--tool", CALCULATOR], "tools"),
        (b"{question}", ["--no-search"], "--no-search"),
        (b"{tools} {question}", ["--tool", "no_such.Tool"], "no_such"),
    ],
)
def test_an_unusable_prompt_is_refused(tmp_path: Path, content: bytes, arguments: list[str], named: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        own(tmp_path, "--prompt", file, *arguments)
    assert named in str(caught.value)
    assert not (tmp_path / "own.jsonl").exists()


WORDS = st.lists(st.text("ab C", min_size=1, max_size=4).filter(str.strip), min_size=2, max_size=30)


@settings(max_examples=50)
@given(WORDS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_equal_questions_are_on_the_same_side_in_any_order(texts: list[str], seed: int, random: Random) -> None:
    different = {" ".join(text.split()).casefold() for text in texts}
    if len(different) < 2:
        return
    count = len(different) // 2
    pairs = list(zip(texts, split(texts, count, seed, "x"), strict=True))
    sides: dict[str, set[bool]] = {}
    for text, side in pairs:
        sides.setdefault(" ".join(text.split()).casefold(), set()).add(side)
    assert all(len(side) == 1 for side in sides.values())
    assert sum(side == {True} for side in sides.values()) == count
    random.shuffle(pairs)
    assert split([text for text, _ in pairs], count, seed, "x") == [side for _, side in pairs]


@pytest.mark.parametrize(("many", "held"), [(2, 1), (40, 4), (9000, 500)])
def test_a_tenth_and_at_most_500_questions_are_held_out(many: int, held: int) -> None:
    assert sum(split([f"question {number}" for number in range(many)], None, 0, "x")) == held


@pytest.mark.parametrize(("texts", "count"), [(["a"], None), (["a", " A "], None), (["a", "b"], 2), (["a", "b"], 0)])
def test_a_side_without_questions_is_refused(texts: list[str], count: int | None) -> None:
    with refused("out_of_range", "mine.jsonl"):
        split(texts, count, 0, "mine.jsonl")


def test_a_split_keeps_rows_and_their_order(tmp_path: Path) -> None:
    rows = [{"question": f"Wer ist {n}?", "golden_answers": ["ö"], "more": {"n": n}} for n in range(10)]
    source = jsonl(tmp_path / "all.jsonl", *rows)
    train, heldout = tmp_path / "a" / "train.jsonl", tmp_path / "heldout.jsonl"
    assert split_file(source, train, heldout, 3) == (7, 3)
    parts = [read_rows(file) for file in (train, heldout)]
    assert all(part == [row for row in rows if row in part] for part in parts), "the order is kept"
    assert sorted((*parts[0], *parts[1]), key=str) == sorted(rows, key=str)


def test_chosen_questions_are_held_out_and_removed_from_training(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "all.jsonl", *(PARIS | {"question": f"Q  {n}"} for n in range(5)))
    chosen = jsonl(tmp_path / "chosen.jsonl", PARIS | {"question": " q 3"}, PARIS)
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    assert split_file(source, train, heldout, chosen=chosen) == (4, 2)
    assert [row["question"] for row in read_rows(train)] == ["Q  0", "Q  1", "Q  2", "Q  4"]
    assert heldout.read_text() == chosen.read_text()
    with refused("empty", source):
        split_file(source, train, heldout, chosen=source)
