"""Limits of connections: their number, their heads and their time."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from starlette.types import Receive, Scope, Send

from rlsys.search import connections
from rlsys.search.address import bind
from rlsys.search.connections import HEAD_BYTES, MOST_HEADERS, Connections, LimitedConfig, LimitedServer

HEAD_S, FLUSH_S = 3600.0, 7200.0
"""In place of the server's own limits: a test on a busy machine may take longer than those."""
HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", HEAD_S)
    monkeypatch.setattr(connections, "FLUSH_S", FLUSH_S)


class Server:
    """A server whose application reads a body, waits until it may, and answers; /large with 50 MB."""

    def __init__(self, most: int) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.config = LimitedConfig(self._app, most, interface="asgi3", lifespan="off", log_level="error")
        self.begun = 0
        self._socket = bind("127.0.0.1", 0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = LimitedServer(self.config)
        with self._socket as sock:
            sock.listen()
            task = asyncio.create_task(server._serve([sock]))
            yield
            server.should_exit = server.force_exit = True
            self.may_answer.set()
            await task

    async def opened(self, sent: bytes = b"") -> Streams:
        """A connection that has sent so much, which has arrived."""
        reader, writer = await asyncio.open_connection(*self._socket.getsockname())
        writer.write(sent)
        for _ in range(20):
            await asyncio.sleep(0.001)
        return reader, writer

    def end_late(self, after_s: float) -> None:
        """As the server does it after so long."""
        self.config.connections.end_late(asyncio.get_running_loop().time() + after_s)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        while (await receive()).get("more_body"):
            pass
        await self.may_answer.wait()
        body = b"x" * (50_000_000 if scope["path"] == "/large" else 2)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def server_of(most: int = 64) -> AsyncIterator[Server]:
    server = Server(most)
    async with server.running():
        yield server


async def end_of(streams: Streams) -> None:
    """Wait until the server has closed the connection; what it sent before is lost."""
    with suppress(ConnectionError):
        async with asyncio.timeout(60):
            while await streams[0].read(1 << 20):
                pass


async def answered(streams: Streams) -> bytes:
    async with asyncio.timeout(60):
        return await streams[0].readline()


async def is_open(streams: Streams) -> bool:
    try:
        async with asyncio.timeout(0.05):
            return bool(await streams[0].read(1))
    except TimeoutError:
        return True


async def test_late_heads_are_ended_and_requests_in_work_are_not() -> None:
    async with server_of() as server:
        silent = await server.opened()
        half = await server.opened(HEAD)
        slow_body = await server.opened(HEAD + b"Content-Length: 2\r\n\r\n{")
        idle = await server.opened(HEAD + b"\r\n")
        assert (await answered(idle)).startswith(b"HTTP/1.1 200")
        server.may_answer.clear()
        working = await server.opened(HEAD + b"\r\n")
        assert server.begun == 3
        server.end_late(HEAD_S / 2)
        assert await is_open(silent)
        assert await is_open(half)
        server.end_late(HEAD_S + 1)
        for late in (silent, half, idle):
            await end_of(late)
        server.may_answer.set()
        slow_body[1].write(b"}")
        for kept in (slow_body, working):
            assert (await answered(kept)).startswith(b"HTTP/1.1 200")


async def test_a_client_that_does_not_take_its_answer_is_ended_after_a_while() -> None:
    async with server_of() as server:
        reader, writer = await server.opened(HEAD.replace(b"/", b"/large", 1) + b"\r\n")
        server.end_late(HEAD_S + 1)
        assert len(await reader.readexactly(1_000_000)) == 1_000_000
        server.end_late(FLUSH_S + 1)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(50_000_000)
        writer.close()


async def test_the_connection_that_has_waited_longest_makes_room() -> None:
    async with server_of(most=3) as server:
        first, second, third = [await server.opened(sent) for sent in (b"", HEAD, b"")]
        second[1].write(b"\r\n")
        assert (await answered(second)).startswith(b"HTTP/1.1 200")
        fourth = await server.opened()
        await end_of(first)
        assert await is_open(third)
        assert await is_open(fourth)
        fifth = await server.opened(HEAD + b"\r\n")
        assert (await answered(fifth)).startswith(b"HTTP/1.1 200")
        await end_of(third)


async def test_requests_in_work_make_no_room() -> None:
    async with server_of(most=2) as server:
        server.may_answer.clear()
        working = [await server.opened(HEAD + b"\r\n") for _ in range(2)]
        assert (await answered(await server.opened())).startswith(b"HTTP/1.1 503")
        server.may_answer.set()
        for kept in working:
            assert (await answered(kept)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"X: " + b"a" * (HEAD_BYTES - 100) + b"\r\n\r\n", b"200"),
        (HEAD + b"X: " + b"a" * HEAD_BYTES + b"\r\n\r\n", b"431"),
        (HEAD + b"X: " + b"a" * HEAD_BYTES, b"431"),
        (HEAD + b"a: b\r\n" * (MOST_HEADERS - 1) + b"\r\n", b"200"),
        (HEAD + b"a: b\r\n" * MOST_HEADERS + b"\r\n", b"431"),
        (b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"431"),
        # A body does not count, and neither do the sizes of chunks that are no shorter than need be.
        (HEAD + b"Content-Length: 400000\r\n\r\n" + b" " * 400_000, b"200"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"200\r\n" + b" " * 512 + b"\r\n") * 9000 + b"0\r\n\r\n", b"200"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 1000 + b"0\r\n\r\n", b"200"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 8000 + b"0\r\n\r\n", b"431"),
        (HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b"200"),
        (b"nonsense\r\n\r\n", b"400"),
    ],
)  # fmt: skip
async def test_each_request_has_a_head_up_to_a_limit(sent: bytes, status: bytes) -> None:
    async with server_of() as server:
        reader, writer = await server.opened()
        for _ in range(3 if status == b"200" else 1):
            writer.write(sent)
            async with asyncio.timeout(60):
                assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == status
                await reader.readexactly(2)


async def test_one_request_may_follow_another_before_its_answer_and_no_more() -> None:
    async with server_of() as server:
        server.may_answer.clear()
        reader, writer = await server.opened(2 * (HEAD + b"\r\n"))
        server.may_answer.set()
        async with asyncio.timeout(60):
            for _ in range(2):
                assert (await reader.readuntil(b"xx")).startswith(b"HTTP/1.1 200")
        writer.close()
        server.may_answer.clear()
        await end_of(await server.opened(3 * (HEAD + b"\r\n")))


def test_connections_leave_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((256, 128), (1024, 896), (10_000, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert Connections(4096).most == most
