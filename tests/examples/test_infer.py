"""Test of infer.py, Search-R1's script for one question."""

import sys
from pathlib import Path

import pytest

from examples.searchr1 import infer
from tests.support.tiny import search_server
from tests.support.tiny_models import POLICY


@pytest.mark.slow
def test_a_question_is_answered_with_searches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with search_server() as search:
        flags = ["--model_id", str(POLICY), "--search_url", search.url, "--temperature", "0", "--max_turns", "2"]
        monkeypatch.setattr(sys, "argv", ["infer.py", *flags, "--question", "Where is Gao"])
        infer.main()
    said = capsys.readouterr().out
    assert "\n\nAnswer: " in said
    searches = said.count("<information>")
    assert said.rstrip().endswith(f"({searches} searches)")
    assert len(search.asked) == searches + 1, "one more to check that the server answers"
