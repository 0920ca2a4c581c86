"""Test that engines of a real run which are killed or hang come back with the current weights, and no prompt is lost."""

import json
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.live.running import assert_each_prompt_ended_once, running, wait_for
from tests.support.jsonl import read_rows
from tests.support.processes import is_gone, words_of, worker_of
from tests.support.runs import LIMIT_S

STEPS = 18
RUN = [
    f"trainer.steps={STEPS}",
    "trainer.schedule.kind=async",
    "cluster.placement.rollout=2-3",
    "rollout.engine.stall_timeout_s=60",  # Longer than a busy machine may delay an answer.
]

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def scheduler_of(worker: psutil.Process) -> psutil.Process:
    (found,) = [one for one in worker.children(recursive=True) if "scheduler" in " ".join(words_of(one))]
    return found


def test_engine_that_is_killed_and_engine_that_hangs_come_back(tmp_path: Path) -> None:
    """Over the transport in which the death of a member concerns the others most."""
    outputs, log = tmp_path / "outputs", tmp_path / "log"
    with running(outputs, log, *RUN, "cluster.sync_mode=broadcast") as process:
        folder = wait_for(process, outputs, log)
        run = psutil.Process(process.pid)
        killed, worker = worker_of(run, 0), worker_of(run, 1)
        hung = scheduler_of(worker)
        hung.send_signal(signal.SIGSTOP)
        killed.kill()
        assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    assert all(is_gone(one) for one in (killed, worker, hung)), "a replaced process is left"

    faults = read_rows(folder / "faults.jsonl")
    began = {(row["part"], row["kind"]) for row in faults if row["event"] == "began"}
    assert began == {("engine 0", "died"), ("engine 1", "hung")}
    assert Counter(row["event"] for row in faults) == {"began": 2, "recovered": 2}

    metrics = read_rows(folder / "metrics.jsonl")
    assert metrics[-1]["rollout/engines"] == 2
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weight_syncs"] == STEPS + 1
    back = max(row["step"] for row in faults if row["event"] == "recovered")
    differences = [row["logprob/max_diff"] for row in metrics if row["step"] > back]
    assert 0 < max(differences) < 1e-3, "both engines must sample with the weights that Megatron scores with"
    # A restarted engine has counted its updates anew: the one with which it caught up, and those after it.
    for engine in (0, 1):
        assert 1 < metrics[-1][f"engine/{engine}/updates"] < STEPS
        assert metrics[-1][f"engine/{engine}/version"] >= STEPS - 1
    assert_each_prompt_ended_once(folder, STEPS)
