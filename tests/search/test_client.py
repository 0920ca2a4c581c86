"""The client over real sockets, against the real application and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy as np
import pytest

from rlsys.errors import RunError, UserError
from rlsys.search.client import SearchClient, SearchResult
from rlsys.search.index.dense import DenseRetriever
from rlsys.search.launch import SearchServer
from rlsys.search.server.app import create_app

from .conftest import free_port, serving


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
    retriever: DenseRetriever, max_coalesced: int, posts: int
) -> None:
    front = Front(create_app(retriever))
    with serving(front, free_port()) as url:
        async with SearchClient(url, max_coalesced=max_coalesced) as client:
            results = await asyncio.gather(*(client.search(f"country {row % 9}") for row in range(200)))
    assert front.posts == posts
    assert all(len(result.passages) == 3 for result in results)
    found = [[passage.id for passage in result.passages] for result in results]
    assert found[:9] == found[9:18], "the same query, in whatever company, finds the same passages"


async def test_a_blank_query_is_an_error_that_is_not_sent(retriever: DenseRetriever) -> None:
    front = Front(create_app(retriever))
    with serving(front, free_port()) as url:
        async with SearchClient(url) as client:
            assert await client.search(" \n") == SearchResult(error="the query is empty")
    assert front.posts == 0


async def test_a_refused_query_does_not_cost_the_others_theirs(server: SearchServer) -> None:
    async with SearchClient(server.url) as client:
        good, long, broken = await asyncio.gather(
            client.search("Mali"), client.search("x" * 9000), client.search("half \ud800 a character")
        )
    assert [len(result.passages) for result in (good, long, broken)] == [3, 0, 3]
    assert "status 422: queries.0: 9000 characters are too many" in long.error


async def test_busy_answers_are_retried(retriever: DenseRetriever) -> None:
    front = Front(create_app(retriever), [(503, b"{}"), (429, b"slow down")])
    with serving(front, free_port()) as url:
        async with SearchClient(url, retries=2) as client:
            result = await client.search("Mali")
    assert len(result.passages) == 3
    assert front.posts == 3


@pytest.mark.parametrize(
    ("reply", "reason", "posts"),
    [
        ((503, b'{"detail": "full"}'), "after 2 tries: status 503: full", 2),
        ((500, b"oops"), "status 500: oops", 1),
        ((404, b'{"detail": "Not Found"}'), "status 404: Not Found", 1),
        ((200, b"<html>"), "does not speak the retrieval contract", 1),
        ((200, b'{"results": []}'), "does not speak the retrieval contract: KeyError", 1),
        ((200, b'{"result": []}'), "0 results for 1 queries", 1),
        ((200, b'{"result": [[{"id": "1", "contents": "no score"}]]}'), "does not speak", 1),
    ],
)
async def test_a_server_that_misbehaves_gives_a_typed_error(
    retriever: DenseRetriever, reply: tuple[int, bytes], reason: str, posts: int
) -> None:
    front = Front(create_app(retriever), [reply] * 5)
    with serving(front, free_port()) as url:
        async with SearchClient(url, retries=1) as client:
            result = await client.search("Mali")
    assert result.passages == ()
    assert reason in result.error
    assert front.posts == posts


async def test_a_server_that_starts_late_dies_and_comes_back(retriever: DenseRetriever) -> None:
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
        SearchClient(
            f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", retries=0, timeout_s=0.2
        ) as client,
    ):
        start = time.monotonic()
        result = await client.search("Mali")
        assert "ReadTimeout" in result.error
        assert time.monotonic() - start < 2


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
        closed = SearchResult(error="the search client is closed")
        assert await asyncio.wait_for(flying, 1) == closed
        assert await client.search("Mali") == closed


async def test_health_and_a_wrong_url(server: SearchServer) -> None:
    async with SearchClient(server.url + "/") as client:
        assert json.loads(json.dumps(await client.health()))["passages"] == 200
    with pytest.raises(UserError, match="'localhost:8000' is not an address"):
        SearchClient("localhost:8000")
