"""Search-R1's one question, asked as a user asks it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.searchr1 import infer
from rlsys.errors import Code, RunError
from tests.support.refusals import refused
from tests.support.tiny import search_server
from tests.support.tiny_models import POLICY


class Output:
    """Standard output, which the script sets to bear any character."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Everything is here."""

    def reconfigure(self, **_: object) -> None:
        """Texts have no encoding."""


def ask(monkeypatch: pytest.MonkeyPatch, *flags: str) -> str:
    output = Output()
    monkeypatch.setattr(sys, "argv", ["infer.py", "--model_id", str(POLICY), *flags])
    monkeypatch.setattr(sys, "stdout", output)
    infer.main()
    return output.text


def test_a_question_is_answered_with_searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with search_server() as search:
        flags = ("--search_url", search.url, "--temperature", "0", "--max_turns", "2")
        said = ask(monkeypatch, *flags, "--question", "Where is Bamako")
    assert "\n\nAnswer: " in said
    searches = said.count("<information>")
    assert said.rstrip().endswith(f"({searches} searches)")
    assert len(search.asked) == searches + 1, "one to see whether it answers"


@pytest.mark.parametrize(
    ("flags", "code", "key"),
    [
        (("--search_url", "nowhere"), "malformed", "--search-url"),
        (("--question", " "), "empty", "--question"),
        (("--max_turns", "0", "--question", "why " * 5000), "out_of_range", "task.max_prompt_tokens"),
    ],
)
def test_a_mistake_is_refused(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], code: Code, key: str) -> None:
    with refused(code, key):
        ask(monkeypatch, *flags)


def test_a_dead_server_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"127\.0\.0\.1:9"):
        ask(monkeypatch, "--search_url", "http://127.0.0.1:9")
