"""What a search server sends is bounded: its answer, its passages, what it says about a failure, where it leads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest

from rlsys.search.client import SearchClient
from rlsys.search.retrieval import Failure
from rlsys.search.wire import Fault, HttpWire, ReplicaVerdict, Reply, passages_of
from tests.search.conftest import serving
from tests.support.hostile import answer_of_child, hostile_server
from tests.support.ports import free_port

SEARCHES = """
import sys
from rlsys.search.client import SearchClient

async def main():
    seen, before = {}, peak_mib()
    for kind in sys.argv[2:]:
        timeout_s = 0.5 if kind == "drip" else 60.0
        async with SearchClient(f"{sys.argv[1]}/{kind}", retries=0, timeout_s=timeout_s) as client:
            result = await client.search("Mali")
            seen[kind] = [result.failure, len(result.error), result.error.count("\\n"), client.counts.requests]
    print(json.dumps([seen, peak_mib() - before]))

asyncio.run(main())
"""


class Told:
    """An application that notes its requests and answers all by `status`, `headers` and `body`."""

    def __init__(self, body: bytes = b"", status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._body = body
        self._status = status
        self._headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.asked: list[dict[str, str]] = []

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.asked.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await send({"type": "http.response.start", "status": self._status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})


def found(*contents: str) -> bytes:
    hits = [{"document": {"id": str(row), "contents": text}, "score": 1.0} for row, text in enumerate(contents)]
    return orjson.dumps({"result": [hits]})


def test_a_hostile_answer_costs_a_search_and_little_memory() -> None:
    kinds = ("bomb", "body", "failure", "line", "drip", "deep")
    with hostile_server() as hostile:
        seen, grown_mib = answer_of_child(SEARCHES, hostile.url, *kinds)
    assert {kind: failure for kind, (failure, *_) in seen.items()} == {
        "bomb": Failure.broken,
        "body": Failure.broken,
        "failure": Failure.broken,
        "line": Failure.unavailable,
        "drip": Failure.unavailable,
        "deep": Failure.broken,
    }
    for _, chars, lines, requests in seen.values():
        assert 0 < chars < 500
        assert (lines, requests) == (0, 1)
    assert grown_mib < 100


@pytest.mark.parametrize("method", ["get", "post"])
async def test_an_answer_that_leads_elsewhere_is_not_followed(method: str) -> None:
    elsewhere = Told(found("from elsewhere"))
    with serving(elsewhere, free_port()) as there:
        for status in (301, 302, 303, 307, 308):
            with serving(Told(status=status, headers={"Location": there}), free_port()) as here:
                wire = HttpWire("secret")
                reply = await (wire.get(here) if method == "get" else wire.post(here, b"{}"))
                await wire.close()
                assert reply.status == status
    assert elsewhere.asked == []


async def test_no_compression_is_asked_for() -> None:
    told = Told(found("one"))
    with serving(told, free_port()) as url:
        async with SearchClient(url) as client:
            assert (await client.search("Mali")).failure is None
    assert [headers["accept-encoding"] for headers in told.asked] == ["identity"]


async def test_a_busy_server_that_says_too_much_is_still_busy() -> None:
    with serving(Told(b"x" * 100_000, 503, {"Retry-After": "7"}), free_port()) as url:
        wire = HttpWire()
        reply = await wire.post(url, b"{}")
        await wire.close()
    assert (reply.body, reply.refused != "") == (b"", True)
    with pytest.raises(Fault) as fault:
        passages_of(reply, 1, 3)
    assert (fault.value.verdict, fault.value.retry_after_s) == (ReplicaVerdict.busy, 7.0)


async def test_searches_whose_answer_is_too_large_together_are_asked_apart() -> None:
    text = "x" * 60_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked = json.loads((await receive())["body"])
            hit = {"document": {"id": "1", "contents": text}, "score": 1.0}
            body = orjson.dumps({"result": [[hit] * 50 for _ in asked["queries"]]})
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})

    with serving(app, free_port()) as url:
        async with SearchClient(url, topk=50, coalesce_ms=200) as client:
            results = await asyncio.gather(*(client.search(f"country {row}") for row in range(4)))
    assert [len(result.passages) for result in results] == [50] * 4


def test_passages_have_a_length_and_a_number() -> None:
    reply = Reply(200, found("short", "y" * 65_536, "z" * 1_000_000, "one more"))
    (passages,) = passages_of(reply, 1, 3)
    assert [len(passage.contents) for passage in passages] == [5, 65_536, 65_536]


@pytest.mark.parametrize(
    "body",
    [
        b'{"result": [[{"document": {"id": ' + b"[" * 1000 + b"]" * 1000 + b', "contents": ""}, "score": 1}]]}',
        b'{"result": [[{"document": {"id": 1, "contents": ""}, "score": "' + b"x" * 1_000_000 + b'"}]]}',
    ],
)
def test_nonsense_is_a_short_sentence(body: bytes) -> None:
    with pytest.raises(Fault) as fault:
        passages_of(Reply(200, body), 1, 3)
    assert fault.value.failure is Failure.broken
    assert len(str(fault.value)) < 400


def test_a_deep_sentence_about_a_failure_is_none() -> None:
    with pytest.raises(Fault) as fault:
        passages_of(Reply(500, b'{"detail": ' + b"[" * 1000 + b"]" * 1000 + b"}"), 1, 3)
    assert fault.value.failure is Failure.broken
    assert len(str(fault.value)) < 400
