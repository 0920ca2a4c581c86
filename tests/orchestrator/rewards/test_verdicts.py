"""Tests of the verdict file: damaged lines and failed writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.errors import RunError
from rlsys.orchestrator.rewards.judge import Verdicts


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
    with pytest.raises(RunError, match="cache_path") as raised:
        verdicts.put("a", True)
    assert raised.value.code == "no_room"
    verdicts.close()
