"""Tests of the chat's web server: streamed events, refused requests, and clients that leave."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rlsys.apps.chat import web
from rlsys.apps.chat.web import create_app
from rlsys.errors import UserError
from rlsys.rollout.agent.recorder import Generation
from tests.support.chat import ANSWERS, SEARCHES, FakeSearch, Script, codec, opened, page_of
from tests.support.waiting import let_tasks_run


@pytest.fixture
def url() -> Iterator[str]:
    with page_of(Script(codec(), (SEARCHES, ANSWERS)), FakeSearch()) as url:
        yield url


def ask(url: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/ask", timeout=600, headers={"content-type": "application/json"} | (headers or {}), **body)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(message.removeprefix("data: ")) for message in answer.text.split("\n\n") if message]


def test_a_question_is_answered_event_by_event(url: str) -> None:
    answer = ask(url, json={"question": "Who?"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    kinds = [event["event"] for event in events if event["event"] != "text"]
    assert kinds == ["asked", "acted", "found", "observed", "acted", "ended"]
    assert events[-1]["answer"] == "Paris"
    again = events_of(ask(url, json={"question": "And now?", "temperature": 0.5}))
    assert again[-1]["event"] == "ended"


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"{", 422, "JSON"),
        (b'{"question": "x", "more": 1}', 422, "more"),
        (b'{"question": "%s"}' % (b"x" * (1 << 16)), 413, "bytes"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(url: str, body: bytes, status: int, named: str) -> None:
    answer = ask(url, content=body)
    assert answer.status_code == status
    assert named in answer.json()["detail"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"origin": "http://["}, 403),
        ({"host": "localhost"}, 200),
        ({"host": "192.168.1.7:8801", "origin": "http://192.168.1.7:8801"}, 200),
    ],
)
def test_only_the_page_itself_may_ask(url: str, headers: dict[str, str], status: int) -> None:
    assert ask(url, headers, content=b'{"question": "x"}').status_code == status


@pytest.mark.parametrize(
    ("problem", "code", "named"),
    [
        (UserError("The tool is broken.", code="user_code", key="task.tools"), "user_code", "The tool is broken."),
        (KeyError("x"), None, "KeyError"),
    ],
)
def test_any_error_ends_the_answer_with_its_reason(problem: Exception, code: str | None, named: str) -> None:
    class Broken(Script):
        async def generate(self, *_: object) -> Generation:  # type: ignore[override]
            raise problem

    with page_of(Broken(codec(), ()), FakeSearch()) as url:
        last = events_of(ask(url, json={"question": "Who?"}))[-1]
    assert (last["event"], last["code"]) == ("failed", code)
    assert named in last["reason"]


async def test_the_episode_ends_when_the_client_leaves_during_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client leaves while the server sends an event; no garbage collector closes the source of events."""
    stream, held = web._stream, list[Any]()
    monkeypatch.setattr(web, "_stream", lambda *given: held.append(stream(*given)) or held[-1])
    script = Script(codec(), (SEARCHES, ANSWERS), halt_after=8)
    app = create_app(opened(script, FakeSearch()), frozenset())
    sending, left = asyncio.Event(), asyncio.Event()
    requests = iter([{"type": "http.request", "body": b'{"question": "Who?"}', "more_body": False}])

    async def receive() -> Any:
        if (request := next(requests, None)) is not None:
            return request
        await sending.wait()
        await script.halted.wait()  # Further events are waiting by now.
        for _ in range(100):
            await asyncio.sleep(0)
        left.set()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sending.set()
            await left.wait()
            await let_tasks_run()

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/ask", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_the_page_runs_no_script_but_its_own(url: str) -> None:
    policy = httpx.get(url, timeout=600).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
