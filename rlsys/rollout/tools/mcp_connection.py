"""Connects to an MCP server with the official SDK, and reconnects when the connection is lost.

Contract: all methods are called on one event loop. The server's program is a process group of its own, which has ended
when `close` returns; it also ends if this process is killed. A message beyond `max_answer_bytes` is never held in memory
as a whole: it becomes an error of its call. A tool is called at most once, because it may change something: a call is
sent again only if the server refused it, because it does not know the session (any more).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import Client, MCPError
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import INVALID_REQUEST, CallToolResult, ErrorData, JSONRPCError, jsonrpc_message_adapter

from rlsys.components import one_line
from rlsys.rollout.tools.interface import ToolError

if TYPE_CHECKING:
    from rlsys.rollout.tools.mcp import McpTools

FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
"""Pause before a server is started again; it doubles from the first to the last until a call succeeds."""
END_S = 1.0
"""Time for a program to end after its input is closed, and again after SIGTERM."""
_CLOSE_S, _POLL_S = 10.0, 0.01
_MAX_PAGES = 100
"""Maximum number of pages of a listing of tools."""
_READ_BYTES = 65_536
_SAID_CHARS = 300
"""Characters of the end of a program's stderr in an error."""
_ID = re.compile(rb'"id"\s*:\s*(\d+|"[^"\\]{0,64}")')
_HEAD_BYTES = 256
"""Beginning of an oversized message in which its id is looked for; the SDK's servers write the id first."""
# PR_SET_PDEATHSIG: SIGKILL for the program when the thread that started it ends, as it does when its process is killed.
_ENDS_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])"
)
_NO_SESSION = 404_404
"""Error code, which no server sends, of a call that was refused because the server does not know the session."""
_HTTP = httpx2.Timeout(5.0, read=None)
"""Time limits of HTTP; a call's own limit bounds the time to read its answer."""
_log = logging.getLogger(__name__)
Incoming = SessionMessage | Exception
Streams = tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]


class Offered(NamedTuple):
    """A tool that a server lists."""

    description: str
    parameters: Mapping[str, Any]


class CannotStart(Exception):
    """The server could not be reached; the text gives the reason."""


class Connection:
    """A connection to the server of `settings`, from construction to `close`."""

    def __init__(self, settings: McpTools) -> None:
        self._settings = settings
        self._first: asyncio.Future[Mapping[str, Offered]] = asyncio.get_running_loop().create_future()
        self._client: Client | None = None
        self._up, self._lost, self._closing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._trouble = ""
        """Reason why there is no connection."""
        self._end = ""
        """Clause that says how the program of the last attempt ended; empty if it has not."""
        self._pause_s = FIRST_PAUSE_S
        self._life = asyncio.create_task(self._live())

    async def started(self) -> Mapping[str, Offered]:
        """Return the server's tools by name once it has started. Raises CannotStart if its first start fails."""
        return await self._first

    async def call(self, name: str, arguments: dict[str, Any], wait_s: float) -> str:
        """Call a tool, and return its result as text. Raises ToolError.

        If the server is being started again, wait at most `wait_s` seconds for it.
        """
        until = asyncio.get_running_loop().time() + wait_s
        try:
            result = await self._result(name, arguments, until)
        except MCPError as error:
            raise ToolError(error.message) from None
        self._pause_s = FIRST_PAUSE_S
        text = text_of(result)
        if result.is_error:
            raise ToolError(text or "it gives no reason")
        return text

    async def _result(self, name: str, arguments: dict[str, Any], until: float, again: bool = True) -> CallToolResult:
        """Wait for a connection until the loop's time `until`, and call a tool. With `again`, do so once more if the server
        does not know the session. Raises MCPError and ToolError."""
        try:
            async with asyncio.timeout_at(until):
                while (client := self._client) is None:
                    await self._up.wait()
        except TimeoutError:
            raise ToolError(f"its server is not running: {self._trouble}") from None
        try:
            return await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == _NO_SESSION:
                self._lose(client, error.message)
                if again:
                    return await self._result(name, arguments, until, again=False)
            if self._client is not client:
                raise ToolError(f"its server has ended: {self._trouble}") from None
            raise
        except Exception as error:  # The SDK passes on results that it cannot read.
            raise ToolError(one_line(error)) from error

    async def close(self) -> None:
        """End the connection and the server's program; idempotent."""
        self._closing.set()
        self._lost.set()
        if self._client is None:  # It may be starting.
            self._life.cancel()
        await asyncio.wait([self._life], timeout=_CLOSE_S)
        self._life.cancel()

    def _lose(self, client: Client, reason: str) -> None:
        """Give up the connection `client`, unless a newer one has replaced it."""
        if self._client is client:
            self._client, self._trouble = None, reason
            self._up.clear()
            self._lost.set()

    async def _live(self) -> None:
        """Connect, hold the connection until it is lost, and connect again, until `close`."""
        while not self._closing.is_set():
            self._lost.clear()
            self._end = ""
            try:
                await self._hold()
            except Exception as error:  # noqa: BLE001, of a server's program or of the SDK
                self._trouble = self._end or _reason(error)
            self._client = None
            self._up.clear()
            if not self._first.done():
                self._first.set_exception(CannotStart(self._trouble))
                return
            if not self._closing.is_set():
                _log.warning("task.tools: the MCP server %s is gone: %s", self._settings.label, self._trouble)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._closing.wait()
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    async def _hold(self) -> None:
        """Connect, and return when the connection is lost or closed. Raises whatever prevents a connection."""
        limit_s = self._settings.start_timeout_s
        async with AsyncExitStack() as stack:
            transport = self._http() if self._settings.url else self._program()
            try:
                async with asyncio.timeout(limit_s):
                    client = await stack.enter_async_context(Client(transport, cache=None))
                    offered = await _listed(client)
            except TimeoutError:
                raise CannotStart(f"no list of tools within start_timeout_s={limit_s:g} s") from None
            if self._lost.is_set():
                raise CannotStart(self._end or "it was closed")
            self._client = client
            self._up.set()
            if not self._first.done():
                self._first.set_result(offered)
            await self._lost.wait()

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        settings = self._settings
        headers = {"Accept-Encoding": "identity", **settings.headers}
        if settings.token_env:
            headers["Authorization"] = f"Bearer {os.environ[settings.token_env].strip()}"
        most = settings.max_answer_bytes
        async with (
            httpx2.AsyncClient(headers=headers, timeout=_HTTP, transport=_Checked(most)) as http,
            streamable_http_client(settings.url, http_client=http, max_sse_event_size=most) as streams,
        ):
            yield streams

    @asynccontextmanager
    async def _program(self) -> AsyncIterator[Streams]:
        """Start the server's program and yield the streams of its messages; end the program."""
        settings = self._settings
        start = [sys.executable, "-I", "-S", "-c", _ENDS_WITH_PARENT, str(os.getpid())]
        given = {name: os.environ[name] for name in settings.env}
        process = await asyncio.create_subprocess_exec(
            *(start if sys.platform == "linux" else ()),
            *settings.command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=get_default_environment() | given,
            start_new_session=True,
        )
        said = bytearray()
        to_client, incoming = anyio.create_memory_object_stream[Incoming](0)
        outgoing, from_client = anyio.create_memory_object_stream[SessionMessage](0)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_write, process, from_client)
                group.start_soon(_keep_end, process, said)
                group.start_soon(self._read, process, to_client, said)
                try:
                    yield incoming, outgoing
                finally:
                    group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)

    async def _read(self, process: Process, to_client: MemoryObjectSendStream[Incoming], said: bytearray) -> None:
        """Pass on the messages of a program; when its output ends, the connection is lost."""
        assert process.stdout is not None
        async with to_client:
            async for line in _lines(process.stdout, self._settings.max_answer_bytes):
                with suppress(anyio.BrokenResourceError):
                    await to_client.send(SessionMessage(line))
            status = f"status {process.returncode}" if await _ended(process, END_S) else "its output has ended"
            last = said.decode("utf-8", "replace").strip().rpartition("\n")[2][-_SAID_CHARS:]
            self._end = " ".join(f"{status}{': ' if last else ''}{last}".split())
            if self._client is not None:
                self._lose(self._client, self._end)
            self._lost.set()


async def _listed(client: Client) -> dict[str, Offered]:
    """Return the tools of a server by name."""
    offered: dict[str, Offered] = {}
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        offered |= {tool.name: Offered(tool.description or "", tool.input_schema) for tool in page.tools}
        if (cursor := page.next_cursor) is None:
            return offered
    raise CannotStart(f"its list of tools has more than {_MAX_PAGES} pages")


def text_of(result: Any) -> str:
    """Return a result as the policy reads it. What is no text is named. Raises ToolError if nothing is text."""
    parts, left_out = [], []
    for block in result.content:
        resource = getattr(block, "resource", None)
        if (text := getattr(block, "text", None) or getattr(resource, "text", None)) is not None:
            parts.append(str(text))
        elif block.type == "resource_link":
            parts.append(f"{block.name}: {block.uri}")
        elif block.type != "text":
            kind = getattr(resource, "mime_type", None) or getattr(block, "mime_type", None) or "unknown type"
            left_out.append(f"[{block.type} ({kind}) left out]")
    if left_out and not parts:
        raise ToolError(f"its answer has no text: {' '.join(left_out)}")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join([*parts, *left_out])


async def _lines(stdout: asyncio.StreamReader, most: int) -> AsyncIterator[Any]:
    """Yield the messages in lines of at most `most` bytes; a longer one as an error of its request. Other lines are skipped."""
    line, too_long, strange = bytearray(), False, False
    while block := await stdout.read(_READ_BYTES):
        for part in block.splitlines(keepends=True):
            too_long = too_long or len(line) + len(part) > most
            line += part[:_HEAD_BYTES] if too_long else part
            if too_long:
                del line[_HEAD_BYTES:]
            if not part.endswith(b"\n"):
                continue
            message = _refusal(line, most) if too_long else _message(line)
            if message is not None:
                yield message
            elif line.strip() and not strange:
                strange = True
                _log.warning("task.tools: an MCP server writes lines that are no messages: %r", bytes(line[:80]))
            line, too_long = bytearray(), False


def _message(line: bytearray) -> Any:
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return None


def _refusal(head: bytearray, most: int) -> JSONRPCError | None:
    """Return an error for the request that an oversized message answers; None if its beginning names none."""
    found = _ID.search(head)
    if found is None:
        return None
    reason = ErrorData(code=INVALID_REQUEST, message=f"its answer is longer than max_answer_bytes={most}")
    return JSONRPCError(jsonrpc="2.0", id=json.loads(found[1]), error=reason)


async def _write(process: Process, from_client: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    async with from_client:
        async for each in from_client:
            with suppress(ConnectionError):  # `_read` sees the end of the program.
                process.stdin.write(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await process.stdin.drain()


async def _keep_end(process: Process, said: bytearray) -> None:
    """Keep the end of what a program writes to stderr."""
    assert process.stderr is not None
    while block := await process.stderr.read(_READ_BYTES):
        said += block
        del said[:-_READ_BYTES]


async def _end(process: Process) -> None:
    """End a program and its process group: close its input, then SIGTERM, then SIGKILL."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        if not await _ended(process, END_S):
            _kill(process, signal.SIGTERM)
            await _ended(process, END_S)
    finally:
        _kill(process, signal.SIGKILL)  # The program may have ended and left children in its group.
    await _ended(process, _CLOSE_S)
    with suppress(TimeoutError):  # Reading to the end closes the pipes.
        async with asyncio.timeout(END_S):
            for output in filter(None, (process.stdout, process.stderr)):
                while await output.read(_READ_BYTES):
                    pass


async def _ended(process: Process, within_s: float) -> bool:
    """Return True if a program ends in time. Polls, because `Process.wait` also waits for children that hold its output."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while process.returncode is None:
                await asyncio.sleep(_POLL_S)
    return process.returncode is not None


def _kill(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _reason(error: BaseException) -> str:
    """Return the first cause in `error` on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, CannotStart) else one_line(error)


class _Checked(httpx2.AsyncHTTPTransport):
    """Limits every body that is not an event stream; the SDK limits events. Turns status 404 for a call of a tool in a session
    into an error of the call, for which servers have different texts."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        unknown = response.status_code == httpx2.codes.NOT_FOUND and "mcp-session-id" in request.headers
        # The SDK sends other requests too after a call has run.
        if unknown and request.method == "POST" and json.loads(await request.aread()).get("method") == "tools/call":
            await response.aclose()
            reason = ErrorData(code=_NO_SESSION, message="it does not know the session")
            refusal = JSONRPCError(jsonrpc="2.0", id=None, error=reason)
            return httpx2.Response(response.status_code, json=refusal.model_dump(mode="json", by_alias=True))
        compressed = response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")
        if compressed or not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            response.stream = _Counted(
                response.stream, 0 if compressed else self._most, "compressed" if compressed else ""
            )
        return response


class _Counted(httpx2.AsyncByteStream):
    """A body that fails beyond `most` bytes, because it is `wrong` or too long; the SDK makes it an error of the call."""

    def __init__(self, stream: Any, most: int, wrong: str = "") -> None:
        self._stream, self._most = stream, most
        self._wrong = wrong or f"longer than max_answer_bytes={most}"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for block in self._stream:
            read += len(block)
            if read > self._most:
                raise httpx2.StreamError(f"its answer is {self._wrong}")
            yield block

    async def aclose(self) -> None:
        await self._stream.aclose()
