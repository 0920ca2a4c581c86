"""Test that a real run, killed with all its processes during rollouts, resumes and loses no prompt."""

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.paths import PROJECT
from tests.support.runs import LIMIT_S, RLSYS, small

STEPS, GROUPS = 5, 16
RUN = [
    f"trainer.steps={STEPS}",
    "trainer.schedule.kind=async",
    "checkpoint.interval=2",
    "checkpoint.keep_last=1",
    "resume=auto",
]

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def start(outputs: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen([*RLSYS, *small(outputs, *RUN)], cwd=PROJECT, stdout=file, stderr=subprocess.STDOUT)


def kill_with_all_children(process: subprocess.Popen[bytes]) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in family:
        one.kill()
    psutil.wait_procs(family, timeout=30)
    process.wait()


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def wait_for(process: subprocess.Popen[bytes], outputs: Path, step: int, log: Path) -> Path:
    """Wait until a checkpoint is published and `step` is recorded. Returns the run's folder."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        for metrics in outputs.glob("searchr1_tiny_cpu-*/metrics.jsonl"):
            saved = list((metrics.parent / "checkpoints").glob("global_step_*"))
            if saved and len(metrics.read_text().splitlines()) >= step:
                return metrics.parent
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-3000:])


def test_every_prompt_is_trained_or_dropped_once_if_the_run_is_killed(tmp_path: Path) -> None:
    outputs, log = tmp_path / "outputs", tmp_path / "log"
    process = start(outputs, log)
    try:
        folder = wait_for(process, outputs, 3, log)
    finally:
        kill_with_all_children(process)
    before = rows(folder / "prompts.jsonl")
    process = start(outputs, log)
    assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    assert "resumes after step 2" in log.read_text()
    assert [one.name for one in outputs.iterdir()] == [folder.name]

    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
    ends = rows(folder / "prompts.jsonl")
    prompt_groups = Counter(row["group"] for row in ends)
    assert set(prompt_groups.values()) == {1}, "a prompt group ended twice"
    assert set(prompt_groups) == set(range(max(prompt_groups) + 1)), "a prompt group is lost"
    trained = Counter(row["uid"] for row in ends if row["end"] == "trained")
    assert sum(trained.values()) == STEPS * GROUPS
    assert set(trained.values()) == {1}, "there are more prompts than are trained, so each is trained once"
    kept = [row for row in before if row["step"] <= 2]
    assert ends[: len(kept)] == kept, "rows recorded before the checkpoint must stay"
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == f"global_step_{STEPS}"
    assert (folder / "summary.json").is_file()
