"""Tests of connection limits: number, header size and time, under a virtual clock and without sockets."""

import asyncio
import re
import resource

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from rlsys.search.connections import (
    FLUSH_S,
    HEAD_BYTES,
    HEAD_S,
    MAX_HEADERS,
    Connections,
    GuestServer,
    LimitedConfig,
    LimitedHttp,
    LimitedServer,
)
from tests.support.paths import PROJECT
from tests.support.virtual_time import virtually

HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Connection(asyncio.Transport):
    """Client's end of a connection to the server."""

    def __init__(self, protocol: LimitedHttp) -> None:
        super().__init__()
        self.received = b""
        self.takes_all = self.is_open = True
        self.was_aborted = False
        self._protocol = protocol
        protocol.connection_made(self)

    async def send(self, sent: bytes) -> bytes:
        """Send bytes; return all that the client has received by the time the server is idle."""
        self._protocol.data_received(sent)
        await asyncio.sleep(0.001)
        return self.received

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.received += data

    def close(self) -> None:
        if self.is_open and self.takes_all:
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)
        self.is_open = False

    def abort(self) -> None:
        self.was_aborted, self.is_open = True, False
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return not self.is_open

    def pause_reading(self) -> None:
        """Do nothing: the clients of these tests send only small pieces."""

    resume_reading = pause_reading


class Server:
    """Server whose application reads a body, waits for `may_answer`, and then answers."""

    def __init__(self, most: int = 64) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        settings = {"lifespan": "off", "log_level": "error", "timeout_keep_alive": 10_000}
        self._config = LimitedConfig(self._app, most, interface="asgi3", **settings)
        self._state = ServerState()

    async def connected(self, sent: bytes = b"") -> Connection:
        connection = Connection(LimitedHttp(self._config, self._state, {}))
        await connection.send(sent)
        return connection

    async def runs(self, for_s: float) -> None:
        await asyncio.sleep(for_s)
        await LimitedServer(self._config).on_tick(0)
        await asyncio.sleep(0.001)

    async def _app(self, _scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def statuses(received: bytes) -> list[bytes]:
    return [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]


@virtually
async def test_connections_with_late_headers_are_closed_and_busy_ones_are_not() -> None:
    server = Server()
    silent, half = await server.connected(), await server.connected(HEAD)
    slow_body = await server.connected(HEAD + b"Content-Length: 2\r\n\r\n{")
    idle = await server.connected(HEAD + b"\r\n")
    assert statuses(idle.received) == [b"200"]
    server.may_answer.clear()
    working = await server.connected(HEAD + b"\r\n")
    await server.runs(HEAD_S / 2)
    assert all(connection.is_open for connection in (silent, half, slow_body, idle, working))
    await server.runs(HEAD_S)
    assert not any(connection.is_open for connection in (silent, half, idle))
    server.may_answer.set()
    assert statuses(await slow_body.send(b"}")) == [b"200"]
    assert statuses(working.received) == [b"200"]


@virtually
async def test_a_client_that_does_not_read_its_answer_is_disconnected() -> None:
    server = Server()
    stuck = await server.connected(HEAD + b"\r\n")
    stuck.takes_all = False
    await server.runs(HEAD_S + 1)
    assert (stuck.is_open, stuck.was_aborted) == (False, False), "the answer may still be sent"
    await server.runs(FLUSH_S)
    assert stuck.was_aborted


@virtually
async def test_a_new_connection_gets_503_while_all_others_are_busy() -> None:
    server = Server(most=2)
    server.may_answer.clear()
    working = [await server.connected(HEAD + b"\r\n") for _ in range(2)]
    beyond = await server.connected()
    assert (statuses(beyond.received), beyond.is_open) == ([b"503"], False)
    server.may_answer.set()
    for kept in working:
        assert statuses(await kept.send(b"")) == [b"200"]


@virtually
async def test_the_connection_idle_longest_is_closed_for_a_new_one_at_the_limit() -> None:
    server = Server(most=3)
    answered, silent, busy = [await server.connected() for _ in range(3)]
    await answered.send(HEAD + b"\r\n")
    server.may_answer.clear()
    await busy.send(HEAD + b"\r\n")
    new = await server.connected()
    assert [connection.is_open for connection in (answered, silent, busy, new)] == [True, False, True, True]
    newest = await server.connected()
    assert [connection.is_open for connection in (answered, busy, new, newest)] == [False, True, True, True]
    server.may_answer.set()
    assert [statuses(await connection.send(b"")) for connection in (busy, new)] == [[b"200"], []]


@virtually
async def test_one_pipelined_request_is_accepted_and_a_second_closes_the_connection() -> None:
    server = Server()
    server.may_answer.clear()
    two, three = [await server.connected(count * (HEAD + b"\r\n")) for count in (2, 3)]
    assert (two.is_open, three.is_open) == (True, False)
    server.may_answer.set()
    assert statuses(await two.send(b"")) == [b"200"] * 2


def test_the_connection_limit_leaves_file_descriptors_for_other_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((100, 50), (256, 128), (1024, 896), (10_000, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert Connections(4096).most == most


def test_every_server_limits_its_connections() -> None:
    """Only rlsys/search/connections.py imports uvicorn."""
    modules = (PROJECT / "rlsys").rglob("*.py")
    users = [file for file in modules if re.search(r"^\s*(import|from)\b.*\buvicorn\b", file.read_text(), re.MULTILINE)]
    assert users == [PROJECT / "rlsys/search/connections.py"]
    assert issubclass(GuestServer, LimitedServer)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(HEAD + b"X: " + b"a" * (HEAD_BYTES - 100) + b"\r\n\r\n", b"200", id="long header"),
        pytest.param(HEAD + b"X: " + b"a" * HEAD_BYTES, b"431", id="endless header"),
        pytest.param(HEAD + b"a: b\r\n" * (MAX_HEADERS - 1) + b"\r\n", b"200", id="many headers"),
        pytest.param(HEAD + b"a: b\r\n" * MAX_HEADERS + b"\r\n", b"431", id="too many headers"),
        pytest.param(b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"431", id="long URL"),
        # Bodies do not count, and neither do the sizes of chunks, unless the chunks are needlessly short.
        pytest.param(HEAD + b"Content-Length: 400000\r\n\r\n" + b" " * 400_000, b"200", id="body"),
        pytest.param(CHUNKED + (b"200\r\n" + b" " * 512 + b"\r\n") * 9000 + b"0\r\n\r\n", b"200", id="chunks"),
        pytest.param(CHUNKED + b"1\r\n \r\n" * 8000 + b"0\r\n\r\n", b"431", id="tiny chunks"),
        pytest.param(HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b"200", id="upgrade"),
        pytest.param(b"nonsense\r\n\r\n", b"400", id="no HTTP"),
    ],
)
@virtually
async def test_headers_are_limited_for_each_request(sent: bytes, status: bytes) -> None:
    connection = await Server().connected()
    times = 3 if status == b"200" else 1
    for _ in range(times):
        await connection.send(sent)
    assert statuses(connection.received) == [status] * times
    assert connection.is_open == (status == b"200")
