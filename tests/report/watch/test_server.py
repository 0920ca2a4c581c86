"""`rlsys watch` as a process of its own: what it answers, to whom, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from rlsys.report.watch import serve_run
from tests.report.watch.folder import EVIL, add_evaluation, add_step, write_run, write_status
from tests.support.refusals import refused

COMMAND = [sys.executable, "-m", "rlsys.apps.cli.main", "watch"]
TIMEOUT_S = 120


@contextmanager
def watching(run: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server that watches `run`, and its process."""
    command = [*COMMAND, str(run), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        line = process.stderr.readline()
        address = re.search(r"http://\S+", line)
        try:
            assert address, line + process.stderr.read()
            yield address[0], process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("watched") / "run")
    add_step(folder, 1)
    add_evaluation(folder, 0, 0.5)
    write_status(folder)
    return folder


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with watching(run) as (address, _):
        yield address


def get(address: str, path: str, **headers: str) -> requests.Response:
    return requests.get(f"{address}/{path}", headers=headers, timeout=TIMEOUT_S)


def events(address: str) -> Iterator[tuple[str, Any]]:
    """(event, data) as they come."""
    with requests.get(f"{address}/events", stream=True, timeout=TIMEOUT_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        event: dict[str, str] = {}
        for line in answer.iter_lines(chunk_size=1, decode_unicode=True):
            if not line and event:
                yield event["event"], json.loads(event["data"])
                event = {}
            elif line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                event[name] = value


def test_the_page_asks_for_its_data_and_may_ask_nobody_else(address: str) -> None:
    answer = get(address, "")
    assert answer.status_code == 200
    assert "text/html" in answer.headers["content-type"]
    assert "connect-src &#x27;self&#x27;" in answer.text
    assert 'id="model"' not in answer.text
    for name, value in (
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("cache-control", "no-store"),
    ):
        assert answer.headers[name] == value


def test_data_parts_and_figures(address: str) -> None:
    (found,) = get(address, "data.json").json()["runs"]
    assert (found["name"], found["steps"], found["status"]["step"]) == ("run", [1], 1)
    (part,) = get(address, f"trajectories/{found['evaluations'][0]['first_chunk']}").json()
    assert part["answer"] == EVIL
    plain = requests.get(f"{address}/data.json", headers={"Accept-Encoding": "identity"}, timeout=TIMEOUT_S)
    assert "content-encoding" not in plain.headers
    assert plain.json()["runs"] == [found]
    assert get(address, "status.json").json()["states"]["rollout"]["text"] == "generates 3 groups"
    assert 'rlsys_group_at_work{group="rollout"} 1.0' in get(address, "metrics").text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("trajectories/99", 404),
        ("trajectories/x", 422),
        ("config.yaml", 404),
        ("..%2f..%2fetc%2fpasswd", 404),
    ],
)
def test_what_is_not_there(address: str, path: str, status: int) -> None:
    assert get(address, path).status_code == status


@pytest.mark.parametrize("path", ["", "data.json", "events", "metrics", "trajectories/0"])
def test_another_name_is_refused(address: str, path: str) -> None:
    answer = get(address, path, Host="evil.example")
    assert answer.status_code == 421
    assert requests.post(f"{address}/{path}", timeout=TIMEOUT_S).status_code == 405, "and nothing can be sent"


def test_events_tell_what_is_new_from_before_the_first_step_to_the_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with watching(folder) as (address, process):
        assert get(address, "data.json").json()["runs"][0]["steps"] == []
        coming = events(address)
        write_status(folder, step=0)
        event, status = next(coming)
        assert (event, status["step"]) == ("status", 0)
        # The first status also ends that nothing was known of the run.
        assert next(coming) == ("change", {})
        get(address, "data.json")
        add_step(folder, 1)
        assert next(coming) == ("change", {})
        assert get(address, "data.json").json()["runs"][0]["steps"] == [1]
        write_status(folder, ended="failed: no disk")
        event, status = next(coming)
        assert (event, status["ended"]) == ("status", "failed: no disk")
        assert next(coming) == ("change", {})
        assert get(address, "data.json").json()["runs"][0]["status"]["ended"] == "failed: no disk"
        # An open stream does not hold the server up.
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        assert list(coming) == []
        assert process.stderr
        assert process.stderr.read() == ""


def test_a_port_that_is_taken_is_refused(run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refused("in_use"):
            serve_run(run, "127.0.0.1", port, print)


@pytest.mark.slow
def test_other_machines_are_let_in_only_when_asked_for_and_that_is_said(run: Path) -> None:
    with watching(run, "--host", "0.0.0.0") as (address, process):
        assert process.stderr
        assert "nobody is asked for a password" in process.stderr.readline()
        assert socket.gethostname() in address
        local = f"http://127.0.0.1:{address.rpartition(':')[2]}"
        assert get(local, "metrics").status_code == 200
        assert get(local, "metrics", Host="evil.example").status_code == 421
