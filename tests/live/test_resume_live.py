"""Tests that a real run loses no prompt if all its processes are killed and it resumes, or if a part of it dies."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.paths import PROJECT
from tests.support.processes import words_of
from tests.support.runs import LIMIT_S, RLSYS, small

STEPS, GROUPS = 5, 16
RUN = [
    f"trainer.steps={STEPS}",
    "trainer.schedule.kind=async",
    "checkpoint.interval=2",
    "checkpoint.keep_last=1",
    "resume=auto",
]

GATEWAY = [
    "task.agent=gateway",
    "task.agent.entry=examples.agents.openai_sdk.agent",
    "task.token_mode=append",
    "task.train_eos=false",
]

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@contextmanager
def running(outputs: Path, log: Path, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run; if it has not ended by the end of the context, kill it."""
    with log.open("wb") as file:
        words = [*RLSYS, *small(outputs, *settings)]
        process = subprocess.Popen(words, cwd=PROJECT, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_with_all_children(process)


def kill_with_all_children(process: subprocess.Popen[bytes]) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in family:
        one.kill()
    psutil.wait_procs(family, timeout=30)
    process.wait()


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def wait_for(process: subprocess.Popen[bytes], outputs: Path, log: Path, steps: int = 1, saved: int = 0) -> Path:
    """Wait until so many steps are recorded and checkpoints published; the run must not end before. Returns its folder."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for metrics in outputs.glob("searchr1_tiny_cpu-*/metrics.jsonl"):
            checkpoints = [*(metrics.parent / "checkpoints").glob("global_step_*")]
            if len(checkpoints) >= saved and len(metrics.read_text().splitlines()) >= steps:
                return metrics.parent
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-3000:])


def test_every_prompt_is_trained_or_dropped_once_if_the_run_is_killed(tmp_path: Path) -> None:
    """The agent is a program behind the gateway; test_resume_after_kill.py compares runs of the agent loop bit for bit."""
    outputs, log = tmp_path / "outputs", tmp_path / "log"
    with running(outputs, log, *RUN, *GATEWAY) as process:
        folder = wait_for(process, outputs, log, steps=3, saved=1)
    before = rows(folder / "prompts.jsonl")
    with running(outputs, log, *RUN, *GATEWAY) as process:
        assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    assert "resumes after step 2" in log.read_text()
    assert [one.name for one in outputs.iterdir()] == [folder.name]

    ends = assert_each_prompt_ended_once(folder)
    kept = [row for row in before if row["step"] <= 2]
    assert ends[: len(kept)] == kept, "rows recorded before the checkpoint must stay"
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == f"global_step_{STEPS}"
    assert (folder / "summary.json").is_file()


def test_run_outlives_the_deaths_of_a_megatron_process_and_of_its_search_server(tmp_path: Path) -> None:
    """The run itself ends well; its engines are the same processes throughout."""
    outputs, log = tmp_path / "outputs", tmp_path / "log"
    with running(outputs, log, *RUN) as process:
        folder = wait_for(process, outputs, log, steps=2, saved=1)
        killed = [victim(process, "rlsys.search.server"), victim(process, "ray::SyncHost")]
        engines = [victim(process, "ray::AsyncHost")]
        for one in killed:
            one.kill()
        while process.poll() is None and len(recovered(folder)) < 2:
            time.sleep(0.05)
        assert [victim(process, "ray::AsyncHost")] == engines
        assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    begun = {row["fault"]: row["part"] for row in rows(folder / "faults.jsonl") if row["event"] == "began"}
    assert {begun[number] for number in recovered(folder)} >= {"search server"}
    assert any(part.startswith(("actor", "inference")) for part in begun.values())
    assert len(recovered(folder)) == len(begun) == 2
    assert_each_prompt_ended_once(folder)


def victim(process: subprocess.Popen[bytes], name: str) -> psutil.Process:
    """Return a child of `process` with `name` in its command line."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if name in " ".join(words_of(child)):
            return child
    raise AssertionError(f"no process has {name} in its command line")


def recovered(folder: Path) -> list[int]:
    """Return the numbers of the faults from which the run has recovered."""
    file = folder / "faults.jsonl"
    return [row["fault"] for row in rows(file) if row["event"] == "recovered"] if file.exists() else []


def assert_each_prompt_ended_once(folder: Path, steps: int = STEPS) -> list[dict[str, Any]]:
    """Assert that a finished run trained each prompt once and lost none; return the rows of prompts.jsonl."""
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(1, steps + 1))
    ends = rows(folder / "prompts.jsonl")
    prompt_groups = Counter(row["group"] for row in ends)
    assert set(prompt_groups.values()) == {1}, "a prompt group ended twice"
    assert set(prompt_groups) == set(range(max(prompt_groups) + 1)), "a prompt group is lost"
    trained = Counter(row["uid"] for row in ends if row["end"] == "trained")
    assert sum(trained.values()) == steps * GROUPS
    assert set(trained.values()) == {1}, "there are more prompts than are trained, so each is trained once"
    return ends
