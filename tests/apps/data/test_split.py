"""Held-out questions: as many as asked for, never on both sides, the same ones whatever the order."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.apps.data.prepare import split, split_file
from rlsys.errors import Code
from tests.support.refusals import refused

WORDS = st.lists(st.text("ab C", min_size=1, max_size=4).filter(str.strip), min_size=2, max_size=30)


def write(file: Path, *texts: str) -> Path:
    file.write_text("".join(json.dumps({"question": text, "golden_answers": ["a"]}) + "\n" for text in texts))
    return file


@settings(max_examples=50)
@given(WORDS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_same_question_is_on_one_side_in_any_order(texts: list[str], seed: int, random: Random) -> None:
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
def test_a_tenth_is_held_out_and_500_at_most(many: int, held: int) -> None:
    assert sum(split([f"question {number}" for number in range(many)], None, 0, "x")) == held


@pytest.mark.parametrize(("texts", "count"), [(["a"], None), (["a", " A "], None), (["a", "b"], 2), (["a", "b"], 0)])
def test_a_side_without_questions_is_refused(texts: list[str], count: int | None) -> None:
    with refused("out_of_range", "mine.jsonl"):
        split(texts, count, 0, "mine.jsonl")


def test_rows_are_written_as_they_were(tmp_path: Path) -> None:
    rows = [{"question": f"Wer ist {n}?", "golden_answers": ["ö"], "more": {"n": n}} for n in range(10)]
    source = tmp_path / "all.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, heldout = tmp_path / "a" / "train.jsonl", tmp_path / "heldout.jsonl"
    assert split_file(source, train, heldout, 3) == (7, 3)
    parts = [[json.loads(line) for line in file.read_text().splitlines()] for file in (train, heldout)]
    assert all(part == [row for row in rows if row in part] for part in parts), "the order is kept"
    assert sorted((*parts[0], *parts[1]), key=str) == sorted(rows, key=str)


@pytest.mark.parametrize(
    ("train", "heldout", "code"),
    [("all.jsonl", "h.jsonl", "conflict"), ("t.jsonl", "t.jsonl", "conflict"), ("t.csv", "h.jsonl", "unsupported")],
)
def test_files_in_each_others_way_are_refused(tmp_path: Path, train: str, heldout: str, code: Code) -> None:
    source = write(tmp_path / "all.jsonl", "a")
    with refused(code, tmp_path / train):
        split_file(source, tmp_path / train, tmp_path / heldout)
    assert source.read_text().startswith("{")


def test_chosen_questions_are_held_out_and_not_trained_on(tmp_path: Path) -> None:
    source = write(tmp_path / "all.jsonl", *(f"q {n}" for n in range(5)))
    chosen = write(tmp_path / "chosen.jsonl", " Q  3", "other")
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    assert split_file(source, train, heldout, chosen=chosen) == (4, 2)
    assert [json.loads(line)["question"] for line in train.read_text().splitlines()] == ["q 0", "q 1", "q 2", "q 4"]
    assert heldout.read_text() == chosen.read_text()
    with refused("empty", source):
        split_file(source, train, heldout, chosen=source)
    with refused("conflict", chosen):
        split_file(source, train, chosen, chosen=chosen)
