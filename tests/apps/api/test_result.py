"""Commands that a result runs: their settings, their failures, and interrupts, which end them first."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlsys.apps.api import HttpRetriever, TrainingResult
from rlsys.apps.api.arguments import RunSettings
from rlsys.errors import RunError, UserError

TRAINED = "examples/searchr1/tiny/policy"


def result(folder: Path) -> TrainingResult:
    overrides = ("search.url=http://old:1", "search.token_env=OLD", "search.timeout_s=77")
    settings = RunSettings("searchr1_tiny_cpu", overrides, frozenset({"search.url", "search.token_env"}))
    return TrainingResult(folder, {"checkpoint": TRAINED}, settings, HttpRetriever("http://new:2"))


def test_own_settings_of_the_search_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("rlsys.apps.api.training_result._rlsys", lambda *words: asked.append(words))
    result(tmp_path).evaluate(limit=3)
    settings = [word for word in asked[0] if word.startswith("search.")]
    assert settings == [
        "search.timeout_s=77", "search.url='http://new:2'", "search.topk=3", "search.replicas=[]",
        "search.token_env=null",
    ]  # fmt: skip


CHILD = """
import signal, sys, time
def end(*_):
    print("closing", file=sys.stderr, flush=True)
    time.sleep(1)  # More than the quarter of a second that Python itself waits for a child.
    open({done!r}, "w").close()
    sys.exit(1)
signal.signal(signal.SIGINT, end)
open({begun!r}, "w").close()
time.sleep(600)
"""
PARENT = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # A test run in the background ignores it, and so would this.
from rlsys.apps.api import training_result as result
popen = subprocess.Popen
result.subprocess.Popen = lambda command, **more: popen([sys.executable, {child!r}], **more)
result._rlsys("eval")
"""


def test_an_interrupt_ends_the_command_first_which_has_time_to_close(tmp_path: Path) -> None:
    child, begun, done = tmp_path / "child.py", tmp_path / "begun", tmp_path / "done"
    child.write_text(CHILD.format(begun=str(begun), done=str(done)))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(child=str(child))], stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 100
    while not begun.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=100)
    assert done.exists()
    assert "KeyboardInterrupt" in said
    assert "closing" in said


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [
        (
            "the disk is full. [no_room]",
            2,
            UserError("rlsys convert: the disk is full.", code="no_room", key="convert"),
        ),
        ("Usage: [OPTIONS]", 2, UserError("rlsys convert: Usage: [OPTIONS]", code="malformed", key="convert")),
        ("the disk is full.", 1, RunError("rlsys convert: the disk is full.")),
    ],
)
def test_a_failure_is_what_the_command_says(
    said: str, status: int, expected: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlsys.apps.api import training_result as module

    popen = subprocess.Popen
    code = f"import sys; print({said!r}, file=sys.stderr); sys.exit({status})"

    def start(_: Any, **more: Any) -> subprocess.Popen[str]:
        return popen([sys.executable, "-c", code], **more)

    monkeypatch.setattr(module.subprocess, "Popen", start)
    with pytest.raises(type(expected)) as caught:
        module._rlsys("convert")
    assert str(caught.value) == str(expected)
    assert getattr(caught.value, "code", None) == getattr(expected, "code", None)
    assert said in capsys.readouterr().err
