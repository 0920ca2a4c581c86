"""Tests of the cost of hostile requests for a search server in its own process, over real sockets.

The promise: 100 MB of any head or body cost the server less than 100 MB of memory and 2 s of CPU time, and the server
answers other clients meanwhile. CPU time is measured because other processes on the machine delay the clock.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import requests

from rlsys.search.address import TOKEN_VARIABLE
from rlsys.search.server.contract import ServerLimits

from .gated_server import GatedServer

MOST_BYTES = 100_000_000
"""Bytes that an attack sends, unless the server hangs up."""
MOST_MB, MOST_CPU_S = 100, 2.0
PIECE = 1 << 16
END_S = 120
LIMITS = ServerLimits()
Attack = Callable[[], Iterator[bytes]]


class Cost(NamedTuple):
    """Resources that an attack cost the server, and the server's answer."""

    memory_mb: float
    """Peak growth of the server's memory."""
    cpu_s: float
    answer: bytes


class Target:
    def __init__(self, server: GatedServer) -> None:
        self._url, self._proc = server.url, Path(f"/proc/{server.pid}")
        self._process = psutil.Process(server.pid)

    def cost_of(self, attack: Attack, connections: int = 1) -> Cost:
        """Return the cost of an attack over `connections` connections; checks that other clients are answered."""
        (self._proc / "clear_refs").write_text("5")  # Resets the process's peak of memory to the current value.
        memory, cpu_s = self._peak_mb(), self._cpu_s()
        answer = b""
        with ExitStack() as opened:
            sockets = [opened.enter_context(self.connected()) for _ in range(connections)]
            for sock in sockets:
                _send(sock, attack, MOST_BYTES // connections)
            self.require_health()
            for sock in sockets:
                with suppress(OSError):
                    answer += sock.recv(1000)
        self.require_health()
        return Cost(self._peak_mb() - memory, self._cpu_s() - cpu_s, answer[:2000])

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int(self._url.rpartition(":")[2])), timeout=END_S)

    def require_health(self) -> None:
        """Check /health over a new connection, as another client would."""
        assert requests.get(f"{self._url}/health", timeout=END_S).status_code == 200

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def _peak_mb(self) -> float:
        (line,) = (line for line in (self._proc / "status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1000


def _send(sock: socket.socket, attack: Attack, most: int) -> None:
    sent = 0
    with suppress(OSError):
        for piece in attack():
            sock.sendall(piece)
            sent += len(piece)
            if sent >= most:
                # The client sends nothing more.
                sock.shutdown(socket.SHUT_WR)
                break


@contextmanager
def attacked(log: Path, *options: str) -> Iterator[Target]:
    with GatedServer(log, options=options) as server:
        server.wait_healthy(END_S)
        yield Target(server)


def endless(head: bytes, again: bytes) -> Attack:
    """Return an attack that sends `head` once, and then `again` without end."""

    def pieces() -> Iterator[bytes]:
        yield head
        block = again * max(1, PIECE // len(again))
        while True:
            yield block

    return pieces


GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AA==\r\n\r\n"
HEADS = {
    "a header": (GET + b"X: ", b"a"),
    "headers": (GET, b"a:\r\n"),
    "a URL": (b"GET /", b"a"),
    "empty lines": (b"", b"\r\n"),
    "no HTTP": (b"", b"\xff\x00"),
    "requests before their answers": (b"", GET + b"\r\n"),
    "an upgrade": (GET + UPGRADE, b"\x82\x7f" + b"\0" * 1000),
}
BODIES = {
    "plain": (b"Content-Length: %d\r\n\r\n" % (10 * MOST_BYTES), b" "),
    "on demand": (b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (10 * MOST_BYTES), b" "),
    "chunks": (CHUNKED, b"10000\r\n" + b" " * PIECE + b"\r\n"),
    "tiny chunks": (CHUNKED, b"1\r\n \r\n"),
    "a chunk's size": (CHUNKED, b"0"),
    "a chunk's extension": (CHUNKED + b"1;", b"a"),
    "a trailer": (CHUNKED + b"0\r\nX: ", b"a"),
    "trailers": (CHUNKED + b"0\r\n", b"a:\r\n"),
}


def assert_cheap(cost: Cost, what: str) -> None:
    assert cost.memory_mb < MOST_MB, (what, cost)
    assert cost.cpu_s < MOST_CPU_S, (what, cost)


@pytest.mark.parametrize("token", ["", "s3cret"])
def test_endless_requests_are_cut_off(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a token refuses bodies unread; endless heads are sent only to a server without one."""
    if token:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    with attacked(tmp_path / "log", "--full") as target:
        for name, parts in () if token else HEADS.items():
            assert_cheap(target.cost_of(endless(*parts)), name)
        for name, (head, again) in BODIES.items():
            assert_cheap(target.cost_of(endless(POST % b"/retrieve" + head, again)), name)
        for route in (GET, POST % b"/none", POST % b"/access"):
            head, again = BODIES["tiny chunks"]
            assert_cheap(target.cost_of(endless(route + head, again)), f"tiny chunks to {route!r}")
        for name in () if token else ("a header", "headers", "requests before their answers"):
            assert_cheap(target.cost_of(endless(*HEADS[name]), connections=100), f"{name}, of many")


def filled(begin: bytes, again: bytes, end: bytes, size: int) -> bytes:
    return begin + again * ((size - len(begin) - len(end)) // len(again)) + end


def bodies(size: int) -> Iterator[tuple[bytes, str, bytes]]:
    """Yield (route, name, body) of JSON that is expensive to parse, of about `size` bytes."""
    route, begin = b"/retrieve", b'{"queries":'
    for again in (b"1,", b"{},", b'"",', b"[[]],"):
        yield route, f"a list of {again.decode()}", filled(begin + b"[", again, b'""]}', size)
    fields = b",".join(b'"%06x":{}' % number for number in range(size // 12 - 20))
    yield route, "fields", begin + b'["a"],' + fields + b"}"
    yield route, "a field again and again", filled(begin + b"[]", b"," + begin[1:] + b"[]", b"}", size)
    yield route, "depth", filled(begin, b"[", b"", size)
    yield route, "a number", filled(b'{"topk":', b"9", b',"queries":["a"]}', size)
    yield route, "texts", filled(begin + b"[", b'"' + b"a" * 8192 + '🗼",'.encode(), b'""]}', size)
    yield route, "a text without an end", filled(begin + b'["', b'\\"', b"", size)
    yield route, "space", filled(begin, b" ", b'["a"]}', size)
    begin = b'{"queries":["a"],"documents":['
    for again in (b"[],", b'["",1],', b'[{"a":[]}],'):
        yield b"/rerank", f"lists of {again.decode()}", filled(begin, again, b"[]]}", size)
        inner = begin + b'[{"contents":"","a":['
        yield b"/rerank", f"a document of {again.decode()}", filled(inner, again, b'""]}]]}', size)
    yield b"/rerank", "a wide text", filled(begin + b'["', b"a", '🗼"]]}'.encode(), size)


def sent(route: bytes, body: bytes) -> Attack:
    def pieces() -> Iterator[bytes]:
        yield POST % route + b"Content-Length: %d\r\n\r\n" % len(body)
        for start in range(0, len(body), PIECE):
            yield body[start : start + PIECE]

    return pieces


@pytest.mark.parametrize("size", [700_000, pytest.param(LIMITS.max_body_bytes, marks=pytest.mark.slow)])
def test_expensive_json_is_answered_at_low_cost(size: int, tmp_path: Path) -> None:
    """The small size is below the limit of values, so everything is parsed; the large size is the limit of bytes."""
    with attacked(tmp_path / "log", "--full") as target:
        for route, name, body in bodies(size):
            assert len(body) <= LIMITS.max_body_bytes
            cost = target.cost_of(sent(route, body))
            assert_cheap(cost, f"{route.decode()}: {name}")
            assert cost.answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4")), (route, name, cost)
