"""Tests of search server processes: start, signals, end with the parent; and the flags of the command."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from rlsys.errors import Code, RunError
from rlsys.search.address import TOKEN_VARIABLE
from rlsys.search.corpus import PageStore
from rlsys.search.server import command
from rlsys.search.server.command import Parts, read_token, serve_index
from rlsys.search.server.contract import ServerLimits
from tests.support.ports import free_port
from tests.support.processes import is_gone
from tests.support.refusals import refused
from tests.support.waiting import wait_until

from .gated_server import MODULE, GatedServer

# ---- the start of a process


@pytest.mark.parametrize(
    ("number", "wait_s", "said"), [(signal.SIGKILL, 120, "status -9"), (signal.SIGSTOP, 0.2, r"server\.log")]
)
def test_a_killed_or_hanging_server_raises_and_is_ended_by_close(
    number: int, wait_s: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.search.server_process._TERMINATE_S", 0.2)
    with GatedServer(tmp_path / "server.log") as server:
        os.kill(server.pid, number)
        with pytest.raises(RunError, match=said):
            server.wait_healthy(wait_s)
    assert not psutil.pid_exists(server.pid)


def test_the_server_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.search.gated_server import GatedServer\n"
        f"server = GatedServer(Path({str(tmp_path / 'server.log')!r}))\n"
        "server.wait_healthy(120); print(server.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: is_gone(child))


# ---- the end of a process


@contextmanager
def searching(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process of a server, and the server's address."""
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", MODULE, "step-by-step", "--max-batch", "1", "--port", port, *options]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **streams) as process:
        try:
            wait_until(lambda: health(url) is not None)
            yield process, url
        finally:
            process.kill()


def health(url: str) -> dict[str, Any] | None:
    try:
        return requests.get(f"{url}/health", timeout=120).json()
    except requests.ConnectionError:
        return None


def search(url: str, query: str) -> requests.Response:
    return requests.post(f"{url}/retrieve", json={"queries": [query]}, timeout=120)


def test_sigterm_finishes_requests_and_closes_the_retriever() -> None:
    with searching("--shutdown-s", "600", "--force-s", "600") as (process, url), ThreadPoolExecutor(2) as pool:
        assert process.stdout is not None
        first = pool.submit(search, url, "first")
        assert process.stdout.readline() == "finding\n"
        second = pool.submit(search, url, "second")
        wait_until(lambda: (health(url) or {}).get("queries") == 2)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: health(url) is None)
        output, log = process.communicate("\n\n", timeout=120)
        for query, answer in (("first", first), ("second", second)):
            assert answer.result().json()["result"][0][0]["id"] == f"{query}/0"
    assert (output, process.returncode) == ("finding\nclosed\n", 0)
    assert "Traceback" not in log


def test_sigint_answers_503_to_slow_requests_and_partial_bodies() -> None:
    with searching("--shutdown-s", "0.5", "--force-s", "600") as (process, url), ThreadPoolExecutor(1) as pool:
        assert process.stdout is not None
        late = pool.submit(search, url, "late")
        assert process.stdout.readline() == "finding\n"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=120) as sender:
            sender.sendall(b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert health(url) is not None
            process.send_signal(signal.SIGINT)
            assert b" 503 " in sender.recv(1000).partition(b"\r\n")[0]
        assert late.result().status_code == 503
        assert process.communicate("\n", timeout=120)[0] == "closed\n"
        assert process.returncode == 0


def test_a_hanging_search_is_ended_with_the_server() -> None:
    with searching("--shutdown-s", "600", "--force-s", "0.5") as (process, url), ThreadPoolExecutor(1) as pool:
        assert process.stdout is not None
        hung = pool.submit(search, url, "hung")
        assert process.stdout.readline() == "finding\n"
        process.terminate()
        assert process.stdout.read() == "closed\n"
        assert process.wait(120) == 1
        assert isinstance(hung.exception(), requests.ConnectionError)


# ---- the command


def test_flags_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Path, dict[str, Any]]] = []
    served: list[tuple[Parts, dict[str, Any]]] = []
    monkeypatch.setattr(command, "open_retriever", lambda folder, **options: opened.append((folder, options)))
    monkeypatch.setattr(command, "serve_parts", lambda load, **settings: served.append((load(), settings)))
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    pages = tmp_path / "pages.jsonl"
    pages.write_text('{"url": "https://a.example/", "contents": "a page"}\n')
    flags = "--topk 1 --max-topk 2000 --cache-entries 0 --port 7 --host ::1 --allowed-host a --allowed-host b"
    assert serve_index([str(tmp_path), "--pages", str(pages), *flags.split(), "--nprobe", "9", "--mmap"]) == 0
    ((parts, settings),) = served
    assert settings == {
        "name": str(tmp_path),
        "limits": ServerLimits(max_topk=2000, cache_entries=0),
        "token": "s3cret",
        "allowed_hosts": ["a", "b"],
        **{"host": "::1", "port": 7, "topk": 1, "with_mcp": False, "listener": None},
    }
    assert isinstance(parts.pages, PageStore)
    ((folder, options),) = opened
    assert folder == tmp_path
    # The depth of the search is the largest topk that a client may ask for.
    given = {"own_process": True, "nprobe": 9, "mmap": True, "depth": 2000}
    assert {key: value for key, value in options.items() if value is not None} == given


@pytest.mark.parametrize(
    ("flags", "code", "key"),
    [
        (["FILE"], "missing", "--corpus"),
        (["FILE", "--corpus", "passages.jsonl"], "missing", "--encoder"),
        (["FILE", "--kind", "a.b"], "conflict", "--kind"),
        (["FOLDER", "--corpus", "passages.jsonl"], "conflict", "--corpus"),
        (["FOLDER", "--pooling", "cls"], "conflict", "--pooling"),
        (["FOLDER", "--topk", "0"], "out_of_range", "topk"),
        (["FOLDER", "--topk", "101"], "out_of_range", "topk"),
        (["FOLDER", "--threads", "0"], "out_of_range", "--threads"),
        (["FOLDER", "--request-timeout-s=nan"], "out_of_range", "request_timeout_s"),
        (["FOLDER", "--request-timeout-s=inf"], "out_of_range", "request_timeout_s"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], code: Code, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # leaves pytest its handlers
    (tmp_path / "index.faiss").touch()
    paths = {"FILE": str(tmp_path / "index.faiss"), "FOLDER": str(tmp_path)}
    with refused(code, key):
        serve_index([*(paths.get(flag, flag) for flag in flags), "--port", "0"])


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file, environment = tmp_path / "token", {TOKEN_VARIABLE: "of-the-environment"}
    file.write_text("of-the-file\n")
    assert read_token(file, environment) == "of-the-file"
    assert read_token(None, environment) == "of-the-environment"
    assert read_token(None, {}) is None
    for content in (b"", b" \n", b"two words", "naïve".encode(), b"\xff\xff"):
        file.write_bytes(content)
        with refused("malformed", file):
            read_token(file, environment)
    for text in ("", "two words"):
        with refused("malformed", TOKEN_VARIABLE):
            read_token(None, {TOKEN_VARIABLE: text})
    with refused("not_found", tmp_path / "missing"):
        read_token(tmp_path / "missing", environment)
