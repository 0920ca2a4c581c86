"""Tests that a real run loses no prompt if all its processes are killed and it resumes, or if a part of it dies."""

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.live.running import assert_each_prompt_ended_once, running, wait_for
from tests.support.jsonl import read_rows
from tests.support.processes import words_of
from tests.support.runs import LIMIT_S, PLAIN_ENGINE
from tests.support.waiting import wait_until

STEPS = 5
RUN = [
    PLAIN_ENGINE,
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


def test_every_prompt_is_trained_or_dropped_once_if_the_run_is_killed(tmp_path: Path) -> None:
    """The agent is a program behind the gateway; test_resume_after_kill.py compares runs of the agent loop bit for bit."""
    outputs, log = tmp_path / "outputs", tmp_path / "log"
    with running(outputs, log, *RUN, *GATEWAY) as process:
        folder = wait_for(process, outputs, log, steps=3, saved=1)
    before = read_rows(folder / "prompts.jsonl")
    with running(outputs, log, *RUN, *GATEWAY) as process:
        assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    assert "resumes after step 2" in log.read_text()
    assert [one.name for one in outputs.iterdir()] == [folder.name]

    ends = assert_each_prompt_ended_once(folder, STEPS)
    kept = [row for row in before if row["step"] <= 2]
    assert ends[: len(kept)] == kept, "rows recorded before the checkpoint must stay"
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == f"global_step_{STEPS}"
    assert (folder / "summary.json").is_file()


def test_run_outlives_the_deaths_of_a_megatron_process_and_of_its_search_server(tmp_path: Path) -> None:
    """The run itself ends well, and no engine has a fault."""
    outputs, log = tmp_path / "outputs", tmp_path / "log"
    with running(outputs, log, *RUN, "search.index=data/tiny_world/index") as process:  # With an encoder.
        folder = wait_for(process, outputs, log, steps=2, saved=1)
        killed = [victim(process, "rlsys.search.server"), victim(process, "ray::SyncHost")]
        for one in killed:
            one.kill()
        wait_until(lambda: process.poll() is not None or len(recovered(folder)) >= 2)
        assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    begun = {row["fault"]: row["part"] for row in read_rows(folder / "faults.jsonl") if row["event"] == "began"}
    assert {begun[number] for number in recovered(folder)} >= {"search server"}
    assert any(part.startswith(("actor", "inference")) for part in begun.values())
    assert len(recovered(folder)) == len(begun) == 2
    assert_each_prompt_ended_once(folder, STEPS)


def victim(process: subprocess.Popen[bytes], name: str) -> psutil.Process:
    """Return a child of `process` with `name` in its command line."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if name in " ".join(words_of(child)):
            return child
    raise AssertionError(f"no process has {name} in its command line")


def recovered(folder: Path) -> list[int]:
    """Return the numbers of the faults from which the run has recovered."""
    file = folder / "faults.jsonl"
    return [row["fault"] for row in read_rows(file) if row["event"] == "recovered"] if file.exists() else []
