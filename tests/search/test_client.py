"""The client over real sockets, against the real application and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import numpy as np
import pytest

from rlsys.errors import RunError, UserError
from rlsys.search.client import SearchClient
from rlsys.search.index.dense import VectorRetriever
from rlsys.search.retrieval import Failure, SearchResult
from rlsys.search.server.asgi import create_app
from rlsys.search.server_process import SearchServer
from tests.support.ports import free_port

from .conftest import serving


class Front:
    """Counts the searches that reach an application and answers the first ones by `replies`."""

    def __init__(self, app: Any, replies: list[tuple[int, bytes]] | None = None) -> None:
        self._app = app
        self._replies = replies or []
        self.posts = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/retrieve":
            await self._app(scope, receive, send)
            return
        self.posts += 1
        if not self._replies:
            await self._app(scope, receive, send)
            return
        status, body = self._replies.pop(0)
        headers = [(b"content-length", str(len(body)).encode()), (b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def test_passages_are_those_of_brute_force(
    server: SearchServer, passages: list[dict[str, Any]], queries: list[str], brute_force: tuple[Any, Any]
) -> None:
    scores, order = brute_force
    async with SearchClient(server.url, topk=4) as client:
        results = await asyncio.gather(*map(client.search, queries))
    for row, result in enumerate(results):
        assert result.error == ""
        assert result.passages[0].id == passages[order[row, 0]]["id"]
        assert result.passages[0].contents == passages[order[row, 0]]["contents"]
        found = [passage.score for passage in result.passages]
        np.testing.assert_allclose(found, scores[row, order[row, :4]], atol=1e-5)


@pytest.mark.parametrize(("max_coalesced", "posts"), [(64, 4), (1, 200)])
async def test_searches_of_one_moment_share_requests(
    retriever: VectorRetriever, max_coalesced: int, posts: int
) -> None:
    front = Front(create_app(retriever))
    with serving(front, free_port()) as url:
        async with SearchClient(url, max_coalesced=max_coalesced) as client:
            results = await asyncio.gather(*(client.search(f"country {row % 9}") for row in range(200)))
    assert front.posts == posts
    assert all(len(result.passages) == 3 for result in results)
    found = [[passage.id for passage in result.passages] for result in results]
    assert found[:9] == found[9:18], "the same query, in whatever company, finds the same passages"


async def test_a_blank_query_is_an_error_that_is_not_sent(retriever: VectorRetriever) -> None:
    front = Front(create_app(retriever))
    with serving(front, free_port()) as url:
        async with SearchClient(url) as client:
            assert (await client.search("")).failure is Failure.blank
            assert await client.search(" \n") == SearchResult((), "the query is empty", Failure.blank)
    assert front.posts == 0


async def test_a_refused_query_does_not_cost_the_others_theirs(server: SearchServer) -> None:
    async with SearchClient(server.url) as client:
        good, long, broken = await asyncio.gather(
            client.search("Mali"), client.search("x" * 9000), client.search("half \ud800 a character")
        )
    assert [len(result.passages) for result in (good, long, broken)] == [3, 0, 3]
    assert "status 422: queries.0: 9000 characters are too many" in long.error
    assert long.failure is Failure.rejected
    assert client.counts.failures == {Failure.rejected: 1}
    assert client.counts.searches == 3


async def test_busy_answers_are_retried(retriever: VectorRetriever) -> None:
    front = Front(create_app(retriever), [(503, b"{}"), (429, b"slow down")])
    with serving(front, free_port()) as url:
        async with SearchClient(url, retries=2) as client:
            result = await client.search("Mali")
    assert len(result.passages) == 3
    assert front.posts == 3


@pytest.mark.parametrize(
    ("reply", "failure", "reason", "posts"),
    [
        ((503, b'{"detail": "full"}'), "unavailable", "after 2 tries: status 503: full", 2),
        ((500, b"oops"), "broken", "status 500: oops", 1),
        ((404, b'{"detail": "Not Found"}'), "broken", "status 404: Not Found", 1),
        ((307, b""), "broken", "status 307: ", 1),
        ((401, b'{"detail": "no token"}'), "denied", "another bearer token (status 401: no token)", 1),
        ((400, b'{"detail": ["no JSON"]}'), "rejected", "status 400: ['no JSON']", 1),
        ((500, b"<html>\n<p>two lines"), "broken", "status 500: <html> <p>two lines", 1),
        ((200, b'{"result": [{}]}'), "broken", "a result is dict, not list", 1),
        ((200, b"<html>"), "broken", "does not speak the retrieval contract", 1),
        ((200, b'{"results": []}'), "broken", "does not speak the retrieval contract: KeyError", 1),
        ((200, b'{"result": []}'), "broken", "0 results for 1 queries", 1),
        ((200, b'{"result": [[{"id": "1", "contents": "no score"}]]}'), "broken", "does not speak", 1),
        (
            (200, b'{"result": [[{"document": {"id": 1, "contents": null}, "score": 1}]]}'),
            "broken",
            "contents are NoneType, not text",
            1,
        ),
    ],
)
async def test_a_server_that_misbehaves_gives_a_typed_error(
    retriever: VectorRetriever, reply: tuple[int, bytes], failure: str, reason: str, posts: int
) -> None:
    front = Front(create_app(retriever), [reply] * 5)
    with serving(front, free_port()) as url:
        async with SearchClient(url, retries=1) as client:
            result = await client.search("Mali")
    assert result.passages == ()
    assert result.failure == failure
    assert reason in result.error
    assert front.posts == posts
    assert client.counts.failures == {result.failure: 1}


async def test_the_token_is_sent_with_searches_and_probes() -> None:
    seen: list[tuple[str, bytes | None]] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.append((scope["path"], dict(scope["headers"]).get(b"authorization")))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b'{"result": [[]]}'})

    with serving(app, free_port()) as url:
        async with SearchClient(url, token="a b&c") as client:
            assert (await client.search("Mali")).error == ""
            await client.health()
        async with SearchClient(url) as client:
            await client.search("Mali")
    assert seen == [("/retrieve", b"Bearer a b&c"), ("/health", b"Bearer a b&c"), ("/retrieve", None)]
    for bad in ("", " token", "new\nline", "tökén"):
        with pytest.raises(UserError, match="the search token is empty or not plain ASCII"):
            SearchClient("http://127.0.0.1:8000", token=bad)


async def test_a_server_that_starts_late_dies_and_comes_back(retriever: VectorRetriever) -> None:
    port = free_port()
    async with SearchClient(f"http://127.0.0.1:{port}", retries=10) as client:
        early = asyncio.create_task(client.search("Mali"))
        await asyncio.sleep(0.5)
        assert not early.done()
        for _ in range(2):
            with serving(create_app(retriever), port):
                assert len((await client.search("Mali")).passages) == 3
                assert len((await early).passages) == 3
    async with SearchClient(f"http://127.0.0.1:{port}", retries=1) as client:
        result = await client.search("Mali")
        assert "after 2 tries" in result.error
        with pytest.raises(RunError, match="is not healthy"):
            await client.health()


async def test_a_silent_server_costs_the_time_out_and_no_more() -> None:
    silent = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), "127.0.0.1", 0)
    async with (
        silent,
        SearchClient(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", retries=0, timeout_s=0.2) as client,
    ):
        start = time.monotonic()
        result = await client.search("Mali")
        assert result.error.endswith("after 1 tries: no answer within 0.2 s")
        assert result.failure is Failure.unavailable
        assert time.monotonic() - start < 20


async def test_cancelling_one_search_leaves_the_others(server: SearchServer) -> None:
    async with SearchClient(server.url, coalesce_ms=20) as client:
        tasks = [asyncio.create_task(client.search(f"cancel {row}")) for row in range(8)]
        await asyncio.sleep(0.005)
        tasks[3].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results.pop(3), asyncio.CancelledError)
    assert all(isinstance(result, SearchResult) and len(result.passages) == 3 for result in results)


async def test_close_ends_searches_in_flight_with_an_error() -> None:
    silent = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), "127.0.0.1", 0)
    async with silent:
        client = SearchClient(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}")
        flying = asyncio.create_task(client.search("Mali"))
        await asyncio.sleep(0.05)
        await client.close()
        closed = SearchResult((), "the search client is closed", Failure.closed)
        assert await asyncio.wait_for(flying, 1) == closed
        assert await client.search("Mali") == closed


async def test_the_health_is_what_the_server_says(server: SearchServer) -> None:
    async with SearchClient(server.url + "/") as client:
        assert json.loads(json.dumps(await client.health()))["passages"] == 200


@pytest.mark.parametrize(
    ("urls", "sentence"),
    [
        ("localhost:8000", "'localhost:8000' is not an address"),
        (["http://a:1", "ftp://b"], "'ftp://b' is not an address"),
        ("http://", "'http://' is not an address"),
        ("http://a:99999", "'http://a:99999' is not an address"),
        ("http://name:word@a", "is not an address"),
        ("http://[::1", "is not an address"),
        ([], "there is no search url"),
        (["http://a:1", "http://a:1/"], "'http://a:1' is given twice"),
    ],
)
def test_a_wrong_url_is_one_sentence(urls: str | list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        SearchClient(urls)


@pytest.mark.parametrize(("urls", "after_s"), [(["http://a"], 1.0), (["http://a", "http://b"], 30.0)])
def test_hedging_that_cannot_be_is_refused(urls: list[str], after_s: float) -> None:
    with pytest.raises(UserError, match=f"hedge_after_s={after_s:g} is of no use with {len(urls)} search url"):
        SearchClient(urls, hedge_after_s=after_s, timeout_s=30.0)
