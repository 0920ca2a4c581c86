"""Tests of requests to the driver of a run: both ends in one process, and files that others have written or damaged."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.errors import RunError, UserError
from rlsys.observe import requests
from rlsys.observe.requests import REQUESTS, Inbox, Request, ask
from tests.support.refusals import refused
from tests.support.request_driver import driver


def active() -> None:
    """Stand for the liveness of a run that is active."""


def test_a_request_is_answered_with_its_waits_and_its_end(tmp_path: Path) -> None:
    inbox, said, taken = Inbox(tmp_path), [], []
    heard = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        heard.set()

    def carry_out(request: Request) -> None:
        taken.append((request.action, request.engine, request.limit_s))
        inbox.say(request, "waits for 3 groups")
        assert heard.wait(600)
        inbox.end(request, "engine 1 left", [{"engine": 0}])

    with driver(inbox, carry_out):
        rows = ask(tmp_path, Request("leave", 1, 2.5), say, active)
    assert (said, rows) == (["waits for 3 groups", "engine 1 left"], [{"engine": 0}])
    assert taken == [("leave", 1, 2.5)]
    assert list((tmp_path / REQUESTS).iterdir()) == []


@pytest.mark.parametrize("error", [UserError("engine 9 is none.", code="unknown", key="ENGINE"), RunError("it died.")])
def test_a_refusal_is_raised_in_the_asking_process(error: UserError | RunError, tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    with driver(inbox, lambda request: inbox.refuse(request.name, error)), pytest.raises(type(error)) as raised:
        ask(tmp_path, Request("join"), lambda _: None, active)
    assert str(raised.value) == str(error)
    assert getattr(raised.value, "code", None) == getattr(error, "code", None)
    assert getattr(raised.value, "key", None) == getattr(error, "key", None)


def test_a_run_that_ends_refuses_what_it_has_not_done(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    with driver(inbox, lambda _: inbox.close()), pytest.raises(RunError, match="ended"):
        ask(tmp_path, Request("join"), lambda _: None, active)


def test_requests_come_in_their_order_until_they_end(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    for name in ("2-b", "1-a", "3-c"):
        (tmp_path / REQUESTS / f"{name}.json").write_text(
            json.dumps({"action": "join", "rlsys": Request("join").rlsys})
        )
    assert [request.name for request in inbox.requests()] == ["1-a", "2-b", "3-c"]
    inbox.end(inbox.requests()[1], "done")
    assert [request.name for request in inbox.requests()] == ["1-a", "3-c"], "as for a driver that goes back"
    assert [request.name for request in Inbox(tmp_path).requests()] == [], "a new process carries out no old request"


def test_a_process_that_is_interrupted_withdraws_its_request(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    taken: list[Request] = []

    def carry_out(request: Request) -> None:
        taken.append(request)
        inbox.say(request, "waits")

    with driver(inbox, carry_out), pytest.raises(KeyboardInterrupt):
        ask(tmp_path, Request("leave"), interrupt, active)
    inbox.end(taken[0], "done")
    assert list((tmp_path / REQUESTS).iterdir()) == []


def test_a_run_that_does_not_answer_or_is_over_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("unsupported", tmp_path):
        ask(tmp_path, Request("join"), lambda _: None, active)
    Inbox(tmp_path)
    with refused("conflict", tmp_path):
        ask(tmp_path, Request("join"), lambda _: None, lambda: "The run has finished.")
    phases = iter([None, None, "its process was killed"])
    with pytest.raises(RunError, match="killed"):
        ask(tmp_path, Request("join"), lambda _: None, lambda: next(phases))
    monkeypatch.setattr(requests, "TAKE_TIMEOUT_S", 0.0)
    with pytest.raises(RunError, match="withdrawn"):
        ask(tmp_path, Request("join"), lambda _: None, active)
    assert list((tmp_path / REQUESTS).iterdir()) == []


def test_nobody_but_the_user_of_the_run_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / REQUESTS).mkdir(mode=0o777)
    Inbox(tmp_path)
    assert (tmp_path / REQUESTS).stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / REQUESTS).stat().st_uid + 1)
    with refused("denied", tmp_path):
        ask(tmp_path, Request("join"), lambda _: None, active)


def test_a_request_of_another_version_is_refused(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    with driver(inbox, lambda _: None), refused("mismatch", "rlsys"):
        ask(tmp_path, Request("join", rlsys="0.0.0"), lambda _: None, active)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text())


@given(st.binary() | st.fixed_dictionaries({}, optional=dict.fromkeys(Request.__slots__, VALUES)).map(json.dumps))
def test_any_file_is_a_valid_request_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes | str) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    inbox = Inbox(run_dir)
    file = run_dir / REQUESTS / "1-a.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = inbox.requests()
    answer = file.with_suffix(".answer")
    assert len(found) == file.exists() == (not answer.exists())
    for request in found:
        assert request.action in ("join", "leave", "list")
        assert request.limit_s is None or request.limit_s >= 0
    if not found:
        assert json.loads(answer.read_text())["code"] in ("malformed", "mismatch")


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"text": 3}', '{"text": "x", "code": "nonsense"}', '{"a": 1}'])
def test_a_damaged_answer_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "1.answer").write_text(content)
    assert requests._read_answer(tmp_path / "1.answer") is None
