"""Tests of the judge's endpoint: limits and retries under a virtual clock, hostile answers, a real connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.errors import Code, RunError
from rlsys.orchestrator.rewards.judge import ChatEndpoint
from tests.orchestrator.rewards.chat import Chat, completion, settings, status
from tests.support.refusals import refused
from tests.support.serving import served


def ask(chat: Chat, **changes: object) -> str:
    """Ask the judge one question in virtual time; return the reply."""

    async def work() -> str:
        endpoint = ChatEndpoint(settings(**changes), chat.transport)
        try:
            return await endpoint.ask("Right?")
        finally:
            await endpoint.close()

    return run_virtually(work())


@pytest.mark.parametrize(("value", "code"), [(" ", "missing"), ("a\nb", "malformed"), ("schlüssel", "malformed")])
def test_api_key_that_cannot_be_sent_is_refused(value: str, code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", value)
    with refused(code, "reward.judge.token_env"):
        ChatEndpoint(settings(token_env="JUDGE_KEY"))


@pytest.mark.parametrize(
    "fault",
    [
        status(503),
        httpx.ReadError("reset"),
        httpx.Response(200, json={"choices": []}),
        httpx.Response(200, content=b"[" * 100_000),
        httpx.Response(200, headers={"Content-Encoding": "deflate"}, stream=httpx.ByteStream(b"?")),
        completion(7),
    ],
)
def test_transient_fault_is_retried(fault: httpx.Response | Exception) -> None:
    chat = Chat([fault, fault, "yes"])
    assert ask(chat, retries=2) == "yes"
    first, second, third = chat.asked_at
    assert 1.0 <= second - first <= 1.5
    assert 2.0 <= third - second <= 2.5, "pauses grow"


def test_retry_after_is_obeyed_up_to_a_minute() -> None:
    chat = Chat([status(429, **{"Retry-After": "7"}), status(429, **{"Retry-After": "86400"}), "yes"])
    assert ask(chat) == "yes"
    first, second, third = chat.asked_at
    assert (second - first, third - second) == (7.0, 60.0)


def test_endpoint_that_hangs_ends_the_run_in_time() -> None:
    chat = Chat(takes_s=1e9)

    async def work() -> float:
        endpoint = ChatEndpoint(settings(timeout_s=30.0, retries=1), chat.transport)
        with pytest.raises(RunError):
            await endpoint.ask("Right?")
        return now()

    assert 61.0 <= run_virtually(work()) <= 61.5
    assert chat.cancelled == 2, "its requests are cancelled"


@pytest.mark.parametrize("code", [401, 302])
def test_refused_request_is_not_retried(code: int) -> None:
    chat = Chat([status(code, "no\nsuch model " + "x" * 9000)])
    with pytest.raises(RunError, match=str(code)) as error:
        ask(chat)
    assert len(chat.requests) == 1
    assert len(str(error.value)) < 400


def test_no_more_of_an_answer_is_read_than_the_limit() -> None:
    taken = 0

    class Large(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal taken
            for taken in range(1, 101):  # noqa: B007
                yield bytes(1 << 20)

    with pytest.raises(RunError) as error:
        ask(Chat([httpx.Response(200, stream=Large())]), retries=0)
    assert taken <= 5
    assert len(str(error.value)) < 600


def test_no_minute_has_more_requests_than_allowed() -> None:
    chat = Chat(["yes"])

    async def work() -> None:
        endpoint = ChatEndpoint(settings(requests_per_minute=30, max_concurrent=1000), chat.transport)
        await asyncio.gather(*(endpoint.ask("Right?") for _ in range(100)))
        await asyncio.sleep(500.0)
        await asyncio.gather(*(endpoint.ask("Right?") for _ in range(40)))

    run_virtually(work())
    times = chat.asked_at
    assert len(times) == 140
    for time in times:
        assert sum(time <= other < time + 60 - 1e-6 for other in times) <= 30
    assert times[99] == pytest.approx(99 * 2.0), "as fast as the limit allows"
    assert times[139] - times[100] == pytest.approx(39 * 2.0), "idle time is not made up for"


def test_requests_in_flight_are_limited() -> None:
    chat = Chat(takes_s=1.0)

    async def work() -> float:
        endpoint = ChatEndpoint(settings(max_concurrent=4), chat.transport)
        await asyncio.gather(*(endpoint.ask("Right?") for _ in range(10)))
        return now()

    assert run_virtually(work()) == pytest.approx(3.0)
    assert chat.most_at_once == 4


async def test_request_on_a_real_connection_has_the_key_and_no_proxy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with served(lambda _: {"choices": [{"message": {"content": "Yes."}}]}) as server:
        endpoint = ChatEndpoint(settings(url=f"{server.url}/v1", token_env="JUDGE_KEY"))
        with caplog.at_level(logging.DEBUG):
            assert await endpoint.ask("Ségou?") == "Yes."
        await endpoint.close()
    messages = [{"role": "user", "content": "Ségou?"}]
    sent = {"model": "grader", "messages": messages, "temperature": 0}
    ((path, body, headers),) = server.seen
    assert (path, body) == ("/v1/chat/completions", sent)
    assert (headers["Authorization"], headers["Accept-Encoding"]) == ("Bearer secret-key", "identity")
    assert "secret-key" not in caplog.text
