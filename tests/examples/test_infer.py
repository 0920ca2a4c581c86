"""Search-R1's one question, asked as a user asks it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.searchr1 import infer
from tests.support.tiny import search_server
from tests.support.tiny_models import POLICY

Ask = Callable[..., str]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Ask:
    """Run the script with these flags: its output."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["infer.py", "--model_id", str(POLICY), *flags])
        infer.main()
        return capsys.readouterr().out

    return run


def test_a_question_is_answered_with_searches(ask: Ask) -> None:
    with search_server() as search:
        flags = ("--search_url", search.url, "--temperature", "0", "--max_turns", "2")
        said = ask(*flags, "--question", "Where is Bamako")
    assert "\n\nAnswer: " in said
    searches = said.count("<information>")
    assert said.rstrip().endswith(f"({searches} searches)")
    assert len(search.asked) == searches + 1, "one to see whether it answers"
