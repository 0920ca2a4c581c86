"""Tests of `rlsys watch` as a process: events of a running run, and other machines."""

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.report.watch.watching import watching
from tests.support.growing_run import add_step, write_run, write_status

TIMEOUT_S = 300


def get(address: str, path: str, **headers: str) -> requests.Response:
    return requests.get(f"{address}/{path}", headers=headers, timeout=TIMEOUT_S)


def events(address: str) -> Iterator[tuple[str, Any]]:
    """Yield (event, data) as they arrive."""
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


def test_events_report_changes_from_before_the_first_step_to_the_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with watching(folder) as (address, process):
        assert get(address, "data.json").json()["runs"][0]["steps"] == []
        coming = events(address)
        write_status(folder, step=0)
        event, status = next(coming)
        assert (event, status["step"]) == ("status", 0)
        # The run was unknown before its first status.
        assert next(coming) == ("change", {})
        get(address, "data.json")
        add_step(folder, 1)
        assert next(coming) == ("change", {})
        assert get(address, "data.json").json()["runs"][0]["steps"] == [1]
        write_status(folder, ended="failed: no disk")
        event, status = next(coming)
        assert (event, status["ended"]) == ("status", "failed: no disk")
        assert next(coming) == ("change", {})
        # An open stream must not keep the server from ending.
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        assert list(coming) == []
        assert process.stderr
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_other_machines_are_admitted_only_on_request_with_a_warning(tmp_path: Path) -> None:
    with watching(write_run(tmp_path / "run"), "--host", "0.0.0.0") as (address, process):
        assert process.stderr
        assert "password" in process.stderr.readline()
        assert socket.gethostname() in address
        local = f"http://127.0.0.1:{address.rpartition(':')[2]}"
        assert [get(local, "metrics", **head).status_code for head in ({}, {"Host": "evil.example"})] == [200, 421]
