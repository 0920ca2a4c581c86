"""HTTP connections under limits, for every server of rlsys: uvicorn alone takes heads without end and waits for ever.

A connection that exceeds a limit gets one sentence, 400, 431 or 503, and is closed; one that is late is closed. Nothing
of this asks for a token, as a client sends its head before it can be known.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from typing import Any

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 16_384
"""Largest request without its body: request line, headers, sizes of chunks and what follows the last one."""
BODY_SHARE = 64
"""A body of so many bytes allows one byte more: a body in chunks of 400 bytes and more fits at any length."""
MOST_HEADERS = 128
HEAD_S = 10.0  # until a head is whole, from the connection's beginning or the last answer
FLUSH_S = 120.0  # until a client has taken its answer, from when it was written
PAGE_CONNECTIONS = 128  # most connections of a server that shows a page to people
_OTHER_FILES = 128  # descriptors that are left to everything but connections


class Connections:
    """The connections of one server, at most `most` and no more than the process may open files for: beyond that the
    one that has waited longest for a request makes room.
    """

    def __init__(self, most: int) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            most = min(most, max(files // 2, files - _OTHER_FILES))
        self.most = most
        self.waiting: OrderedDict[LimitedHttp, float] = OrderedDict()
        """Connections without a whole request, and since when; longest first."""

    def waits(self, connection: LimitedHttp, now: float) -> None:
        """Note that `connection` waits for a request from `now` on."""
        self.waiting[connection] = now
        self.waiting.move_to_end(connection)

    def make_room(self) -> bool:
        """End the connection that has waited longest; False where each has a request in work."""
        if not self.waiting:
            return False
        self.waiting.popitem(last=False)[0].transport.abort()
        return True

    def end_late(self, now: float) -> None:
        """End the connections whose heads or whose clients are late at `now`."""
        for connection, since in list(self.waiting.items()):
            if now - since < HEAD_S:
                break
            if connection.reads_body:
                continue
            if now - since > FLUSH_S:
                connection.transport.abort()
            else:
                # What is written still goes out.
                connection.transport.close()


class LimitedHttp(HttpToolsProtocol):
    """A connection that takes heads of limited length in limited time."""

    def __init__(self, config: uvicorn.Config, *more: Any, **named: Any) -> None:
        super().__init__(config, *more, **named)
        assert isinstance(config, LimitedConfig)
        self._all = config.connections
        self._head_bytes = 0  # received of this request, less those of its body and of what that allows
        self._refusal = (400, "this is no HTTP request")
        self.reads_body = False
        """True while a head is whole and its body is not: how long that may take is the application's to say."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._all.most and not self._all.make_room():
            self._refuse(503, f"{self._all.most} connections are in use already: try again later")
        self._all.waits(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come, in pieces, so that no more than one of them is parsed beyond the limit."""
        for start in range(0, len(data), HEAD_BYTES):
            piece = data[start : start + HEAD_BYTES]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(*_TOO_LONG)
            if self.transport.is_closing():
                break

    def on_message_begin(self) -> None:
        """Take a request; one may follow another before its answer, no more."""
        if self.pipeline:
            self._fail(400, "too many requests were sent before their answers: wait for each")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MOST_HEADERS:
            self._fail(431, f"the request has too many headers: send at most {MOST_HEADERS}")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._head_bytes > HEAD_BYTES:  # Perhaps for a body that came along.
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
        """Begin to wait for the next head; the rest of a body that was answered early is read as part of that."""
        if not self.pipeline:
            self.reads_body = False
            self._all.waits(self, self.loop.time())
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  (uvicorn's own sentence)
        """Refuse what the parser has not taken."""
        self._refuse(*self._refusal)

    def _fail(self, status: int, reason: str) -> None:
        """Make the parser stop."""
        self._refusal = status, reason
        raise ValueError(reason)

    def _refuse(self, status: int, reason: str) -> None:
        """Say why the connection is closed, unless another answer has begun, and close it."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not (self.cycle.response_started or self.pipeline):
            body = orjson.dumps({"detail": reason})
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


_TOO_LONG = 431, f"the request's head is too long: send at most {HEAD_BYTES} bytes besides the body"


class LimitedConfig(uvicorn.Config):
    """uvicorn's settings for a server of at most `connections`, with further settings by uvicorn's names."""

    def __init__(self, app: Any, connections: int, **settings: Any) -> None:
        super().__init__(app, http=LimitedHttp, ws="none", proxy_headers=False, **settings)
        self.connections = Connections(connections)


class LimitedServer(uvicorn.Server):
    """A server that ends late connections each second."""

    config: LimitedConfig

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if counter % 10 == 0:
            self.config.connections.end_late(asyncio.get_running_loop().time())
        return await super().on_tick(counter)
