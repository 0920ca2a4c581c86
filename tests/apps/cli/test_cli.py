"""The contract of the `rlsys` command: a mistake is one sentence with its code and status 2, never a traceback."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.apps.cli.main import run_command
from rlsys.apps.running import run_to_end
from rlsys.errors import RunError, UserError
from tests.apps.cli.conftest import Call

TINY = ["-c", "searchr1_tiny_cpu"]
CODED = re.compile(r"[.?] \[[a-z_]+\]$")


def test_a_process_ends_with_the_sentence_and_its_code() -> None:
    command = [sys.executable, "-m", "rlsys.apps.cli.main", "train", *TINY, "trainer.stepz=3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("trainer.stepz")
    assert CODED.search(line)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("train", "-c", "nope"), "nope"),
        (("search", "serve", "{}/none"), "{}/none"),
        (("eval", *TINY, "--engine", "nope"), "nope"),
        (("convert", "info", "{}/none"), "{}/none"),
    ],
)
def test_a_mistake_is_one_sentence(call: Call, tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    status, out, error = call(*(argument.format(tmp_path) for argument in arguments))
    assert (status, out) == (2, "")
    (line,) = error.splitlines()
    assert named.format(tmp_path) in line


def test_each_problem_of_a_config_is_a_line(call: Call, tmp_path: Path) -> None:
    status, _, error = call("train", *TINY, "--dry-run", f"model.path={tmp_path}", "trainer.steps=0")
    assert status == 2
    lines = error.strip().splitlines()
    assert {"trainer.steps=0", f"model.path={tmp_path}"} <= {line.partition(" ")[0] for line in lines}
    assert CODED.search(lines[-1])


@pytest.mark.parametrize("arguments", [("train",), ("nope",)])
def test_a_wrong_use_of_the_command_has_status_2(call: Call, arguments: tuple[str, ...]) -> None:
    status, _, error = call(*arguments)
    assert status == 2
    assert "Usage" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("steps=0 is too few.", code="out_of_range", key="steps"), 2, "steps=0 is too few. [out_of_range]"),
        (RunError("actor rank 1 is gone."), 1, "actor rank 1 is gone."),
        (BaseExceptionGroup("stages", [KeyError("x"), RunError("actor rank 1 is gone.")]), 1, "actor rank 1 is gone."),
        (OSError(errno.ENOSPC, "No space left on device", "/a/file"), 1, "/a/file"),
        (KeyboardInterrupt(), 130, "Interrupted"),
    ],
)
def test_each_kind_of_end_has_its_status(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as exit_:
        run_command(fail)
    assert exit_.value.code == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_a_mistake_of_the_program_keeps_its_traceback() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(fail)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_closes_what_it_opened(capsys: pytest.CaptureFixture[str], number: signal.Signals) -> None:
    closed = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    with pytest.raises(SystemExit) as exit_:
        run_command(lambda: run_to_end(work()))
    assert exit_.value.code == 130
    assert closed == [True]
    assert capsys.readouterr().err.startswith("Interrupted")
