"""Tests of the verdict file: damaged lines, several processes, failed writes."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from rlsys.errors import RunError
from rlsys.orchestrator.rewards.judge import Verdicts

EACH = 100


@pytest.mark.parametrize("tail", [b'{"key": "b", "ye', b"\xff\xfe", b"[1]", b'{"key": "b", "yes": 1}'])
def test_unreadable_lines_are_skipped(tail: bytes, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    file.write_bytes(b'{"key": "a", "yes": true}\n' + tail)
    verdicts = Verdicts(str(file))
    assert (verdicts.get("a"), verdicts.get("b")) == (True, None)
    verdicts.put("c", False)
    verdicts.close()
    again = Verdicts(str(file))
    assert (again.get("a"), again.get("c")) == (True, False), "the new line is separate from the broken one"
    again.close()


def write_many(path: str, name: str) -> None:
    verdicts = Verdicts(path)
    for number in range(EACH):
        verdicts.put(f"{name}-{number}-{'x' * 500}", number % 2 == 0)
    verdicts.close()


def test_several_processes_write_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "verdicts.jsonl")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len([json.loads(line) for line in Path(path).read_text().splitlines()]) == 3 * EACH


@pytest.mark.parametrize("written", [3, OSError(28, "No space left on device")])
def test_verdict_that_cannot_be_written_ends_the_run(
    written: int | OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_file: int, _line: bytes) -> int:
        if isinstance(written, OSError):
            raise written
        return written

    verdicts = Verdicts(str(tmp_path / "verdicts.jsonl"))
    monkeypatch.setattr("rlsys.orchestrator.rewards.judge.os.write", write)
    with pytest.raises(RunError, match="cannot be written"):
        verdicts.put("a", True)
    verdicts.close()
