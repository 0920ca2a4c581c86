"""status.json: what stands in it, when it is written, and how a run's end shows."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rlsys.errors import Interrupted, RunError
from rlsys.observe.status import HEARTBEAT_S, Progress, StageState, Status, StatusFile, ending, read_status
from tests.support.small_disk import run_on_small_disk

MOMENT = Status(step=3, steps=9, begun=1000.0, at=1010.0, states={"actor": StageState("waits for rollouts", 1008.0)})


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_the_file_says_everything_of_a_moment(tmp_path: Path) -> None:
    StatusFile(tmp_path / "status.json", Clock(1011.0)).write(replace(MOMENT, em=0.5, reward=float("nan")))
    assert json.loads((tmp_path / "status.json").read_text()) == {
        "step": 3,
        "steps": 9,
        "begun": 1000.0,
        "at": 1011.0,
        "states": {"actor": {"text": "waits for rollouts", "since": 1008.0}},
        "em": 0.5,
        "reward": None,
        "tokens_per_s": None,
        "ended": None,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }


def test_an_unchanged_status_is_written_again_after_a_heartbeat(tmp_path: Path) -> None:
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


def test_a_disk_that_refuses_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("in the way of the folder")
    file = StatusFile(tmp_path / "run" / "status.json")
    for step in range(3):
        file.write(replace(MOMENT, step=step))
    (record,) = caplog.records
    assert str(tmp_path / "run" / "status.json") in record.getMessage()


FULL = """
import sys
from pathlib import Path
from rich.console import Console
from rlsys.observe.status import Progress
from rlsys.observe.status import StatusFile, read_status

run = Path(sys.argv[1])
try:
    with Progress(Console(quiet=True), status=StatusFile(run / "status.json")):
        with (run / "others").open("wb", buffering=0) as file:
            while file.write(bytes(1024)):
                pass
except OSError as full:
    assert read_status(run)["ended"] == f"failed: {full}", read_status(run)
else:
    raise AssertionError("there was room")
assert sorted(path.name for path in run.iterdir()) == ["others", "status.json"]
"""


@pytest.mark.slow
def test_the_end_of_a_run_is_written_on_a_full_disk(tmp_path: Path) -> None:
    run_on_small_disk(FULL, tmp_path, "64k")


def test_changes_reach_the_file_while_the_run_hangs(tmp_path: Path) -> None:
    """Nobody calls `update` any more; the last state must be there all the same."""
    with Progress(Console(quiet=True), status=StatusFile(tmp_path / "status.json")) as progress:
        progress.update(states={"rollout": "generates 2 groups"})
        deadline = time.monotonic() + 60
        while not (status := read_status(tmp_path)) or not status["states"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert status["states"]["rollout"]["text"] == "generates 2 groups"
    assert status["ended"] is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "failed: interrupted"),
        (asyncio.CancelledError(), "failed: interrupted"),
        (Interrupted("Interrupted."), "failed: interrupted"),
        (RunError("two\nlines"), "failed: two lines"),
        (ExceptionGroup("tasks", [ValueError("of no interest"), RunError("engine 0 died")]), "failed: engine 0 died"),
        (AssertionError(), "failed: AssertionError"),
    ],
)
def test_the_end_of_a_run_is_told_by_its_error(error: BaseException | None, said: str) -> None:
    assert ending(error) == said


def test_a_file_that_is_missing_or_damaged_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    for content in ("", '{"step": 1', "[]"):
        (tmp_path / "status.json").write_text(content)
        assert read_status(tmp_path) is None
