"""Faults over real sockets: servers that are killed, come back, hang, or answer what they should not."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.search.cassette import Cassette, CassetteTool
from rlsys.search.client import SearchClient
from rlsys.search.index.dense import VectorRetriever
from rlsys.search.retrieval import Failure, SearchResult
from rlsys.search.server.asgi import create_app
from rlsys.search.server_process import SearchServer
from tests.support.ports import free_port

from .conftest import serving
from .scripted import RECORD, answer

CALLERS = 8
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def same(result: SearchResult, undisturbed: SearchResult) -> bool:
    """The same passages in the same order; a score may differ in its last digits by what it was batched with."""
    return (
        result.error == undisturbed.error == ""
        and [(one.id, one.contents) for one in result.passages]
        == [(one.id, one.contents) for one in undisturbed.passages]
        and np.allclose([one.score for one in result.passages], [one.score for one in undisturbed.passages], atol=1e-5)
    )


async def test_a_server_is_killed_under_load_and_comes_back(
    server: SearchServer, index_dir: Path, queries: list[str], tmp_path: Path
) -> None:
    """One client has only the server that is killed, one has a second server: neither loses a search."""
    async with SearchClient(server.url) as client:
        undisturbed = await asyncio.gather(*map(client.search, queries))
    port = free_port()
    first = SearchServer(index_dir, tmp_path / "first.log", port=port, threads=1)
    try:
        await asyncio.to_thread(first.wait_healthy, 90)
        async with (
            SearchClient(first.url, retries=50, max_coalesced=4) as alone,
            SearchClient([first.url, server.url], retries=1, max_coalesced=4) as both,
        ):
            stops = [asyncio.Event(), asyncio.Event()]
            clients = zip((alone, both), stops, strict=True)
            loads = [asyncio.create_task(load(client, queries, stop)) for client, stop in clients]
            await answered(alone, 100)
            await answered(both, 100)
            os.kill(first.pid, signal.SIGKILL)
            waiting, before = alone.counts.searches, both.counts.searches
            first.close()
            with SearchServer(index_dir, tmp_path / "second.log", port=port, threads=1) as second:
                await answered(both, before + 200)
                await answered(alone, waiting + 200)
                stops[0].set()
                await loads[0]
                await asked_again(second.url)
                stops[1].set()
                results = [result for one in await asyncio.gather(*loads) for result in one]
    finally:
        first.close()
    assert len(results) == alone.counts.searches + both.counts.searches
    assert all(same(result, undisturbed[row]) for row, result in results)
    assert alone.counts.retries > 0
    assert alone.counts.failures == both.counts.failures == {}


async def load(client: SearchClient, queries: list[str], stop: asyncio.Event) -> list[tuple[int, SearchResult]]:
    """Several callers that ask until `stop`; all they got, each with the row of its query."""
    got: list[tuple[int, SearchResult]] = []

    async def caller(row: int) -> None:
        while not stop.is_set():
            got.append((row, await client.search(queries[row])))
            row = (row + CALLERS) % len(queries)
            await asyncio.sleep(0.02)  # leaves the machine to the server that starts

    await asyncio.gather(*map(caller, range(CALLERS)))
    return got


async def answered(client: SearchClient, searches: int) -> None:
    async with asyncio.timeout(90):
        while client.counts.searches < searches:
            await asyncio.sleep(0.01)


async def asked_again(url: str) -> None:
    """Wait until the server at `url` gets a further search."""
    async with asyncio.timeout(90), SearchClient(url) as other:
        before = (await other.health())["queries"]
        while (await other.health())["queries"] == before:
            await asyncio.sleep(0.05)


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
    "wrong shape": saying(HEAD + b"Content-Length: 16\r\n\r\n" + b'{"result": [{}]}'),
    "endless redirection": saying(b"HTTP/1.1 307 Go\r\nLocation: /retrieve\r\nContent-Length: 0\r\n\r\n"),
}


@pytest.mark.parametrize("name", SAYINGS)
async def test_a_bad_replica_costs_nothing_and_alone_it_is_a_typed_failure(name: str, server: SearchServer) -> None:
    async with listening(SAYINGS[name]) as bad:
        async with SearchClient([bad, server.url], retries=0, max_coalesced=1) as client:
            results = await asyncio.gather(*(client.search(f"country {row}") for row in range(30)))
        assert [len(result.passages) for result in results] == [3] * 30
        assert client.counts.failovers > 0
        async with SearchClient(bad, retries=0) as client:
            result = await asyncio.wait_for(client.search("Mali"), 20)
    assert result.failure in (Failure.unavailable, Failure.broken)
    assert bad in result.error
    assert len(result.error.splitlines()) == 1


async def test_all_servers_dead_is_a_typed_failure() -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    async with SearchClient(urls, retries=1) as client:
        results = await asyncio.wait_for(asyncio.gather(*map(client.search, ["Mali", "Chad"])), 20)
    assert {result.failure for result in results} == {Failure.unavailable}
    assert all(url in result.error for url in urls for result in results)


# ---- hedges


class Gate:
    """An application that holds its searches until it is opened, and sees its callers hang up."""

    def __init__(self) -> None:
        self.asked = 0
        self.left = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] != "/retrieve":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        self.asked += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


async def test_a_held_search_is_answered_by_another_replica_and_given_up(retriever: VectorRetriever) -> None:
    """The gate never opens: without the second request the first searches would not end."""
    gate = Gate()
    with serving(gate, free_port()) as held, serving(create_app(retriever), free_port()) as well:
        async with SearchClient([held, well], retries=0, hedge_after_s=0.05, max_coalesced=1) as client:
            async with asyncio.timeout(60):
                while gate.asked == 0:  # ties are broken by lot
                    assert len((await client.search("Mali")).passages) == 3
            assert client.counts.hedges == client.counts.hedges_won == 1
            assert await asyncio.to_thread(gate.left.wait, 10), "the slow request was cancelled"


# ---- a cassette over several


async def test_a_cassette_records_from_replicas_what_one_server_answers(
    server: SearchServer, queries: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "tape.jsonl"
    async with listening(SAYINGS["truncated JSON"]) as bad:
        client = SearchClient([bad, server.url], retries=0, max_coalesced=2)
        async with CassetteTool(path, RECORD, 1.0, 3, client) as recorder:
            results = await asyncio.gather(*map(recorder.search, queries))
    async with SearchClient(server.url) as client:
        assert all(map(same, results, await asyncio.gather(*map(client.search, queries))))
        health = await client.health()
    cassette = Cassette.read(path)
    assert cassette.answers == dict(zip(queries, results, strict=True))
    assert cassette.header.server["corpus_sha256"] == health["corpus_sha256"]
