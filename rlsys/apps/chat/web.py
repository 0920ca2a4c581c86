"""Serves a page to ask from, and a stream of events for each question.

    GET  /       the page; its style and its script lie beside it
    GET  /about  what is asked, as JSON
    POST /ask    {"question": str, "temperature": float | null} -> server-sent events, see `rlsys.apps.chat.conversation`
    any error    {"detail": one sentence}

Only pages from here may ask: a request that names another host than an address or one of this machine's names (DNS
rebinding) or comes from another origin is refused, and a body must say that it is JSON, which other pages may not send
unasked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, contextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rlsys.apps.chat.chat_settings import ChatSettings
from rlsys.apps.chat.conversation import Failed, Opened, as_dict, opened_in_terminal
from rlsys.apps.evaluation.evaluation_inputs import EngineName, Model
from rlsys.errors import RunError, UserError
from rlsys.search.address import bind, is_foreign, is_trusted, own_names
from rlsys.search.connections import PAGE_CONNECTIONS, LimitedConfig, LimitedServer

_MOST_BYTES = 1 << 16
"""Largest body of a request, in bytes."""
_BODY_S = 10.0
"""Time that the body of a request may take to arrive."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_log = logging.getLogger(__name__)


class Asking(BaseModel):
    """A request to /ask."""

    model_config = ConfigDict(extra="forbid", strict=True)

    question: str
    temperature: float | None = Field(None, ge=0, le=10, allow_inf_nan=False)


def create_app(opened: Opened, names: frozenset[str]) -> FastAPI:
    """The application. Requests for a host that is neither an address nor one of `names` are refused."""
    app = FastAPI(title="rlsys chat", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        refusal = _refusal(request, names)
        response = _error(403, refusal) if refusal else await call(request)
        response.headers.update(_HEADERS)
        return response

    def add_file(path: str, name: str) -> None:
        @app.get(path)
        async def send() -> FileResponse:
            return FileResponse(Path(__file__).with_name("static") / name)

    for path, name in {"/": "chat.html", "/chat.css": "chat.css", "/chat.js": "chat.js"}.items():
        add_file(path, name)

    @app.get("/about")
    async def about() -> dict[str, object]:
        shown = {name: getattr(opened, name) for name in ("model", "search", "max_turns", "temperature")}
        return {"engine": str(opened.engine), **shown}

    @app.post("/ask")
    async def ask(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _error(415, "Send the question as application/json.")
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > _MOST_BYTES:
                        break
        except TimeoutError:
            return _error(408, f"The request did not arrive within {_BODY_S:g} s: ask again.")
        except ClientDisconnect:  # Nobody hears it, and it is no fault of the server's.
            return _error(400, "The request is incomplete: ask again.")
        if len(body) > _MOST_BYTES:
            return _error(413, f"The request is longer than {_MOST_BYTES} bytes: ask a shorter question.")
        try:
            asking = Asking.model_validate_json(bytes(body))
        except ValidationError as problem:
            first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "The body"
            return _error(422, f"{where}: {first['msg']}; send a question, and a temperature from 0 to 10 or null.")
        return _Events(_stream(opened, asking))

    return app


async def serve(opened: Opened, sock: socket.socket, host: str) -> None:
    """Serve at the bound `sock`, which others know as `host`, until cancelled."""
    app, options = create_app(opened, own_names(host)), {"log_level": "error", "lifespan": "off"}
    config = LimitedConfig(app, PAGE_CONNECTIONS, **options, timeout_graceful_shutdown=2)
    server = _Server(config)
    sock.listen(config.backlog)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


async def serve_chat(model: Model, settings: ChatSettings, engine: EngineName, host: str, port: int) -> None:
    """Serve the page of a chat with `model` until cancelled; port 0 takes a free one."""
    with bind(host, port) as sock:
        async with opened_in_terminal(model, settings, engine) as chat:
            address, number = sock.getsockname()[:2]
            if not ipaddress.ip_address(address).is_loopback:
                print(f"Whoever reaches {host}:{number} can ask: no password is asked for.", file=sys.stderr)
            print(f"Ask at http://{f'[{host}]' if ':' in host else host}:{number} (Ctrl-C ends it).", flush=True)
            await serve(chat, sock, host)


class _Server(LimitedServer):
    """A server that leaves signals to the command that it is part of."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn calls it around all that it does."""
        yield


class _Events(StreamingResponse):
    """Server-sent events, whose source is closed also where the client leaves while one of them is sent."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _stream(opened: Opened, asking: Asking) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(opened.conversation.ask(asking.question, asking.temperature)) as events:
            async for event in events:
                yield _message(as_dict(event))
    except (RunError, UserError) as problem:
        yield _message(as_dict(Failed.of(problem)))
    except Exception as problem:  # noqa: BLE001 (whoever has asked would wait for a last event)
        _log.exception("a question has failed")
        reason = f"It has failed ({type(problem).__name__}): see the terminal of the server, and ask again."
        yield _message(as_dict(Failed(reason)))


def _message(values: dict[str, object]) -> str:
    """A server-sent event. The JSON is ASCII, so no text can end its line."""
    return f"data: {json.dumps(values)}\n\n"


def _error(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"detail": sentence}, status)


def _refusal(request: Request, names: frozenset[str]) -> str:
    """Why a request is not answered; empty where it is."""
    host = request.headers.get("host", "")
    if not is_trusted(host, names):
        return f"This server is not called {host!r}: open it at its address, or at this machine's name."
    headers = dict(request.scope["headers"])
    foreign = is_foreign(headers.get(b"origin"), headers.get(b"host"))
    return "Another page may not ask here: open this one." if foreign else ""
