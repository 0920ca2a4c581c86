"""Tests of what a run shows: progress, status file, and samples that cannot control a terminal."""

import asyncio
import errno
import json
import os
import socket
import unicodedata
from dataclasses import replace
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Trajectory, Turn
from rlsys.errors import Interrupted, RunError
from rlsys.observe.samples import render_sample, visible
from rlsys.observe.status import (
    HEARTBEAT_S,
    Progress,
    StageState,
    Status,
    StatusFile,
    ending,
    read_status,
)
from tests.support.trajectories import trajectory


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_group_waits_only_while_all_of_its_parts_wait() -> None:
    clock = Clock()
    progress = Progress(Console(quiet=True), clock=clock)

    def shown(**states: str) -> str:
        progress.update(states={part.replace("_", "."): text for part, text in states.items()})
        clock.now += 5
        return progress.line().partition("critic: ")[2]

    assert shown(critic="trains on 2 groups") == "trains on 2 groups"
    assert shown(critic_values="waits for rollouts") == "trains on 2 groups"
    assert shown(critic_values="computes values of 1 group") == "computes values of 1 group"
    assert shown(critic_values="waits for rollouts") == "trains on 2 groups", "training continues"
    assert shown(critic="waits for values") == "waits for values (5 s)"
    assert shown() == "waits for values (10 s)"
    assert shown(critic="") == "waits for rollouts (20 s)"
    assert shown(critic_values="") == ""


def sample(
    observation: str = "\n\n<information>Paris is it.</information>\n\n",
    generated: str = "<search>capital of France</search>",
) -> tuple[Question, Trajectory, float]:
    """Question, episode and reward. The episode has 2 turns of 2 generated tokens each.

    Its tokens are 3 of the prompt, 2 of version 4, 3 observed, 2 of versions 4 and 5, and an EOS.
    """
    search = Turn(generated, Action.SEARCH, "capital of France", observation, 2, 3, 1, 0.5, 0.25)
    answer = Turn("<answer> Paris </answer>", Action.ANSWER, " Paris ", "", 2, 8, 5, 0.5, 0.0)
    one = trajectory(range(11), np.isin(range(11), (3, 4, 8, 9, 10)).tolist(), uid="train-17", turns=(search, answer))
    versions = np.array([-1, -1, -1, 4, 4, -1, -1, -1, 4, 5, -1], dtype=np.int32)
    question = Question("train-17", "Question: What is the capital of France?\n", ("Paris", "City of Light"))
    return question, replace(one, prompt_length=3, versions=versions), 1.0


def test_sample_shows_prompt_policy_and_search_in_separate_sections() -> None:
    text = render_sample(*sample())
    header, *sections = text.split("\n----")
    for fact in ("train-17", "3 prompt, 5 trained, 3 masked", "[3, 5)", "[8, 11)"):
        assert fact in header
    assert ["(masked)" in section.split("\n")[0] for section in sections] == [True, False, True, False]
    assert "capital of France</search>" in sections[1]
    assert "  | <information>Paris is it.</information>" in sections[2]
    assert sections[3].rstrip().endswith("<answer> Paris </answer>")


def test_untrusted_text_cannot_forge_a_section_or_control_the_terminal() -> None:
    forged = "x\x1b[2J\x1b]0;owned\x07\r\n---- turn 9: generated ----\u202eevil"
    text = render_sample(*sample(observation=forged, generated=forged))
    assert "\\x1b[2J" in text
    assert "\\u202eevil" in text
    assert not [line for line in text.splitlines() if line.startswith("---- turn 9")]


@given(st.text(st.characters(codec=None)))
@settings(max_examples=50)
def test_visible_text_has_no_control_characters_and_can_be_encoded(text: str) -> None:
    shown = visible(text)
    assert all(char in "\n\t" or unicodedata.category(char)[0] not in "C" for char in shown)
    shown.encode("utf-8")
    ordinary = "".join(char for char in text if unicodedata.category(char)[0] in "LNPS")
    assert visible(ordinary) == ordinary


MOMENT = Status(step=3, steps=9, begun=1000.0, at=1010.0, states={"actor": StageState("waits for rollouts", 1008.0)})


def test_status_file_names_its_process_and_has_null_for_nan(tmp_path: Path) -> None:
    StatusFile(tmp_path / "status.json", lambda: 1011.0).write(replace(MOMENT, em=0.5, reward=float("nan")))
    found = json.loads((tmp_path / "status.json").read_text())
    assert found["states"] == {"actor": {"text": "waits for rollouts", "since": 1008.0}}
    assert (found["at"], found["em"], found["reward"]) == (1011.0, 0.5, None)
    assert (found["pid"], found["host"]) == (os.getpid(), socket.gethostname())


def test_end_of_a_run_is_written_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new file does not fit on the disk, but the old one can be overwritten."""
    file = StatusFile(tmp_path / "status.json")
    file.write(MOMENT)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlsys.observe.status.write_atomically", full)
    for step in range(4, 7):
        file.write(replace(MOMENT, step=step))
    file.end(replace(MOMENT, ended="failed: full"))
    assert (read_status(tmp_path) or {})["ended"] == "failed: full"
    (record,) = caplog.records
    assert str(tmp_path / "status.json") in record.getMessage(), "the warning must come once"


def test_end_of_a_run_by_a_full_disk_names_the_file_in_words() -> None:
    told = ending(ExceptionGroup("all", [OSError(errno.ENOSPC, "No space left on device", "/a/file")]))
    assert told.startswith("failed: /a/file ")
    assert "Errno" not in told


def test_unchanged_status_is_written_again_after_a_heartbeat(tmp_path: Path) -> None:
    clock = Clock(1010.0)
    file = StatusFile(tmp_path / "status.json", clock)

    def written_at(step: int, passed: float) -> float:
        clock.now += passed
        file.write(replace(MOMENT, step=step, at=clock.now))
        return json.loads((tmp_path / "status.json").read_text())["at"]

    assert written_at(3, 0) == 1010.0
    assert written_at(3, HEARTBEAT_S / 2) == 1010.0
    assert written_at(4, 0) == 1010.0 + HEARTBEAT_S / 2
    assert written_at(4, HEARTBEAT_S) == 1010.0 + 1.5 * HEARTBEAT_S


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "failed: interrupted"),
        (asyncio.CancelledError(), "failed: interrupted"),
        (Interrupted("Interrupted."), "failed: interrupted"),
        (RunError("two\nlines"), "failed: two lines"),
        (ExceptionGroup("tasks", [ValueError("less specific"), RunError("engine 0 died")]), "failed: engine 0 died"),
        (AssertionError(), "failed: AssertionError"),
    ],
)
def test_ending_is_described_by_its_error(error: BaseException | None, text: str) -> None:
    assert ending(error) == text


def test_last_change_reaches_the_status_file_while_the_run_hangs(tmp_path: Path) -> None:
    """The last state must be written even if `update` is not called again."""
    writes = Queue[Status]()

    class File(StatusFile):
        def write(self, status: Status) -> None:
            super().write(status)
            writes.put(status)

    with Progress(Console(quiet=True), status=File(tmp_path / "status.json")) as progress:
        progress.update(states={"rollout": "generates 2 groups"})
        while not writes.get(timeout=600).states:
            pass
        status = read_status(tmp_path) or {}
    assert status["states"]["rollout"]["text"] == "generates 2 groups"
    assert status["ended"] is None
