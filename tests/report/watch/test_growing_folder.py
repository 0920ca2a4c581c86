"""A folder that grows under the server: what is built again and when, and whether the run goes on."""

from __future__ import annotations

import gzip
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.report.run_model import QUIET_S, SILENT_S, Phase, life_of
from rlsys.report.watch import REST, LiveRun
from tests.support.growing_run import EVIL, add_evaluation, add_step, write_run, write_status


class Clock:
    """Each look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def steps(run: LiveRun) -> list[int]:
    (found,) = unpacked(run.data())["runs"]
    return found["steps"]


def unpacked(body: bytes) -> Any:
    return json.loads(gzip.decompress(body))


def test_a_model_is_built_when_asked_for_and_rests_in_proportion(tmp_path: Path) -> None:
    clock = Clock()
    folder = write_run(tmp_path / "run")
    run = LiveRun(folder, clock)
    assert steps(run) == []
    add_step(folder, 1)
    known = run.known()
    assert run.version() == known, "it may be built again only once it has been good for a while"
    assert steps(run) == []
    clock.now += REST * clock.now
    assert run.version() != known
    assert steps(run) == [1]
    assert run.known() == run.version()
    clock.now += 1000
    assert run.known() == run.version(), "nothing has changed"
    body = run.data()
    assert run.data() is body


CHANGES: dict[str, Callable[[Path], object]] = {
    "step": lambda run: add_step(run, 1),
    "evaluation": lambda run: add_evaluation(run, 0, 0.5),
    "measured": lambda run: add_file(run / "eval-1/results.json", "{}"),
    "config": lambda run: add_file(run / "config.yaml", "name: another\n"),
    "summary": lambda run: add_file(run / "summary.json", "{}"),
    "end": lambda run: write_status(run, ended="failed: no disk"),
}


def add_file(path: Path, content: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_that_the_page_shows_makes_another_version(tmp_path: Path, change: Callable[[Path], object]) -> None:
    folder = write_run(tmp_path / "run")
    write_status(folder)
    run = LiveRun(folder, clock=lambda: 0.0)
    run.data()
    known = run.version()
    assert known == run.version()
    change(folder)
    assert run.version() != known


def test_a_change_of_state_or_a_file_that_is_being_written_is_no_other_version(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_status(folder)
    run = LiveRun(folder, clock=lambda: 0.0)
    known = run.version()
    write_status(folder, states={})
    for name in ("evaluations/.step_000004.json.7.part", "trajectories/.step_000004.jsonl.gz.7.part"):
        add_file(folder / name, "{")
    assert run.version() == known
    assert (run.status() or {})["states"] == {}


def test_parts_are_those_of_the_model_that_was_handed_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    add_evaluation(folder, 0, 0.5)
    run = LiveRun(folder)
    (found,) = unpacked(run.data())["runs"]
    number = found["evaluations"][0]["first_chunk"]
    part = run.chunk(number)
    assert part is not None
    assert [answer["answer"] for answer in unpacked(part)] == [EVIL]
    assert run.chunk(number + 1) is None
    assert run.chunk(-1) is None


def test_a_run_whose_process_was_killed_has_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with subprocess.Popen(["true"]) as process:
        process.wait()
    write_status(folder, pid=process.pid, at=time.time() - QUIET_S - 1)
    run = LiveRun(folder)
    told, (shown,) = run.status(), unpacked(run.data())["runs"]
    assert told
    assert told["ended"] == shown["status"]["ended"] == "failed: its process was killed"
    assert b'rlsys_run_phase{phase="gone"} 1.0' in run.metrics()


STATUS = {"step": 3, "steps": 9, "at": 1000.0, "ended": None, "pid": 7, "host": "here"}


@pytest.mark.parametrize(
    ("status", "now", "living", "phase", "words"),
    [
        (STATUS, 1001.0, {7}, Phase.running, "is after step 3 of 9"),
        (STATUS, 1000.0 + QUIET_S + 1, set(), Phase.gone, "killed"),
        # The clock was set back since.
        (STATUS, 1000.0 - QUIET_S - 1, set(), Phase.gone, "killed"),
        # In another container of the same name, where its number is nobody's: it has just written.
        (STATUS, 1000.0 + QUIET_S - 1, set(), Phase.running, "goes on"),
        (STATUS, 1000.0 + SILENT_S + 1, {7}, Phase.silent, "for 31 s"),
        # Of another machine nothing is known but how old its word is.
        ({**STATUS, "host": "there"}, 1100.0, set(), Phase.silent, "for 100 s"),
        ({**STATUS, "ended": "finished"}, 9999.0, set(), Phase.finished, "has finished after step 3"),
        ({**STATUS, "ended": "failed: no disk"}, 9999.0, set(), Phase.failed, "failed: no disk"),
        (None, 1001.0, set(), Phase.unknown, "has not begun"),
        ({"pid": "seven", "at": None}, 1.0, set(), Phase.running, "goes on"),
    ],
)
def test_a_life_by_what_is_on_disk(
    status: dict[str, Any] | None, now: float, living: set[int], phase: Phase, words: str
) -> None:
    life = life_of(status, False, now, "here", living.__contains__)
    assert life.phase is phase
    assert words in life.sentence
    if status is None:
        assert life_of(None, True, now, "here", living.__contains__).phase is Phase.finished, "it has a summary"
