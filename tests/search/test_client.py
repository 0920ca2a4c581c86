"""Tests of the client over real sockets: killed and restarted replicas, malformed answers, settings."""

import asyncio
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rlsys.errors import Code
from rlsys.search.client import SearchClient
from rlsys.search.retrieval import Failure, SearchResult
from rlsys.search.server.asgi import create_app
from tests.support.ports import free_port
from tests.support.refusals import refused
from tests.support.serving import serving
from tests.support.virtual_time import virtually

from .gated import Gated
from .gated_server import GatedServer
from .scripted import ScriptedServer, ScriptedWire, answer, found


def is_right(query: str, result: SearchResult) -> bool:
    """Tell if the passages are the ones that the server's retriever finds."""
    return [passage.id for passage in result.passages] == [f"{query}/{rank}" for rank in range(3)]


@pytest.mark.parametrize(("max_coalesced", "requests"), [(64, 4), (1, 201)])
@virtually
async def test_concurrent_searches_share_requests(max_coalesced: int, requests: int) -> None:
    wire = ScriptedWire(a=ScriptedServer())
    async with SearchClient(wire.urls, wire=wire, max_coalesced=max_coalesced) as client:
        queries = ["", *(f"country {row % 9}" for row in range(200))]
        results = await asyncio.gather(*map(client.search, [" \n", *queries[1:]]))
    assert len(wire.servers["http://a"].asked) == requests
    assert results == list(map(found, queries))


async def test_no_search_is_lost_when_a_server_is_killed_and_restarted(tmp_path: Path) -> None:
    """One client has only the killed server; the other also has a second one."""
    port, queries = free_port(), [str(number) for number in range(400)]
    # With these limits, most searches are not yet sent when the first one is answered.
    settings = {"max_coalesced": 4, "max_concurrent": 8}
    with serving(create_app(Gated())) as other, GatedServer(tmp_path / "first.log", port=port) as first:
        await asyncio.to_thread(first.wait_healthy, 120)
        async with (
            SearchClient(first.url, retries=1000, **settings) as alone,
            SearchClient([first.url, other], **settings) as both,
        ):
            searches = [asyncio.create_task(client.search(query)) for query in queries for client in (alone, both)]
            await searches[0]
            os.kill(first.pid, signal.SIGKILL)
            first.close()
            with GatedServer(tmp_path / "second.log", port=port):
                results = await asyncio.gather(*searches)
    assert all(is_right(query, result) for query, result in zip(queries, results[::2], strict=True))
    assert all(is_right(query, result) for query, result in zip(queries, results[1::2], strict=True))
    assert alone.counts.retries > 0


# ---- malformed answers


@asynccontextmanager
async def raw_server(reply: bytes, *, reset: bool) -> AsyncIterator[str]:
    """Serve `reply` to every search; /health does not exist."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            searched = (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST")
            writer.write(reply if searched else NO_HEALTH)
            await writer.drain()
            if reset and searched:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


NO_HEALTH = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = answer(["Mali"])


@pytest.mark.parametrize(
    ("reply", "reset"),
    [
        pytest.param(b"", False, id="nothing"),
        pytest.param(b"", True, id="reset"),
        pytest.param(b"\x00\x01 what?\r\n\r\n", False, id="garbage"),
        pytest.param(HEAD + b"Content-Length: 9999\r\n\r\n" + WHOLE, True, id="body ends early"),
        pytest.param(HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"res\r\n', False, id="chunks end early"),
        pytest.param(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", False, id="no gzip"),
        pytest.param(HEAD + b"Content-Length: 40\r\n\r\n" + WHOLE[:40], False, id="truncated JSON"),
    ],
)
async def test_malformed_answers_fail_over_or_give_a_typed_failure(reply: bytes, reset: bool) -> None:
    queries = [f"country {row}" for row in range(30)]
    async with raw_server(reply, reset=reset) as bad:
        with serving(create_app(Gated())) as good:
            async with SearchClient([bad, good], retries=0, max_coalesced=1) as client:
                assert all(map(is_right, queries, await asyncio.gather(*map(client.search, queries))))
        assert client.counts.failovers > 0
        async with SearchClient(bad, retries=0) as client:
            result = await client.search("Mali")
    assert result.failure in (Failure.unavailable, Failure.broken)
    assert bad in result.error
    assert len(result.error.splitlines()) == 1


# ---- settings


@pytest.mark.parametrize(
    ("urls", "code", "key"),
    [
        ("localhost:8000", "malformed", "localhost:8000"),
        (["http://a:1", "ftp://b"], "malformed", "ftp://b"),
        ("http://name:word@a", "malformed", "http://name:word@a"),
        *(
            (url, "malformed", url)
            for url in ("http://[::1", "http://", "http://a:0", "http://:word@a", "http://a/?q=1")
        ),
        ([], "missing", "search.url"),
        (["http://a:1", "http://a:1/"], "conflict", "http://a:1"),
    ],
)
def test_wrong_urls_are_refused(urls: str | list[str], code: Code, key: str) -> None:
    with refused(code, key):
        SearchClient(urls)
