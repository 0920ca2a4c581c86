"""Test that engines of a real run leave and join while it trains, on request, and that no prompt is lost."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.live.running import assert_each_prompt_ended_once, running, wait_for
from tests.support.jsonl import read_rows
from tests.support.processes import is_gone, worker_of
from tests.support.runs import LIMIT_S, PLAIN_ENGINE, rlsys

STEPS = 24
RUN = [PLAIN_ENGINE, f"trainer.steps={STEPS}", "trainer.schedule.kind=async", "cluster.placement.rollout=2-3"]
RUN += ["cluster.sync_mode=broadcast"]  # Its process group is built anew for each change of members.

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def test_engines_leave_and_join_while_a_run_trains(tmp_path: Path) -> None:
    outputs, log = tmp_path / "outputs", tmp_path / "log"
    with running(outputs, log, *RUN) as process:
        folder = wait_for(process, outputs, log)
        left = worker_of(psutil.Process(process.pid), 0)
        processes = [left, *left.children(recursive=True)]
        said = {}
        # The two engines start at the same time.
        for several in (
            ("leave 0 --limit 60",),
            ("leave 1",),
            ("join", "join 2"),
            ("leave 1 --now",),
            ("list --json",),
        ):
            with ThreadPoolExecutor() as threads:
                done = threads.map(lambda words: rlsys("engines", *words.split(), "--run", folder), several)
                said |= zip(several, done, strict=True)
        assert process.poll() is None, log.read_text()[-3000:]
        assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
        ended = rlsys("engines", "join", "--run", folder)
    statuses = {words: done.returncode for words, done in said.items()}
    assert statuses == {words: 2 if words == "leave 1" else 0 for words in said}, [
        done.stderr for done in said.values()
    ]
    assert all(one.returncode == 2 and one.stderr.endswith("[conflict]\n") for one in (said["leave 1"], ended))
    assert [(row["engine"], row["state"]) for row in json.loads(said["list --json"].stdout)] == [
        (0, "serving"),
        (2, "serving"),
    ]
    assert all(is_gone(one) for one in processes), "a process of the engine that left is left"

    changes = [(row["event"], row["part"]) for row in read_rows(folder / "faults.jsonl")]
    assert (changes[0], changes[-1]) == (("left", "engine 0"), ("left", "engine 1"))
    assert set(changes[1:-1]) == {("joined", "engine 0"), ("joined", "engine 2")}
    metrics = read_rows(folder / "metrics.jsonl")
    assert metrics[-1]["rollout/engines"] == 2
    assert metrics[-1]["rollout/lost_groups"] == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weight_syncs"] == STEPS + 1
    assert summary["faults"]["count"] == 0
    for engine in (0, 2):
        assert 1 <= metrics[-1][f"engine/{engine}/updates"] < STEPS
        assert metrics[-1][f"engine/{engine}/version"] >= STEPS - 1
    assert_each_prompt_ended_once(folder, STEPS)
