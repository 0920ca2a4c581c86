"""Test that engines of a real run which are killed or hang come back with the current weights, and no prompt is lost."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.live.test_resume_live import kill_with_all_children, rows
from tests.orchestrator.groups.test_real_restarts import is_gone
from tests.support.paths import PROJECT
from tests.support.runs import LIMIT_S, RLSYS, small

STEPS, GROUPS = 12, 16
RUN = [
    f"trainer.steps={STEPS}",
    "trainer.schedule.kind=async",
    "cluster.placement.rollout=2-3",
    "rollout.engine.stall_timeout_s=15",
]

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def wait_until(process: subprocess.Popen[bytes], log: Path, holds: Callable[[], Any]) -> Any:
    """Return the result of `holds` once it is true; the run must not end before."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if found := holds():
            return found
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-3000:])


def worker_of(run: psutil.Process, engine: int) -> psutil.Process:
    """Return the process of an engine's worker, which writes the engine's log."""
    for one in run.children(recursive=True):
        try:
            if Path(os.readlink(f"/proc/{one.pid}/fd/1")).name == f"rollout-{engine}.log" and "ray::" in one.name():
                return one
        except (OSError, psutil.Error):
            continue
    raise AssertionError(f"engine {engine} has no process")


def scheduler_of(worker: psutil.Process) -> psutil.Process:
    (found,) = [one for one in worker.children(recursive=True) if "scheduler" in " ".join([one.name(), *one.cmdline()])]
    return found


@pytest.mark.parametrize("mode", ["tensor", "disk", "broadcast"])
def test_engine_that_is_killed_and_engine_that_hangs_come_back(mode: str, tmp_path: Path) -> None:
    outputs, log = tmp_path / "outputs", tmp_path / "log"
    with log.open("wb") as file:
        command = [*RLSYS, *small(outputs, *RUN, f"cluster.sync_mode={mode}")]
        process = subprocess.Popen(command, cwd=PROJECT, stdout=file, stderr=subprocess.STDOUT)
    try:
        (folder,) = wait_until(
            process, log, lambda: [one.parent for one in outputs.glob("searchr1_tiny_cpu-*/metrics.jsonl") if rows(one)]
        )
        run = psutil.Process(process.pid)
        killed, worker = worker_of(run, 0), worker_of(run, 1)
        hung = scheduler_of(worker)
        hung.send_signal(signal.SIGSTOP)
        killed.kill()
        assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            kill_with_all_children(process)
    assert all(is_gone(one) for one in (killed, worker, hung)), "a replaced process is left"

    faults = rows(folder / "faults.jsonl")
    began = {(row["part"], row["kind"]) for row in faults if row["event"] == "began"}
    assert began == {("engine 0", "died"), ("engine 1", "hung")}
    assert Counter(row["event"] for row in faults) == {"began": 2, "recovered": 2}

    metrics = rows(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["rollout/engines"] == 2
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weight_syncs"] == STEPS + 1
    assert summary["em_after"] > summary["em_before"] + 0.1
    # A restarted engine has counted its updates anew: the one with which it caught up, and those after it.
    for engine in (0, 1):
        assert 1 < metrics[-1][f"engine/{engine}/updates"] < STEPS
        assert metrics[-1][f"engine/{engine}/version"] >= STEPS - 1

    ends = rows(folder / "prompts.jsonl")
    groups = Counter(row["group"] for row in ends)
    assert set(groups) == set(range(max(groups) + 1)), "a prompt group is lost"
    assert set(groups.values()) == {1}, "a prompt group ended twice"
    trained = Counter(row["uid"] for row in ends if row["end"] == "trained")
    assert (sum(trained.values()), set(trained.values())) == (STEPS * GROUPS, {1})
