"""Coroutines and commands that scripts and notebooks run: they end, fail and are interrupted, and leave no handler."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlsys.apps.api import training_result
from rlsys.apps.running import finish
from rlsys.errors import RunError, UserError


@contextmanager
def interrupted(ready: Callable[[], bool], function: str) -> Iterator[None]:
    """A block that Ctrl-C ends, once `ready` says so and the block is within `function`."""
    main, over = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        while not over.is_set():
            stack = traceback.walk_stack(sys._current_frames()[main])
            if ready() and function in {frame.f_code.co_name for frame, _ in stack}:
                signal.pthread_kill(main, signal.SIGINT)
                return
            time.sleep(0.01)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


async def fail() -> None:
    async def in_a_task() -> None:
        raise RunError("the engine died.")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(in_a_task())


async def number() -> int:
    await asyncio.sleep(0)
    return 7


def test_a_script_gets_the_value_or_the_error_and_its_own_handlers_back() -> None:
    def mine(*_: object) -> None:
        return

    before = signal.signal(signal.SIGTERM, mine)
    try:
        assert finish(number()) == 7
        with pytest.raises(RunError, match=r"the engine died\."):
            finish(fail())
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_notebook_whose_loop_runs_gets_the_value_or_the_error() -> None:
    assert finish(number()) == 7
    with pytest.raises(RunError, match=r"the engine died\."):
        finish(fail())


@pytest.mark.parametrize("in_loop", [False, True])
def test_an_interrupt_ends_the_work_first(in_loop: bool) -> None:
    begun, closed = threading.Event(), []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    def cell() -> None:
        # As a notebook's kernel has it: the loop's own thread, with Python's handler of Ctrl-C.
        loop = asyncio.new_event_loop()
        loop.call_soon(finish, work())
        try:
            loop.run_forever()
        finally:
            loop.close()

    with interrupted(begun.is_set, "result" if in_loop else "run_to_end"):
        cell() if in_loop else finish(work())
    assert closed == [True]


Stand = Callable[[str], None]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """A function that puts Python code in the place of the commands of rlsys."""
    popen = subprocess.Popen

    def put(code: str) -> None:
        def start(_: Any, **more: Any) -> subprocess.Popen[str]:
            return popen([sys.executable, "-c", code], **more)

        monkeypatch.setattr(training_result.subprocess, "Popen", start)

    return put


CLOSING = """
import signal, sys, time
def end(*_):
    print("closing", file=sys.stderr, flush=True)
    time.sleep(0.5)  # More than the quarter of a second that Python itself waits for a child.
    open({done!r}, "w").close()
    sys.exit(1)
signal.signal(signal.SIGINT, end)
open({begun!r}, "w").close()
while True:
    signal.pause()
"""


def test_an_interrupt_ends_the_command_first_which_has_time_to_close(command: Stand, tmp_path: Path) -> None:
    begun, done = tmp_path / "begun", tmp_path / "done"
    command(CLOSING.format(begun=str(begun), done=str(done)))
    with interrupted(begun.exists, "_wait"):
        training_result._rlsys("eval")
    assert done.exists()


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [
        (
            "the disk is full. [no_room]",
            2,
            UserError("rlsys convert: the disk is full.", code="no_room", key="convert"),
        ),
        ("Usage: [OPTIONS]", 2, UserError("rlsys convert: Usage: [OPTIONS]", code="malformed", key="convert")),
        ("the disk is full.", 1, RunError("rlsys convert: the disk is full.")),
    ],
)
def test_a_failure_is_what_the_command_says(
    said: str, status: int, expected: Exception, command: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    command(f"import sys; print({said!r}, file=sys.stderr); sys.exit({status})")
    with pytest.raises(type(expected)) as caught:
        training_result._rlsys("convert")
    assert str(caught.value) == str(expected)
    assert getattr(caught.value, "code", None) == getattr(expected, "code", None)
    assert said in capsys.readouterr().err
