"""Real processes: what is started is healthy, explained or gone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from rlsys.errors import RunError, UserError
from rlsys.search.address import bind
from rlsys.search.server.command import TOKEN_VARIABLE, read_token, serve_index
from rlsys.search.server_process import SearchServer
from tests.support.ports import free_port


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
    monkeypatch.setattr("rlsys.search.server_process._TERMINATE_S", 0.2)
    server = SearchServer(index_dir, tmp_path / "server.log")
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    assert not psutil.pid_exists(server.pid)


def test_the_server_ends_when_its_parent_is_killed(index_dir: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from rlsys.search.server_process import SearchServer\n"
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
        assert serve_index([str(index_dir), "--port", str(port)]) == 2
    assert re.match(rf"cannot serve at 127.0.0.1:{port} .*choose another", capsys.readouterr().err)
    assert serve_index([str(index_dir), "--topk", "0"]) == 2
    assert "topk 0 is out of range" in capsys.readouterr().err


def test_a_faiss_file_from_elsewhere_needs_its_corpus_and_encoder_and_a_folder_takes_neither(
    index_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors, corpus = index_dir / "index.faiss", index_dir / "corpus.jsonl"
    for flags, said in (
        ([str(vectors)], "give --corpus"),
        ([str(vectors), "--corpus", str(corpus)], "--encoder"),
        ([str(index_dir), "--corpus", str(corpus)], "--corpus is for a FAISS file"),
        ([str(index_dir), "--query-prefix", "query: "], "--query-prefix is for a FAISS file"),
    ):
        assert serve_index([*flags, "--port", "0"]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1


def test_a_faiss_file_from_elsewhere_is_served_with_flags(index_dir: Path, tmp_path: Path) -> None:
    vectors, corpus = index_dir / "index.faiss", index_dir / "corpus.jsonl"
    flags = ("--corpus", str(corpus), "--encoder", "minilm")
    with SearchServer(vectors, tmp_path / "log", options=flags) as server:
        server.wait_healthy(90)
        asked = {"queries": ["What is the capital of Mali?"], "topk": 1}
        found = requests.post(f"{server.url}/retrieve", json=asked, timeout=30).json()
    assert "Bamako" in found["result"][0][0]["contents"]
    assert "does not say what it was encoded with" in (tmp_path / "log").read_text()


def test_options_reach_the_server(index_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tmp_path / "pages.jsonl"
    pages.write_text('{"url": "https://a.example/", "contents": "a page"}\n')
    monkeypatch.setenv("RLSYS_SEARCH_TOKEN", "s3cret")
    options = ["--pages", str(pages), "--max-topk", "2", "--cache-entries", "0"]
    with SearchServer(index_dir, tmp_path / "server.log", topk=1, threads=1, options=options) as server:
        server.wait_healthy(90)
        assert requests.get(f"{server.url}/health", timeout=30).json() == {"status": "ok"}
        assert requests.post(f"{server.url}/retrieve", json={"queries": ["a"]}, timeout=30).status_code == 401
        session = requests.Session()
        session.headers["Authorization"] = "Bearer s3cret"
        answer = session.post(f"{server.url}/access", json={"urls": ["https://a.example/"]}, timeout=30)
        assert answer.json() == {"result": [{"url": "https://a.example/", "contents": "a page"}]}
        refused = session.post(f"{server.url}/retrieve", json={"queries": ["a"], "topk": 3}, timeout=30)
        assert refused.json()["detail"] == "topk: 3 is out of range; send 1 to 2"
        assert session.get(f"{server.url}/health", timeout=30).json()["pages"] is True


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    assert read_token(file, {TOKEN_VARIABLE: "of-the-environment"}) == "of-the-file"
    assert read_token(None, {TOKEN_VARIABLE: "of-the-environment"}) == "of-the-environment"
    assert read_token(None, {}) is None
    for text in ("", " \n", "two words", "naïve"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"token file .* holds no token"):
            read_token(file, {})
        with pytest.raises(UserError, match=f"{TOKEN_VARIABLE} holds no token"):
            read_token(None, {TOKEN_VARIABLE: text})
    with pytest.raises(UserError, match="cannot be read"):
        read_token(tmp_path / "missing", {})


SLOW = """
import sys, time
from rlsys.search.server.contract import ServerLimits
from rlsys.search.server.command import Parts, serve_parts

class Slow:
    parallel = 1
    def prepare(self, queries): return list(queries)
    def find(self, queries, topk):
        print("finding", flush=True)
        time.sleep(float(queries[0]))
        return [[] for _ in queries]
    def describe(self): return {}
    def close(self): print("closed", flush=True)

serve_parts(lambda: Parts(Slow()), name="slow", host=sys.argv[1], port=int(sys.argv[2]), limits=ServerLimits(max_batch=1))
"""


def start_slow(host: str, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, host, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}/health"
    assert wait_until(lambda: answers(url), 60)
    return process


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.ConnectionError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_end_turns_waiting_ones_away_and_closes_the_retriever(number: int) -> None:
    port = free_port()
    process = start_slow("127.0.0.1", port)
    assert process.stdout is not None
    url = f"http://127.0.0.1:{port}/retrieve"
    with ThreadPoolExecutor(2) as pool:
        in_time = pool.submit(requests.post, url, json={"queries": ["1"]}, timeout=30)
        assert process.stdout.readline() == "finding\n"
        # Found after the time that a shutdown gives it.
        too_late = pool.submit(requests.post, url, json={"queries": ["6"]}, timeout=30)
        time.sleep(0.2)
        process.send_signal(number)
        began = time.monotonic()
        assert (in_time.result().status_code, in_time.result().json()) == (200, {"result": [[]]})
        assert too_late.result().status_code == 503
        assert time.monotonic() - began < 6
        assert too_late.result().json()["detail"] == "the server is shutting down"
    output, log = process.communicate(timeout=30)
    assert output.endswith("closed\n")
    assert process.returncode == 0
    assert "Traceback" not in log


def test_a_search_that_hangs_does_not_keep_the_server_alive() -> None:
    port = free_port()
    process = start_slow("127.0.0.1", port)
    assert process.stdout is not None
    with ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{port}/retrieve"
        hung = pool.submit(requests.post, url, json={"queries": ["1000"]}, timeout=30)
        assert process.stdout.readline() == "finding\n"
        process.terminate()
        output, log = process.communicate(timeout=30)
        assert hung.result().status_code == 503
    assert (process.returncode, output) == (1, "closed\n")
    assert "ended by force" in log


def test_a_body_that_is_still_on_its_way_when_the_server_ends_is_turned_away() -> None:
    port = free_port()
    process = start_slow("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sender:
        sender.sendall(b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert wait_until(lambda: requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok, 20)
        process.terminate()
        assert b" 503 " in sender.recv(1000).partition(b"\r\n")[0]
    assert "Traceback" not in process.communicate(timeout=30)[1]


@pytest.mark.parametrize("limit", ["--max-batch=0", "--max-pending=-1", "--request-timeout-s=nan"])
def test_a_limit_that_bounds_nothing_is_refused(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_index(["somewhere", limit]) == 2
    name = limit.split("=")[0].removeprefix("--").replace("-", "_")
    assert capsys.readouterr().err.startswith(f"{name} ")


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_open_address_without_a_token_is_warned_of(host: str, warned: bool) -> None:
    process = start_slow(host, free_port())
    process.terminate()
    log = process.communicate(timeout=30)[1]
    assert ("can be reached from other machines" in log) == warned
