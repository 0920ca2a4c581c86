"""Connection limits for every HTTP server of rlsys; uvicorn itself bounds neither size nor time of a request head.

A connection that exceeds a limit of size or number gets 400, 431 or 503 with one sentence and is closed. A connection
that exceeds a time limit is closed without a response. The limits apply before authentication, because the token
arrives in the head.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import orjson
import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 16_384
"""Limit of a request without its body: request line, headers, chunk sizes and trailers."""
BODY_SHARE = 64
"""Body bytes that raise the limit by one byte: enough for the chunk sizes of a body in chunks of at least 512 bytes."""
MAX_HEADERS = 128
HEAD_S = 10.0  # time to receive a whole head, from the connection's start or the previous response
FLUSH_S = 120.0  # time for a client to read a written response
PAGE_CONNECTIONS = 128  # connection limit of servers with a web page
_OTHER_FILES = 128  # file descriptors reserved for everything but connections


class Connections:
    """The connections of one server, limited to `most` and by the process's file descriptors.

    Beyond the limit, the connection that has been idle longest is closed.
    """

    def __init__(self, most: int) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            most = min(most, max(files // 2, files - _OTHER_FILES))
        self.most = most
        self.waiting: OrderedDict[LimitedHttp, float] = OrderedDict()
        """Connection without a complete request -> time from which it has waited; the longest wait comes first."""

    def waits(self, connection: LimitedHttp, now: float) -> None:
        """Record that `connection` waits for a request from `now` on."""
        self.waiting[connection] = now
        self.waiting.move_to_end(connection)

    def make_room(self) -> bool:
        """Abort the connection that has waited longest; return False if every connection has a request in flight."""
        if not self.waiting:
            return False
        self.waiting.popitem(last=False)[0].transport.abort()
        return True

    def end_late(self, now: float) -> None:
        """Close the connections that exceed `HEAD_S`; abort those that exceed `FLUSH_S`."""
        for connection, since in list(self.waiting.items()):
            if now - since < HEAD_S:
                break
            if connection.reads_body:
                continue
            if now - since > FLUSH_S:
                connection.transport.abort()
            else:
                # Written data is still sent.
                connection.transport.close()


class LimitedHttp(HttpToolsProtocol):
    """A connection that limits the length and the time of request heads."""

    def __init__(self, config: uvicorn.Config, *more: Any, **named: Any) -> None:
        super().__init__(config, *more, **named)
        assert isinstance(config, LimitedConfig)
        self._all = config.connections
        self._head_bytes = 0  # bytes received for this request, minus its body and the body's allowance (BODY_SHARE)
        self._refusal = (400, "this is not an HTTP request")
        self.reads_body = False
        """True between a complete head and a complete body; the application limits the time of the body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._all.most and not self._all.make_room():
            self._refuse(503, f"{self._all.most} connections are in use already: try again later")
        self._all.waits(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data in pieces, so that at most one piece is parsed beyond the limit."""
        for start in range(0, len(data), HEAD_BYTES):
            piece = data[start : start + HEAD_BYTES]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(*_TOO_LONG)
            if self.transport.is_closing():
                break

    def on_message_begin(self) -> None:
        """Start a request. A client may pipeline one request behind the current one, no more."""
        if self.pipeline:
            self._fail(400, "too many requests were sent without waiting: wait for the answer to each")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            self._fail(431, f"the request has too many headers: send at most {MAX_HEADERS}")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._head_bytes > HEAD_BYTES:  # the count may include body bytes that arrived with the head
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > HEAD_BYTES:
                self._fail(*_TOO_LONG)
        self.reads_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body) + len(body) // BODY_SHARE
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self.reads_body = False
        if not self.cycle.response_complete:
            self._all.waiting.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start waiting for the next head. Body bytes left after an early response count as part of that head."""
        if not self.pipeline:
            self.reads_body = False
            self._all.waits(self, self.loop.time())
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  (uvicorn's own sentence)
        """Reject a request that failed to parse."""
        self._refuse(*self._refusal)

    def _fail(self, status: int, reason: str) -> None:
        """Stop the parser, which then calls `send_400_response`."""
        self._refusal = status, reason
        raise ValueError(reason)

    def _refuse(self, status: int, reason: str) -> None:
        """Send the reason, unless another response has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not (self.cycle.response_started or self.pipeline):
            body = orjson.dumps({"detail": reason})
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


_TOO_LONG = 431, f"the request's head is too long: send at most {HEAD_BYTES} bytes besides the body"


class LimitedConfig(uvicorn.Config):
    """uvicorn settings for a server with at most `connections` connections; `settings` are passed to uvicorn."""

    def __init__(self, app: Any, connections: int, **settings: Any) -> None:
        super().__init__(app, http=LimitedHttp, ws="none", proxy_headers=False, **settings)
        self.connections = Connections(connections)


class LimitedServer(uvicorn.Server):
    """A server that closes late connections once per second."""

    config: LimitedConfig

    async def on_tick(self, counter: int) -> bool:
        """Close late connections on every tenth call; uvicorn calls this ten times per second."""
        if counter % 10 == 0:
            self.config.connections.end_late(asyncio.get_running_loop().time())
        return await super().on_tick(counter)


class GuestServer(LimitedServer):
    """A server that leaves signals to the process that it is in."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Override uvicorn's signal handling with a no-op."""
        yield

    @asynccontextmanager
    async def serving(self, sock: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
        """Serve at the bound `sock` in a task during the body; on exit, end the server and wait for it."""
        sock.listen(self.config.backlog)
        task = asyncio.create_task(self.serve(sockets=[sock]))
        try:
            yield task
        finally:
            self.should_exit = True
            await task


class EventStream(StreamingResponse):
    """Response of server-sent events; closes their source even if the client disconnects while an event is sent."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as an ASGI application."""
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)
