"""Search-R1's one question, asked as a user asks it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.searchr1 import infer
from tests.support.tiny import search_server
from tests.support.tiny_models import POLICY


def test_a_question_is_answered_with_searches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with search_server() as search:
        given = {
            "model_id": POLICY,
            "search_url": search.url,
            "temperature": 0,
            "max_turns": 2,
            "question": "Where is Gao",
        }
        words = [str(word) for flag, value in given.items() for word in (f"--{flag}", value)]
        monkeypatch.setattr(sys, "argv", ["infer.py", *words])
        infer.main()
    said = capsys.readouterr().out
    assert "\n\nAnswer: " in said
    searches = said.count("<information>")
    assert said.rstrip().endswith(f"({searches} searches)")
    assert len(search.asked) == searches + 1, "one to see whether it answers"
