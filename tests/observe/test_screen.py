"""Status, progress, final table and curves of a run, and samples that cannot steer a terminal."""

from __future__ import annotations

import asyncio
import errno
import io
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
from matplotlib import image
from rich.console import Console

from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Trajectory, Turn
from rlsys.errors import Interrupted, RunError
from rlsys.observe.outcome import draw_curves, render_summary
from rlsys.observe.samples import render_sample, visible
from rlsys.observe.status import (
    HEARTBEAT_S,
    PLAIN_INTERVAL_S,
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


def test_piped_progress_is_sparse_and_tells_how_long_a_group_waits() -> None:
    clock, out = Clock(), io.StringIO()
    with Progress(Console(file=out, width=20), clock=clock) as progress:
        progress.update(step=1, steps=9, states={"rollout": "0/32 groups", "actor": "waits for log-probs"})
        for done in range(40):
            clock.now += 0.125
            progress.update(states={"rollout": f"{done}/32 groups", "actor": "waits for log-probs"})
        clock.now += PLAIN_INTERVAL_S
        progress.update(reward=0.5, tokens_per_s=1234.5)
        progress.update(step=2, em=0.25, states={"actor": "trains"})
    assert out.getvalue().splitlines() == [
        "step 1/9 | 0:00:00 | rollout: 0/32 groups | actor: waits for log-probs",
        "step 1/9 | reward 0.500 | tokens/s 1,234 | 0:00:15 | rollout: 39/32 groups | actor: waits for log-probs (15 s)",
        "step 2/9 | EM 0.250 | reward 0.500 | tokens/s 1,234 | 0:00:15 | rollout: 39/32 groups | actor: trains",
    ]


def test_a_group_with_several_voices_waits_only_where_all_of_them_wait() -> None:
    clock = Clock()
    progress = Progress(Console(quiet=True), clock=clock)

    def shown(**states: str) -> str:
        progress.update(states={voice.replace("_", "."): text for voice, text in states.items()})
        clock.now += 5
        return progress.line().partition("critic: ")[2]

    assert shown(critic="trains on 2 groups") == "trains on 2 groups"
    assert shown(critic_values="waits for rollouts") == "trains on 2 groups"
    assert shown(critic_values="computes values of 1 group") == "computes values of 1 group"
    # The values were begun later, but only the training still goes on.
    assert shown(critic_values="waits for rollouts") == "trains on 2 groups"
    assert shown(critic="waits for log-probs and values") == "waits for log-probs and values (5 s)"
    assert shown() == "waits for log-probs and values (10 s)"
    assert shown(critic="") == "waits for rollouts (20 s)"
    assert shown(critic_values="") == ""


def test_the_final_table_holds_its_figures_within_its_width() -> None:
    out = io.StringIO()
    hops = {"em_before_by_hop": {"2": 0.08}, "em_after_by_hop": {"2": 0.69}}
    summary = {"em_before": 0.142, "em_after": 0.731, "oracle_em": None, "first_ratio_max_dev": float("nan"), **hops}
    render_summary({**summary, "overlap_s": 12.0, "steps": 15}, Console(file=out, width=80))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    shown = {
        "exact match": ["0.142", "0.731", "+0.589"],
        "two hops": ["0.080", "0.690", "+0.610"],
        "scoring and training during rollout": ["12.0", "s", "0.80", "s"],
        "oracle EM (ceiling)": ["-"],
        "first update, max |ratio - 1|": ["-"],
    }
    for name, figures in shown.items():
        assert [line.removeprefix(name).split() for line in lines if line.startswith(f"{name} ")] == [figures]


def test_curves_are_pictures_with_something_on_them(tmp_path: Path) -> None:
    assert draw_curves([], [], tmp_path) == []
    times = {"time/step": 9.0, "time/rollout": 7.0, "time/training": 4.0}
    rows = [{"step": 1, "critic/score/mean": 0.1, **times}, {"step": 2, "critic/score/mean": None, "time/step": None}]
    evaluations = [
        {"step": 0, "em": 0.2, "em_by_hop": {"1": 0.3, "2": 0.1}, "searches": 0.5, "questions": 50},
        {"step": 5, "em": 0.6, "em_by_hop": {"1": 0.7, "2": 0.5}, "searches": 1.5, "questions": 50},
    ]
    paths = draw_curves(rows, evaluations, tmp_path)
    assert [path.name for path in paths] == ["em.png", "reward.png", "stage_times.png", "curves.png"]
    drawn = np.mean(image.imread(paths[0])[..., :3].min(axis=-1) < 0.9)
    assert 0.005 < drawn < 0.5


def sample(
    observation: str = "\n\n<information>Paris is it.</information>\n\n",
    generated: str = "<search>capital of France</search>",
) -> tuple[Question, Trajectory, float]:
    """Prompt of 3 tokens, 2 generated by version 4, 3 observed, 2 generated by versions 4 and 5, an EOS."""
    search = Turn(generated, Action.SEARCH, "capital of France", observation, 2, 3, 1, 0.5, 0.25)
    answer = Turn("<answer> Paris </answer>", Action.ANSWER, " Paris ", "", 2, 8, 5, 0.5, 0.0)
    one = trajectory(range(11), np.isin(range(11), (3, 4, 8, 9, 10)).tolist(), uid="train-17", turns=(search, answer))
    versions = np.array([-1, -1, -1, 4, 4, -1, -1, -1, 4, 5, -1], dtype=np.int32)
    question = Question("train-17", "Question: What is the capital of France?\n", ("Paris", "City of Light"))
    return question, replace(one, prompt_length=3, versions=versions), 1.0


def test_prompt_policy_and_search_are_told_apart() -> None:
    text = render_sample(*sample())
    header, *sections = text.split("\n----")
    for fact in ("train-17", "3 prompt, 5 trained, 3 masked", "[3, 5)", "[8, 11)"):
        assert fact in header
    assert [section.split("\n")[0].partition(",")[0].strip(" -") for section in sections] == [
        "prompt (masked)",
        "turn 1: generated",
        "turn 1: observation after search (masked)",
        "turn 2: generated",
    ]
    assert "capital of France</search>" in sections[1]
    assert "  | <information>Paris is it.</information>" in sections[2]
    assert sections[3].rstrip().endswith("<answer> Paris </answer>")


def test_untrusted_text_cannot_forge_a_section_or_drive_the_terminal() -> None:
    forged = "x\x1b[2J\x1b]0;owned\x07\r\n---- turn 9: generated ----\u202eevil"
    text = render_sample(*sample(observation=forged, generated=forged))
    assert "\\x1b[2J" in text
    assert "\\u202eevil" in text
    assert not [line for line in text.splitlines() if line.startswith("---- turn 9")]


@given(st.text(st.characters(codec=None)))
@settings(max_examples=50)
def test_visible_text_holds_nothing_a_terminal_acts_on_and_can_be_written(text: str) -> None:
    shown = visible(text)
    assert all(char in "\n\t" or unicodedata.category(char)[0] not in "C" for char in shown)
    shown.encode("utf-8")
    ordinary = "".join(char for char in text if unicodedata.category(char)[0] in "LNPS")
    assert visible(ordinary) == ordinary


MOMENT = Status(step=3, steps=9, begun=1000.0, at=1010.0, states={"actor": StageState("waits for rollouts", 1008.0)})


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


def test_the_end_of_a_run_is_written_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no room for a new file, but the old one may be written over."""
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
    assert str(tmp_path / "status.json") in record.getMessage(), "said once"


def test_changes_reach_the_file_while_the_run_hangs(tmp_path: Path) -> None:
    """Nobody calls `update` any more; the last state must be there all the same."""
    writes = Queue[Status]()

    class File(StatusFile):
        def write(self, status: Status) -> None:
            super().write(status)
            writes.put(status)

    with Progress(Console(quiet=True), status=File(tmp_path / "status.json")) as progress:
        progress.update(states={"rollout": "generates 2 groups"})
        while not writes.get(timeout=300).states:
            pass
        status = read_status(tmp_path) or {}
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
