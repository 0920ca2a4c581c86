"""Tests of coroutines and commands run from scripts and notebooks: results, errors, interrupts and signal handlers."""

import asyncio
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rlsys.apps.api import training_result
from rlsys.apps.running import finish
from rlsys.cluster.stacks import current_frames
from rlsys.errors import RunError, UserError


@contextmanager
def interrupted(ready: Callable[[], bool], function: str) -> Iterator[None]:
    """Interrupt the block with Ctrl-C once `ready()` is true and `function` is on the stack."""
    main, over = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        while not over.is_set():
            stack = traceback.walk_stack(current_frames()[main])
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


def test_a_script_gets_the_value_or_error_and_its_signal_handlers_are_restored() -> None:
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


async def test_a_notebook_gets_the_value_or_error_within_its_running_loop() -> None:
    assert finish(number()) == 7
    with pytest.raises(RunError, match=r"the engine died\."):
        finish(fail())


def test_an_interrupt_in_a_notebook_waits_for_the_cleanup_of_the_work() -> None:
    begun, closed = threading.Event(), []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    # As in a notebook's kernel: within a running loop, with Python's handler of Ctrl-C.
    loop = asyncio.new_event_loop()
    loop.call_soon(finish, work())
    with interrupted(begun.is_set, "result"), closing(loop):
        loop.run_forever()
    assert closed == [True]


def stand_in(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the Python interpreter that runs commands of rlsys with a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def test_an_interrupt_waits_for_the_cleanup_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing takes longer than the quarter of a second that Python itself waits for a child."""
    begun, done = tmp_path / "begun", tmp_path / "done"
    closing = f"trap 'sleep 0.5; touch {done}; exit 1' INT; touch {begun}; while :; do sleep 0.05; done"
    stand_in(closing, tmp_path, monkeypatch)
    monkeypatch.setattr(training_result, "_GRACE_S", 600.0)
    with interrupted(begun.exists, "_wait"):
        training_result._rlsys("eval")
    assert done.exists()


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [("The disk is full. [no_room]", 2, "no_room"), ("Usage: OPTIONS", 2, "malformed"), ("The disk is full.", 1, None)],
)
def test_a_failed_command_raises_its_error_with_its_code(
    said: str, status: int, code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stand_in(f"echo '{said}' >&2; exit {status}", tmp_path, monkeypatch)
    with pytest.raises(UserError if code else RunError) as caught:
        training_result._rlsys("convert")
    assert str(caught.value) == f"rlsys convert: {said.partition(' [')[0]}"
    assert getattr(caught.value, "code", None) == code
    assert said in capsys.readouterr().err
