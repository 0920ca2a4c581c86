"""Starts runs that a test may kill, waits for their steps, and checks the ends of their prompts."""

import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support.jsonl import read_rows
from tests.support.paths import PROJECT
from tests.support.runs import LIMIT_S, PROMPTS_PER_STEP, RLSYS, small


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
            _kill_with_all_children(process)


def _kill_with_all_children(process: subprocess.Popen[bytes]) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in family:
        one.kill()
    psutil.wait_procs(family, timeout=LIMIT_S)
    process.wait()


def wait_for(process: subprocess.Popen[bytes], outputs: Path, log: Path, steps: int = 1, saved: int = 0) -> Path:
    """Return the folder of a run with so many steps and checkpoints; wait for them. Fails if the run ends first."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        for metrics in outputs.glob("searchr1_tiny_cpu-*/metrics.jsonl"):
            checkpoints = [*(metrics.parent / "checkpoints").glob("global_step_*")]
            if len(checkpoints) >= saved and len(metrics.read_text().splitlines()) >= steps:
                return metrics.parent
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-3000:])


def assert_each_prompt_ended_once(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Assert that a finished run trained each prompt once and lost none; return the rows of prompts.jsonl."""
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == list(range(1, steps + 1))
    ends = read_rows(folder / "prompts.jsonl")
    prompt_groups = Counter(row["group"] for row in ends)
    assert set(prompt_groups.values()) == {1}, "a prompt group ended twice"
    assert set(prompt_groups) == set(range(max(prompt_groups) + 1)), "a prompt group is lost"
    trained = Counter(row["uid"] for row in ends if row["end"] == "trained")
    assert sum(trained.values()) == steps * PROMPTS_PER_STEP
    assert set(trained.values()) == {1}, "there are more prompts than are trained, so each is trained once"
    return ends
