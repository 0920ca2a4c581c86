"""Tests of a command that is started again when it is killed, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.apps.cli import training
from rlsys.observe.faults import KILLED_BY
from tests.support.composed import composed
from tests.support.paths import PROJECT
from tests.support.processes import is_gone
from tests.support.waiting import wait_until

LIMIT_S = 300
SUPERVISOR = """
import functools, signal, sys
from rlsys.apps import running
from rlsys.config.schema import ClusterConfig
from rlsys.observe.faults import Restarts
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job ignores it.
running.end = functools.partial(running.end, timeout_s=0.1)
sys.exit(running.supervise([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], Restarts(ClusterConfig(restarts=1)), print))
"""
"""Runs the Python code of its first argument, at most twice."""
RUN = """
import os, pathlib, signal, subprocess, sys, time
from rlsys.apps.running import ends_by_itself
folder = pathlib.Path(sys.argv[1])
orphan = subprocess.Popen(["sleep", "3600"], start_new_session=True)
life = len(list(folder.iterdir()))
part = folder / ".part"
killed_at = os.environ["RLSYS_KILLED_AT"]
assert 0 <= time.time() - float(killed_at) < 3600 if os.environ["RLSYS_KILLED_BY"] else killed_at == ""
part.write_text(f"{os.getpid()} {orphan.pid} {os.environ['RLSYS_KILLED_BY']}")
"""
"""Begins a life: starts a process that would outlive it, and writes both ids."""
DIES = """
with ends_by_itself():
    part.rename(folder / f"life {life}")
    if life < int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)
    assert subprocess.run(["env"], capture_output=True, text=True).stdout.count("THAT_IT_ENDS") == 0
    orphan.kill()
"""
WAITS = """
ends = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
part.rename(folder / f"life {life}")
signal.sigwait(ends)
with ends_by_itself():
    orphan.kill()
    sys.exit(130)
"""
"""Waits for a signal; blocked signals stay pending, so that none comes too early."""


def start(code: str, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    folder.mkdir()
    return subprocess.Popen([sys.executable, "-c", SUPERVISOR, code, str(folder), *words], cwd=PROJECT)


def lives(folder: Path) -> list[tuple[int, int, str]]:
    """Return process id, id of the process that it left, and reason of each life."""
    found = []
    for file in sorted(folder.glob("life *")):
        pid, orphan, *reason = file.read_text().split()
        found.append((int(pid), int(orphan), "".join(reason)))
    return found


@pytest.mark.parametrize(
    ("settings", "killed_by", "outlives"),
    [
        (["resume=auto"], None, True),
        (["resume=auto"], "", False),
        (["resume=none"], None, False),
        (["resume=auto", "cluster.restarts=0"], None, False),
        (["resume=auto", "cluster.address=10.0.0.1:6379"], None, True),
    ],
)
def test_driver_is_started_again_only_if_it_resumes(
    settings: list[str], killed_by: str | None, outlives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KILLED_BY, raising=False)
    if killed_by is not None:
        monkeypatch.setenv(KILLED_BY, killed_by)
    assert training._outlives_its_driver(composed(*settings)) is outlives


@pytest.mark.parametrize(("deaths", "status"), [(0, 0), (1, 0), (2, 128 + signal.SIGKILL)])
def test_killed_command_is_run_again_within_limits_and_leaves_no_process(
    deaths: int, status: int, tmp_path: Path
) -> None:
    process = start(RUN + DIES, tmp_path / "lives", str(deaths))
    assert process.wait(LIMIT_S) == status
    found = lives(tmp_path / "lives")
    assert [reason for *_, reason in found] == ["", "SIGKILL"][: min(deaths, 1) + 1]
    wait_until(lambda: all(is_gone(pid) and is_gone(orphan) for pid, orphan, _ in found))


def test_command_that_ends_with_an_error_is_not_run_again_and_leaves_no_process(tmp_path: Path) -> None:
    code = 'with ends_by_itself():\n    part.rename(folder / f"life {life}")\n    sys.exit(2)\n'
    assert start(RUN + code, tmp_path / "lives").wait(LIMIT_S) == 2
    ((pid, orphan, _),) = lives(tmp_path / "lives")
    wait_until(lambda: is_gone(pid) and is_gone(orphan))


def test_command_that_a_library_ends_is_run_again(tmp_path: Path) -> None:
    """As Ray does in a call after the death of its raylet."""
    process = start(RUN + DIES.replace("os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)"), tmp_path / "lives", "9")
    assert process.wait(LIMIT_S) == 1
    found = lives(tmp_path / "lives")
    assert len(found) == 2
    wait_until(lambda: all(is_gone(pid) and is_gone(orphan) for pid, orphan, _ in found))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_to_the_supervisor_ends_the_command(sign: signal.Signals, tmp_path: Path) -> None:
    process = start(RUN + WAITS, tmp_path / "lives")
    wait_until(lambda: lives(tmp_path / "lives") or process.poll() is not None)
    ((pid, orphan, _),) = lives(tmp_path / "lives")
    os.kill(process.pid, sign)
    assert process.wait(LIMIT_S) == (-sign if sign is signal.SIGKILL else 130)
    wait_until(lambda: is_gone(pid) and is_gone(orphan))
    assert len(lives(tmp_path / "lives")) == 1
