"""Tests of signals to a launcher, and of a head that is silent, lost or absent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from rlsys.apps.running import run_to_end
from rlsys.cluster.launch import ray_node as worker
from rlsys.cluster.launch.ray_node import Ending, RayNode
from rlsys.cluster.launch.role import Role
from rlsys.cluster.local_ray import promised_port
from rlsys.errors import Interrupted, RunError
from tests.support.processes import is_gone
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sighup_interrupts_the_run_except_under_nohup() -> None:
    closed = []

    async def work(wait_s: float) -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        try:
            await asyncio.sleep(wait_s)
        finally:
            closed.append(True)
        return "done"

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run_to_end(work(0.1)) == "done"
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(Interrupted):
        run_to_end(work(600))
    assert closed == [True, True]


async def test_command_that_does_not_end_is_killed_with_its_driver_in_another_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
    code = "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "  # Before it says anything.
    code += f"d = subprocess.Popen([sys.executable, '-c', {driver!r}], process_group=0, "
    code += f"stdout=subprocess.PIPE); d.stdout.readline(); open({str(tmp_path / 'pid')!r}, 'w').write(str(d.pid)); "
    code += "d.wait()"
    monkeypatch.setattr(worker, "PATIENCE_S", 0.1)
    monkeypatch.setattr(worker, "ends_with_parent", lambda _: [sys.executable, "-c", code])
    async with worker.rlsys_command([]):
        await until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    await until(lambda: is_gone(int((tmp_path / "pid").read_text())))  # Its parent is another process.


@pytest.fixture
def node() -> Mock:
    """Return a mock of a Ray node whose run has not ended."""
    made = Mock(spec=RayNode)
    made.ending.return_value = None
    return made


@pytest.mark.parametrize("then", ["head", "time", "again"])
async def test_launcher_leaves_after_sigterm_and_the_heads_end_a_time_out_or_a_second_signal(
    then: str, node: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.02)
    monkeypatch.setattr(worker, "LOST_S", 600.0)
    monkeypatch.setattr(worker, "ENDING_GRACE_S", 0.2 if then == "time" else 600.0)
    said: list[str] = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Another test may have left asyncio's handler.
    with closing(socket.create_server(("127.0.0.1", 0))) as head:
        role = Role(1, 2, "127.0.0.1", head.getsockname()[1])
        stay = asyncio.create_task(worker._wait_for_ending(role, node, said.append))
        await until(lambda: signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: said)
        if then == "head":
            assert not stay.done()
            node.ending.return_value = Ending(130, "the run was interrupted")
            assert await stay == Ending(130, "the run was interrupted")
        else:
            if then == "again":
                os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(asyncio.CancelledError):
                await stay
    assert len(said) == 1
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


async def test_silent_or_absent_head_is_named(node: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.02)
    monkeypatch.setattr(worker, "LOST_S", 0.1)
    with promised_port() as closed:
        role = Role(1, 2, "127.0.0.1", closed.getsockname()[1])
        named = f"127.0.0.1:{role.port} is lost"
        with pytest.raises(RunError, match=named):
            await asyncio.wait_for(worker._wait_for_ending(role, node, print), 600)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        with pytest.raises(RunError, match=f"node 1 .*127.0.0.1:{role.port}"):
            await asyncio.wait_for(worker._await_head(role, wait_s=0.05), 600)


def test_log_of_an_ended_ray_is_quoted_and_a_wrong_token_explained(tmp_path: Path) -> None:
    (tmp_path / "ray-start.log").write_text("first\nInvalidAuthToken")
    ended = subprocess.Popen(["sh", "-c", "exit 3"])
    ended.wait()
    with pytest.raises(RunError, match=r"(?s)status 3.*RAY_AUTH_TOKEN.*InvalidAuthToken"):
        RayNode(ended, tmp_path).require_alive()
    assert RayNode(ended, tmp_path).ending() is None
    worker.write_ending(tmp_path, 3, "it is over")
    assert RayNode(ended, tmp_path).ending() == Ending(3, "it is over")
