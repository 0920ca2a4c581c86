"""Rows of a file that survive crashes, machines that go down, and runs that go back."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from rlsys.errors import RunError
from rlsys.observe.records import LineLog


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def filled(path: Path, count: int = 3) -> list[int]:
    """A file of `count` rows, and its position after each."""
    log, positions = LineLog(path), []
    for number in range(count):
        log.append({"row": number, "text": "ä" * number})
        positions.append(log.position)
    log.close()
    return positions


@pytest.mark.parametrize("kept", [0, 2, 3])
def test_a_log_that_goes_back_has_the_rows_up_to_there(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    position = [0, *filled(path)][kept]
    assert LineLog(path).position == path.stat().st_size
    log = LineLog(path, position)
    assert log.position == position == path.stat().st_size, "known before anything is appended"
    assert path.read_bytes().count(b"\n") == kept
    log.append({"row": "new"})
    log.append({"row": "last"})
    assert log.position == path.stat().st_size
    assert [row["row"] for row in rows(path)] == [*range(kept), "new", "last"]


@pytest.mark.parametrize("position", [None, 10_000])
def test_a_line_is_ended_wherever_it_was_cut(position: int | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    whole, last = filled(path)[-2:]
    content = path.read_bytes()
    for size in (whole + 1, (whole + last) // 2, last - 1):
        path.write_bytes(content[:size])
        log = LineLog(path, position)
        log.append({"row": "new"})
        log.close()
        lines = path.read_bytes().splitlines()
        assert lines[:2] == content.splitlines()[:2]
        assert lines[2] == content[whole:size]
        assert json.loads(lines[3]) == {"row": "new"}


def test_any_text_stays_in_its_line(tmp_path: Path) -> None:
    text = "half a pair \ud83d, a\u2028b\nc\x85d"
    LineLog(tmp_path / "rows.jsonl").append({text: text})
    assert rows(tmp_path / "rows.jsonl") == [{text: text}]


def test_the_position_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint must not know of rows that a machine which goes down takes along."""
    log, synced = LineLog(tmp_path / "rows.jsonl"), []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    log.append({"row": 1})
    assert log.position == synced[0] == len('{"row": 1}\n')


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    log = LineLog(path)
    log.append({"row": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(RunError, match=r"rows\.jsonl"):
            log.append({"row": 2, "text": "long enough"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert rows(path) == [{"row": 1}], "what was written of the row is taken back"
    log.append({"row": 3})
    assert log.position == path.stat().st_size
    log.close()
    again = LineLog(path)
    again.append({"row": 4})
    assert [row["row"] for row in rows(path)] == [1, 3, 4]
