"""Search-R1's one question, as a user asks it: from elsewhere, and with nobody to search."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.paths import PROJECT
from tests.support.tiny import search_server
from tests.support.tiny_models import POLICY

SCRIPT = PROJECT / "examples" / "searchr1" / "infer.py"


def infer(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--model_id", str(POLICY), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=150)


def test_a_question_is_answered_with_searches(tmp_path: Path) -> None:
    with search_server() as search:
        flags = ("--search_url", search.url, "--temperature", "0", "--max_turns", "2")
        done = infer(tmp_path, *flags, "--question", "Where is Bamako")
    assert done.returncode == 0, done.stderr
    assert "Nothing says which run the model is from" in done.stderr
    assert "\n\nAnswer: " in done.stdout
    searches = done.stdout.count("<information>")
    assert done.stdout.rstrip().endswith(f"({searches} searches)")
    assert len(search.asked) == searches + 1, "one to see whether it answers"


def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    for flags, status, sentence in (
        (("--search_url", "http://127.0.0.1:9"), 1, "start it with `rlsys search serve`"),
        (("--search_url", "nowhere"), 2, "--search-url nowhere is no address"),
        (("--search_url", "nowhere", "--question", " "), 2, "--question is empty"),
    ):
        done = infer(tmp_path, *flags)
        assert done.returncode == status
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
