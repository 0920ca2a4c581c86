"""The routes of the page: events as they come, what is refused, and who leaves."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlsys.apps.chat import web
from rlsys.errors import RunError, UserError
from rlsys.rollout.agent.episode import Generation
from tests.apps.chat.pages import page_of
from tests.apps.chat.scripted import ANSWERS, SEARCHES, Script, Shelf, codec


@pytest.fixture
def url() -> Iterator[str]:
    with page_of(Script(codec(), (SEARCHES, ANSWERS)), Shelf()) as url:
        yield url


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(message.removeprefix("data: ")) for message in text.split("\n\n") if message]


def test_a_question_is_answered_event_by_event(url: str) -> None:
    answer = httpx.post(f"{url}/ask", json={"question": "Who?"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    kinds = [event["event"] for event in events if event["event"] != "text"]
    assert kinds == ["asked", "acted", "found", "observed", "acted", "ended"]
    assert events[-1]["answer"] == "Paris"
    again = events_of(httpx.post(f"{url}/ask", json={"question": "And now?", "temperature": 0.5}).text)
    assert [event["event"] for event in again][-1] == "ended"


def test_an_empty_question_is_one_sentence(url: str) -> None:
    (event,) = events_of(httpx.post(f"{url}/ask", json={"question": "  "}).text)
    assert event == {"event": "failed", "reason": "The question is empty: write one."}


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{", 422, "Invalid JSON"),
        (b"[]", 422, "The body: "),
        (b"{}", 422, "question: "),
        (b'{"question": 3}', 422, "question: "),
        (b'{"question": "x", "temperature": -1}', 422, "temperature: "),
        (b'{"question": "x", "more": 1}', 422, "more: "),
        (b'{"question": "%s"}' % (b"x" * (1 << 16)), 413, "ask a shorter question"),
    ],
)
def test_a_bad_request_is_one_sentence(url: str, body: bytes, status: int, sentence: str) -> None:
    answer = httpx.post(f"{url}/ask", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert sentence in answer.json()["detail"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:80"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"host": "["}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://["}, 403),
        ({"host": "localhost"}, 200),
        ({"host": "127.0.0.2:8801"}, 200),
        ({"host": "[::1]:8801"}, 200),
        ({"host": "192.168.1.7:8801"}, 200),
        ({"host": "192.168.1.7:8801", "origin": "http://192.168.1.7:8801"}, 200),
        ({"host": socket.gethostname()}, 200),
    ],
)
def test_only_the_page_itself_may_ask(url: str, headers: dict[str, str], status: int) -> None:
    sent = {"content-type": "application/json"} | headers
    assert httpx.post(f"{url}/ask", content=b'{"question": "x"}', headers=sent).status_code == status


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (RunError("The engine has died."), "The engine has died."),
        (UserError("The tool is broken."), "The tool is broken."),
        (KeyError("x"), "It has failed (KeyError): see the terminal of the server, and ask again."),
    ],
)
def test_whatever_breaks_ends_with_a_sentence(problem: Exception, reason: str) -> None:
    class Broken(Script):
        async def generate(self, *_: object) -> Generation:  # type: ignore[override]
            raise problem

    with page_of(Broken(codec(), ()), Shelf()) as url:
        events = events_of(httpx.post(f"{url}/ask", json={"question": "Who?"}).text)
    assert events[-1] == {"event": "failed", "reason": reason}


def test_every_answer_forbids_what_the_page_does_not_need(url: str) -> None:
    for path in ("/", "/chat.js", "/chat.css", "/about", "/nothing"):
        policy = httpx.get(f"{url}{path}").headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy


def _until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, f"not within {within_s:g} s"
        time.sleep(0.01)


def test_who_leaves_ends_the_episode() -> None:
    script = Script(codec(), (SEARCHES, ANSWERS), halt_after=8)
    with page_of(script, Shelf()) as url:
        with httpx.stream("POST", f"{url}/ask", json={"question": "Who?"}) as answer:
            parts = answer.iter_text()  # Its end is the end of the connection.
            first = next(parts)
            _until(script.halted.is_set)
        assert "asked" in first
        _until(lambda: script.cancelled == 1)


def test_the_page_sets_text_and_never_html() -> None:
    script = (Path(web.__file__).parent / "static" / "chat.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script
