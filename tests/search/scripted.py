"""Scripted servers for tests of the client and of cassettes, in memory and over HTTP."""

import asyncio
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.apps.planner.virtual_time import now
from rlsys.config.schema import CassetteMode
from rlsys.errors import RunError
from rlsys.search.cassette import CassetteFile, CassetteTool, Header, RecordedCall
from rlsys.search.retrieval import Passage, SearchResult
from rlsys.search.wire import NoReplyError, Reply

RECORD, REPLAY, EXTEND = CassetteMode.record, CassetteMode.replay, CassetteMode.extend


@dataclass
class Script:
    """Server with fixed answers and durations, on any event loop."""

    results: Mapping[str, SearchResult] = field(default_factory=dict)
    takes_s: Iterable[float] = (0.0,)
    """Seconds that each search takes, in the order in which searches are asked; starts again after the last."""
    serves: Mapping[str, Any] | None = field(default_factory=lambda: {"encoder": "e", "queries": 7})
    asked: list[str] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._times = itertools.cycle(self.takes_s)

    async def search(self, query: str) -> SearchResult:
        self.asked.append(query)
        await asyncio.sleep(next(self._times))
        return self.results.get(query) or found(query)

    async def health(self) -> Mapping[str, Any]:
        if self.closed:
            raise RuntimeError("the client has been closed")  # httpx raises the same error
        await asyncio.sleep(0.5)
        if self.serves is None or self.closed:
            raise RunError("no /health here")
        return self.serves

    async def close(self) -> None:
        self.closed = True


def found(query: str, contents: str = "text") -> SearchResult:
    return SearchResult((Passage(f"id of {query}", f'"{query}"\n{contents}', 1 / 3), Passage("0", "é", 0.0)))


def tool(path: Path, mode: CassetteMode, server: Script | None = None, scale: float = 1.0) -> CassetteTool:
    return CassetteTool(path, mode, scale, 3, server)


def written(path: Path, latencies_s: Iterable[float], query: str = "Mali") -> Path:
    """Write a cassette with one query, recorded once for each latency."""
    path.unlink(missing_ok=True)
    file = CassetteFile(path, Header(3, {"encoder": "e"}))
    for latency_s in latencies_s:
        file.append(RecordedCall(query, found(query), latency_s).line(with_passages=True))
    file.close()
    return path


SERVES = {"passages": 7, "encoder": "e"}


@dataclass
class ScriptedServer:
    """Behaviour of a server under a virtual clock; tests change it while the server runs."""

    takes_s: float = 0.0
    status: int = 200
    retry_after_s: float = 0.0
    down: bool = False
    body: bytes | None = None
    """Body to send in place of the passages."""
    refuses: Mapping[str, int] = field(default_factory=dict)
    """Query -> status of every request that holds the query."""
    serves: Mapping[str, Any] | None = field(default_factory=lambda: SERVES)
    """Answer of /health; None if the server has no /health."""
    asked: list[float] = field(default_factory=list)
    """Times at which searches arrived."""
    probed: list[float] = field(default_factory=list)
    cancelled: int = 0


class ScriptedWire:
    """Connection to scripted servers by their URLs, in place of HTTP."""

    def __init__(self, **servers: ScriptedServer) -> None:
        self.servers = {f"http://{name}": server for name, server in servers.items()}
        self.urls = list(self.servers)
        self.closed = False

    async def get(self, url: str) -> Reply:
        server = self.servers[url.removesuffix("/health")]
        server.probed.append(now())
        if server.down:
            raise NoReplyError("refused")
        return Reply(404, b"") if server.serves is None else Reply(200, json.dumps(server.serves).encode())

    async def post(self, url: str, body: bytes) -> Reply:
        server = self.servers[url.removesuffix("/retrieve")]
        server.asked.append(now())
        if server.down:
            raise NoReplyError("refused")
        queries = json.loads(body)["queries"]
        reply = Reply(server.status, server.body or answer(queries), server.retry_after_s)
        for query in server.refuses.keys() & queries:
            reply = Reply(server.refuses[query], b'{"detail": "a bad query"}')
        try:
            await asyncio.sleep(server.takes_s)
        except asyncio.CancelledError:
            server.cancelled += 1
            raise
        return reply

    async def close(self) -> None:
        self.closed = True


def answer(queries: Iterable[str]) -> bytes:
    """Return the body of POST /retrieve that holds `found(query)` for each query."""
    lines = [
        [{"document": {"id": p.id, "contents": p.contents}, "score": p.score} for p in found(query).passages]
        for query in queries
    ]
    return json.dumps({"result": lines}).encode()


class FixedApp:
    """Application that records its requests and gives each the same answer."""

    def __init__(self, body: bytes = b"", status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._body, self._status = body, status
        self._headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.asked: list[dict[str, str]] = []

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append(headers | {"path": scope["path"]})
        await send({"type": "http.response.start", "status": self._status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})
