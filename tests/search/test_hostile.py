"""The cost of hostile requests for the servers: search, watch and chat as processes, over real sockets.

The promise: 100 MB of any head or body cost a server less than 100 MB of memory and 2 s of CPU time, and it answers others
meanwhile. CPU time, not the clock, so that it holds on a machine that has other work.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from rlsys.search.address import TOKEN_VARIABLE
from rlsys.search.server.contract import ServerLimits
from tests.search.victims import FILES, FULL, MOST_BYTES, Cost, attacked

MOST_MB, MOST_CPU_S, MOST_WAIT_CPU_S = 100, 2.0, 1.0
PIECE = 1 << 16
Attack = Callable[[], Iterator[bytes]]


def endless(head: bytes, again: bytes) -> Attack:
    """`head`, and then `again` for ever."""

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
    "long headers": (GET, b"a: " + b"a" * 5000 + b"\r\n"),
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
    "extensions": (CHUNKED, b"1;" + b"a" * 1000 + b"\r\n \r\n"),
    "a trailer": (CHUNKED + b"0\r\nX: ", b"a"),
    "trailers": (CHUNKED + b"0\r\n", b"a:\r\n"),
}
ROUTES = {
    "search": (GET, *(POST % path for path in (b"/retrieve", b"/rerank", b"/access", b"/none"))),
    "watch": (GET, POST % b"/", GET.replace(b"/", b"/events", 1)),
    "chat": (GET, POST % b"/ask", POST % b"/none"),
}


def attacks(routes: Sequence[bytes]) -> dict[str, Attack]:
    """Heads without an end, and bodies for each route, by name."""
    found = {f"head of {name}": endless(*parts) for name, parts in HEADS.items()}
    for route in routes:
        for name, (head, again) in BODIES.items():
            found[f"{route.split()[0:2]} with {name}"] = endless(route + head, again)
    return found


def assert_cheap(cost: Cost, what: str) -> None:
    assert cost.memory_mb < MOST_MB, (what, cost)
    assert cost.cpu_s < MOST_CPU_S, (what, cost)
    assert cost.worst_health_cpu_s < MOST_WAIT_CPU_S, (what, cost)


def test_requests_that_never_end_are_cut() -> None:
    with attacked("search", "/health") as victim:
        for name, attack in attacks(ROUTES["search"][1:2]).items():
            assert_cheap(victim.suffer(attack), name)
        assert_cheap(victim.suffer(endless(*HEADS["a header"]), connections=100), "a header, of many")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "health", "environment"),
    [
        ("search", "/health", {FULL: "1"}),
        ("search", "/health", {TOKEN_VARIABLE: "s3cret"}),
        ("watch", "/status.json", {}),
        ("chat", "/about", {}),
    ],
    ids=["search", "search with a token", "watch", "chat"],
)
def test_every_route_of_every_server_cuts_them(server: str, health: str, environment: dict[str, str]) -> None:
    with attacked(server, health, **environment) as victim:
        for name, attack in attacks(ROUTES[server]).items():
            assert_cheap(victim.suffer(attack), name)
        for name in ("a header", "headers", "requests before their answers"):
            assert_cheap(victim.suffer(endless(*HEADS[name]), connections=100), f"{name}, of many")
        tiny = endless(ROUTES[server][1] + BODIES["tiny chunks"][0], BODIES["tiny chunks"][1])
        assert_cheap(victim.suffer(tiny, connections=100), "tiny chunks, of many")


def filled(begin: bytes, again: bytes, end: bytes, size: int) -> bytes:
    return begin + again * ((size - len(begin) - len(end)) // len(again)) + end


def bodies(size: int) -> Iterator[tuple[bytes, str, bytes]]:
    """Route, name and bytes of JSON that is worse than it looks, in about so many bytes."""
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


LIMITS = ServerLimits()


@pytest.mark.parametrize("size", [700_000, pytest.param(LIMITS.max_body_bytes, marks=pytest.mark.slow)])
def test_json_that_is_worse_than_it_looks_is_answered(size: int) -> None:
    """Below the limit of values, where all of it is parsed, and at that of bytes."""
    with attacked("search", "/health", **{FULL: "1"}) as victim:
        for route, name, body in bodies(size):
            assert len(body) <= LIMITS.max_body_bytes
            cost = victim.suffer(sent(route, body))
            assert_cheap(cost, f"{route.decode()}: {name}")
            assert cost.answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4")), (route, name, cost)


def test_connections_that_say_nothing_keep_nobody_out() -> None:
    with attacked("search", "/health", **{FILES: "256"}) as victim, ExitStack() as opened:
        for begun in (b"", GET, POST % b"/retrieve" + b"Content-Length: 9\r\n\r\n{"):
            for _ in range(200):
                sock = opened.enter_context(socket.create_connection(("127.0.0.1", victim.port), timeout=60))
                sock.sendall(begun)
            victim.health()


def test_a_part_that_a_server_lacks_is_named_before_a_body_is_read() -> None:
    with attacked("search", "/health") as victim:
        for route in (b"/rerank", b"/access"):
            cost = victim.suffer(sent(route, b"[" * LIMITS.max_body_bytes))
            assert cost.answer.startswith(b"HTTP/1.1 404")
            assert cost.memory_mb < LIMITS.max_body_bytes / 2e6
