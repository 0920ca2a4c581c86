"""Tests of the stacks of a run's processes: real processes that wait in a collective, loop, are stopped, or do not answer."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rlsys.cluster import stacks
from rlsys.cluster.stacks import (
    DRIVER,
    STACKS,
    StackWriter,
    call_of,
    current_frames,
    stacks_here,
    threads_of_this_process,
    write_stacks,
)

LOOP = "def spin():\n    print('ready', flush=True)\n    while True: pass\nspin()"
REGISTER = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1, file=2)\n"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give processes enough time to write their stacks on a busy machine."""
    monkeypatch.setattr(stacks, "ANSWER_S", 600.0)


@contextmanager
def running(log: Path, code: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a Python process with its stderr in `log`, once it has printed a line."""
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as stderr:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_endless_loop_is_named_and_other_runs_are_left_alone(tmp_path: Path) -> None:
    with running(tmp_path / "logs" / "actor-0.log", REGISTER + LOOP):
        found = stacks_here(str(tmp_path / "logs"))
        assert stacks_here(str(tmp_path / "other")) == {}
    assert found.keys() == {"actor-0"}
    assert (call_of(found["actor-0"]) or "").startswith("spin (")


def test_other_lines_of_the_log_are_left_out() -> None:
    thread = ["Thread 0x1 (most recent call first):", '  File "a.py", line 1 in b', "  ..."]
    current = ["Current thread 0x2 (most recent call first):", "  <no Python frame>"]
    log = ["", "step 3", *thread, "INFO  File of step 4", "", *current, "done"]
    assert stacks._only_stacks("\n".join(log)).splitlines() == [*thread, "", *current]
    assert stacks._only_stacks("step 3\n\n\n") == ""


def test_process_that_cannot_answer_is_described_and_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "ANSWER_S", 0.2)
    deaf = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: None)\n{LOOP}"
    logs = tmp_path / "logs"
    with (
        running(logs / "stopped.log", REGISTER + LOOP) as stopped,
        running(logs / "plain.log", LOOP) as plain,
        running(logs / "deaf.log", deaf) as silent,
    ):
        os.kill(stopped.pid, signal.SIGSTOP)
        while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:
            os.sched_yield()
        found = stacks_here(str(logs))
        assert [process.poll() for process in (stopped, plain, silent)] == [None] * 3
    assert "state T (stopped)" in found["stopped"]
    assert "it is stopped" in found["stopped"]
    assert "no handler for SIGUSR1" in found["plain"]
    assert "did not write them" in found["deaf"]
    assert [call_of(text) for text in found.values()] == [None] * 3


def test_children_that_share_a_log_have_names_of_their_own(tmp_path: Path) -> None:
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {REGISTER + LOOP!r}])"
    with running(tmp_path / "logs" / "rollout-0.log", REGISTER + child) as parent:
        (pid,) = [one.pid for one in psutil.Process(parent.pid).children()]
        found = stacks_here(str(tmp_path / "logs"))
        os.kill(pid, signal.SIGKILL)
    first, second = sorted(found)
    assert (first, second.rpartition(".")[2]) == ("rollout-0", str(pid))
    assert ("in run\n" in found[first], "in spin" in found[second]) == (True, True)


@pytest.mark.parametrize(
    ("frames", "call"),
    [
        (["/lib/python3.11/threading.py:9:wait", "/x/rlsys/trainer/actor.py:7:apply"], "wait, called by apply (rlsys/trainer/actor.py:7)"),
        (
            [
                "/v/lib/python3.11/site-packages/torch/distributed/c10d.py:5:all_reduce",
                "/v/lib/python3.11/site-packages/torch/distributed/log.py:6:wrapper",
                "/v/lib/python3.11/site-packages/megatron/core/grad.py:8:finish",
                "/v/lib/python3.11/site-packages/rlsys/trainer/actor.py:7:apply",
            ],
            "all_reduce, called by apply (rlsys/trainer/actor.py:7)",
        ),
        (["/home/rlsys/mine/loss.py:3:loss", "/x/rlsys/trainer/actor.py:7:apply"], "loss (rlsys/mine/loss.py:3)"),
    ],
)  # fmt: skip
def test_call_is_the_collective_or_the_innermost_function(frames: list[str], call: str) -> None:
    places = [frame.split(":") for frame in (*frames, "/x/rlsys/cluster/worker_group.py:1:call")]
    served = "\n".join(f'  File "{file}", line {line} in {function}' for file, line, function in places)
    other = '  File "/x/rlsys/observe/status.py", line 4 in _run'
    text = f"process 7\n\nThread 0x1 (most recent call first):\n{served}\n\nCurrent thread 0x2 (most recent call first):\n{other}\n"
    assert call_of(text) == call
    assert call_of("process 7\n\nThe Python stack is unknown: it is stopped.\n") is None


async def test_driver_writes_its_tasks_and_calls_share_one_result(tmp_path: Path) -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    task = asyncio.create_task(outer(), name="rollout loop")
    await asyncio.sleep(0)
    writer = StackWriter(tmp_path)
    first, second = await asyncio.gather(writer.dump(), writer.dump())
    task.cancel()
    assert first.folder == second.folder
    assert first.folder.parent == tmp_path / STACKS
    text = (first.folder / f"{DRIVER}.txt").read_text()
    (block,) = [block for block in text.split("\n\n") if block.startswith("Task rollout loop")]
    innermost = [line.rpartition(" in ")[2] for line in block.splitlines()[1:]]
    assert [name.rpartition(".")[2] for name in innermost] == ["wait", "inner", "outer"]
    assert "Current thread" in text


def test_stacks_of_the_driver_have_the_main_thread_last_also_beside_many_others() -> None:
    """faulthandler writes at most 100 threads, the newest first."""
    over = threading.Event()
    others = [threading.Thread(target=over.wait) for _ in range(120)]
    for one in others:
        one.start()
    try:
        text = threads_of_this_process()
    finally:
        over.set()
        for one in others:
            one.join()
    assert text.count("(most recent call first)") > len(others)
    *_, main = text.split("\n\n")
    assert main.startswith(f"Current thread 0x{threading.get_ident():016x} ")
    assert main.splitlines()[1].endswith(" in current_frames")
    assert f'File "{__file__}"' in main.splitlines()[3]


def test_stacks_are_returned_even_if_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / STACKS).write_text("not a folder")
    assert write_stacks(tmp_path, {"a": "text"}).texts == {"a": "text"}


def test_no_garbage_is_collected_while_frames_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection then can stop CPython 3.11 for ever."""
    collects: list[bool] = []
    monkeypatch.setattr(sys, "_current_frames", lambda: collects.append(gc.isenabled()) or {})
    assert current_frames() == {}
    assert [*collects, gc.isenabled()] == [False, True]
