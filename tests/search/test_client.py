"""The client over real sockets: replicas that are killed, come back, hang, or answer what they should not."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlsys.errors import Code
from rlsys.search.cassette import Cassette, CassetteTool
from rlsys.search.client import SearchClient
from rlsys.search.retrieval import Failure, SearchResult
from rlsys.search.server.asgi import create_app
from tests.support.ports import free_port
from tests.support.refusals import refused
from tests.support.serving import serving

from .gated import Gated
from .gated_server import GatedServer
from .scripted import RECORD, answer

CALLERS = 8
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def right(query: str, result: SearchResult) -> bool:
    """Whether the passages are those of the server's retriever."""
    return [passage.id for passage in result.passages] == [f"{query}/{rank}" for rank in range(3)]


class Front:
    """Counts the searches that reach an application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.posts = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.posts += scope.get("path") == "/retrieve"
        await self._app(scope, receive, send)


@pytest.mark.parametrize(("max_coalesced", "posts"), [(64, 4), (1, 200)])
async def test_searches_of_one_moment_share_requests_and_blank_ones_are_not_sent(
    max_coalesced: int, posts: int
) -> None:
    front = Front(create_app(Gated()))
    with serving(front) as url:
        async with SearchClient(url, max_coalesced=max_coalesced) as client:
            blank, *results = await asyncio.gather(
                client.search(" \n"), *(client.search(f"country {row % 9}") for row in range(200))
            )
    assert front.posts == posts
    assert blank.failure is Failure.blank
    assert all(right(f"country {row % 9}", result) for row, result in enumerate(results))


async def test_a_server_is_killed_under_load_and_comes_back(tmp_path: Path) -> None:
    """One client has only the server that is killed, one has a second server: neither loses a search."""
    port = free_port()
    first = GatedServer(tmp_path / "first.log", port=port)
    with serving(create_app(Gated())) as other:
        try:
            await asyncio.to_thread(first.wait_healthy, 120)
            async with (
                SearchClient(first.url, retries=1000, max_coalesced=4) as alone,
                SearchClient([first.url, other], retries=3, max_coalesced=4) as both,
            ):
                stop = asyncio.Event()
                loads = [asyncio.create_task(load(client, stop)) for client in (alone, both)]
                await answered(alone, 100)
                await answered(both, 100)
                os.kill(first.pid, signal.SIGKILL)
                waiting, before = alone.counts.searches, both.counts.searches
                first.close()
                with GatedServer(tmp_path / "second.log", port=port):
                    await answered(both, before + 200)
                    await answered(alone, waiting + 200)
                    stop.set()
                    results = [result for one in await asyncio.gather(*loads) for result in one]
        finally:
            first.close()
    assert len(results) == alone.counts.searches + both.counts.searches
    assert all(right(query, result) for query, result in results)
    assert alone.counts.retries > 0
    assert alone.counts.failures == both.counts.failures == {}


async def load(client: SearchClient, stop: asyncio.Event) -> list[tuple[str, SearchResult]]:
    """Several callers that ask until `stop`: their queries and answers."""
    got: list[tuple[str, SearchResult]] = []

    async def caller(number: int) -> None:
        row = 0
        while not stop.is_set():
            query, row = f"{number}.{row}", row + 1
            got.append((query, await client.search(query)))
            await asyncio.sleep(0.02)  # leaves the machine to the server that starts

    await asyncio.gather(*map(caller, range(CALLERS)))
    return got


async def answered(client: SearchClient, searches: int) -> None:
    async with asyncio.timeout(120):
        while client.counts.searches < searches:
            await asyncio.sleep(0.01)


# ---- servers that speak, but not well


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """A TCP server that gives each request on it to `handler` once its head has come."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):  # /health, which the contract does not ask for
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                await handler(reader, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def saying(reply: bytes, *, reset: bool = False) -> Handler:
    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        await writer.drain()
        if reset:
            writer.transport.abort()

    return handler


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = answer(["Mali"])
SAYINGS = {
    "garbage": saying(b"\x00\x01 what?\r\n\r\n"),
    "nothing": saying(b""),
    "reset at once": saying(b"", reset=True),
    "reset in the body": saying(HEAD + b"Content-Length: 9999\r\n\r\n" + WHOLE, reset=True),
    "body ends early": saying(HEAD + b"Content-Length: 9999\r\n\r\n" + WHOLE),
    "chunks end early": saying(HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"res\r\n'),
    "no gzip": saying(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"),
    "truncated JSON": saying(HEAD + b"Content-Length: 40\r\n\r\n" + WHOLE[:40]),
    "endless redirection": saying(b"HTTP/1.1 307 Go\r\nLocation: /retrieve\r\nContent-Length: 0\r\n\r\n"),
}


@pytest.mark.parametrize("name", SAYINGS)
async def test_a_bad_replica_costs_nothing_and_alone_it_is_a_typed_failure(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    async with listening(SAYINGS[name]) as bad:
        with serving(create_app(Gated())) as good:
            client = SearchClient([bad, good], retries=0, max_coalesced=1)
            async with CassetteTool(path, RECORD, 1.0, 3, client) as recorder:
                queries = [f"country {row}" for row in range(30)]
                results = await asyncio.gather(*map(recorder.search, queries))
        assert all(map(right, queries, results))
        assert client.counts.failovers > 0
        assert Cassette.read(path).answers == dict(zip(queries, results, strict=True))
        async with SearchClient(bad, retries=0) as client:
            result = await client.search("Mali")
    assert result.failure in (Failure.unavailable, Failure.broken)
    assert bad in result.error
    assert len(result.error.splitlines()) == 1


async def test_a_silent_server_costs_the_time_out_and_close_ends_searches_in_flight() -> None:
    async def wait(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        asked.set()
        await asyncio.Event().wait()

    asked = asyncio.Event()
    async with listening(wait) as silent:
        async with SearchClient(silent, retries=0, timeout_s=0.2) as client:
            assert (await client.search("Mali")).failure is Failure.unavailable
        asked.clear()
        client = SearchClient(silent, timeout_s=3600)
        flying = asyncio.create_task(client.search("Mali"))
        await asked.wait()
        await client.close()
        for result in (await flying, await client.search("Mali")):
            assert result.failure is Failure.closed


class Gate:
    """An application that holds its searches, and sees its callers hang up."""

    def __init__(self) -> None:
        self.left = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] != "/retrieve":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


async def test_a_held_search_is_answered_by_another_replica_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate never opens: without the second request the search would not end."""
    gate, lots = Gate(), Random(0)
    monkeypatch.setattr(lots, "random", count().__next__)  # Of equals it takes the first.
    with serving(gate) as held, serving(create_app(Gated())) as well:
        async with SearchClient([held, well], retries=0, hedge_after_s=0.05, timeout_s=3600, lots=lots) as client:
            assert right("Mali", await client.search("Mali"))
            assert client.counts.hedges == client.counts.hedges_won == 1
            assert await asyncio.to_thread(gate.left.wait, 60), "the slow request was cancelled"


# ---- settings


@pytest.mark.parametrize(
    ("urls", "code", "key"),
    [
        ("localhost:8000", "malformed", "localhost:8000"),
        (["http://a:1", "ftp://b"], "malformed", "ftp://b"),
        ("http://", "malformed", "http://"),
        ("http://a:99999", "malformed", "http://a:99999"),
        ("http://name:word@a", "malformed", "http://name:word@a"),
        ("http://[::1", "malformed", "http://[::1"),
        ([], "missing", "search.url"),
        (["http://a:1", "http://a:1/"], "conflict", "http://a:1"),
    ],
)
def test_wrong_urls_are_refused(urls: str | list[str], code: Code, key: str) -> None:
    with refused(code, key):
        SearchClient(urls)


def test_hedging_that_cannot_be_and_tokens_that_http_cannot_carry_are_refused() -> None:
    for urls, after_s in ((["http://a"], 1.0), (["http://a", "http://b"], 30.0), (["http://a", "http://b"], 0.0)):
        with refused("conflict", "search.hedge_after_s"):
            SearchClient(urls, hedge_after_s=after_s, timeout_s=30.0)
    for token in ("", " token", "new\nline", "tökén"):
        with refused("malformed", "token"):
            SearchClient("http://127.0.0.1:8000", token=token)
