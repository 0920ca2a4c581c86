"""Real processes: what is started is healthy, explained or gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import requests

from rlsys.errors import RunError, UserError
from rlsys.search.address import bind
from rlsys.search.launch import SearchServer
from rlsys.search.server.serve import main, serve


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_close_leaves_no_process_and_frees_the_port(index_dir: Path, tmp_path: Path) -> None:
    with SearchServer(index_dir, tmp_path / "logs" / "server.log", topk=1, threads=1) as server:
        with pytest.raises(RunError, match=r"did not answer within 0\.2 s; its log .*server\.log"):
            server.wait_healthy(0.2)
        server.wait_healthy(90)
        assert b"OMP_NUM_THREADS=1\0" in Path(f"/proc/{server.pid}/environ").read_bytes()
        body = {"queries": ["Mali"]}
        assert len(requests.post(f"{server.url}/retrieve", json=body, timeout=30).json()["result"][0]) == 1
        port = int(server.url.rsplit(":", 1)[1])
    assert not psutil.pid_exists(server.pid)
    bind("127.0.0.1", port).close()
    server.close()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        SearchServer(tmp_path, tmp_path / "server.log") as server,
        pytest.raises(RunError, match=r"status 2; its log .*\n.* is not an index"),
    ):
        server.wait_healthy(60)


def test_a_server_that_is_killed_is_noticed(index_dir: Path, tmp_path: Path) -> None:
    with SearchServer(index_dir, tmp_path / "server.log") as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"status -9; its log .* is empty"):
            server.wait_healthy(60)


def test_close_ends_a_server_that_does_not_listen_to_reason(
    index_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.search.launch._TERMINATE_S", 0.2)
    server = SearchServer(index_dir, tmp_path / "server.log")
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    assert not psutil.pid_exists(server.pid)


def test_the_server_ends_when_its_parent_is_killed(index_dir: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from rlsys.search.launch import SearchServer\n"
        f"server = SearchServer({str(index_dir)!r}, {str(tmp_path / 'server.log')!r}, threads=1)\n"
        "server.wait_healthy(90); print(server.pid, flush=True); time.sleep(90)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 20)


def test_a_taken_port_and_a_bad_topk_are_refused(index_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot serve at 127.0.0.1:{port} .*choose another"):
            serve(index_dir, port=port)
        assert main([str(index_dir), "--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith("cannot serve at")
    with pytest.raises(UserError, match="topk 0 is out of range"):
        serve(index_dir, topk=0)
