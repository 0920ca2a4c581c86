"""Serves the chat page, and a stream of events for each question.

    GET  /       page; also /chat.css and /chat.js
    GET  /about  model and settings, as JSON
    POST /ask    {"question": str, "temperature": float | null} -> server-sent events, see `rlsys.apps.chat.conversation`
    any error    {"detail": one sentence}

Only the server's own page may call it. Requests for a foreign host name (DNS rebinding) or from another origin are
rejected. A body must be declared as JSON, which other pages cannot send without a preflight request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from rlsys.apps.chat.chat_settings import ChatSettings
from rlsys.apps.chat.conversation import Failed, Opened, as_dict, opened_in_terminal
from rlsys.apps.evaluation.evaluation_inputs import Model
from rlsys.errors import RunError, UserError
from rlsys.search.address import bind, is_foreign, is_trusted, own_names, url_of
from rlsys.search.connections import PAGE_CONNECTIONS, EventStream, GuestServer, LimitedConfig

_MAX_BYTES = 1 << 16
"""Largest request body, in bytes."""
_BODY_S = 10.0
"""Timeout for receiving a request body."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_log = logging.getLogger(__name__)


class Asking(BaseModel):
    """Request body of /ask."""

    model_config = ConfigDict(extra="forbid", strict=True)

    question: str
    temperature: float | None = Field(None, ge=0, le=10, allow_inf_nan=False)


def create_app(opened: Opened, names: frozenset[str]) -> FastAPI:
    """Return the application; it rejects requests for a host that is neither an IP address nor in `names`."""
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
        return {"engine": opened.engine, **shown}

    @app.post("/ask")
    async def ask(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _error(415, "Send the question as application/json.")
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > _MAX_BYTES:
                        break
        except TimeoutError:
            return _error(408, f"The request did not arrive within {_BODY_S:g} s: ask again.")
        except ClientDisconnect:  # Not a server error; nobody receives this response.
            return _error(400, "The request is incomplete: ask again.")
        if len(body) > _MAX_BYTES:
            return _error(413, f"The request is longer than {_MAX_BYTES} bytes: ask a shorter question.")
        try:
            asking = Asking.model_validate_json(bytes(body))
        except ValidationError as problem:
            first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "The body"
            return _error(422, f"{where}: {first['msg']}; send a question, and a temperature from 0 to 10 or null.")
        return EventStream(_stream(opened, asking))

    return app


async def serve(opened: Opened, sock: socket.socket, host: str) -> None:
    """Serve at the bound `sock`, reachable as `host`, until cancelled."""
    app, options = create_app(opened, own_names(host)), {"log_level": "error", "lifespan": "off"}
    config = LimitedConfig(app, PAGE_CONNECTIONS, **options, timeout_graceful_shutdown=2)
    async with GuestServer(config).serving(sock) as server:
        await asyncio.shield(server)


async def serve_chat(model: Model, settings: ChatSettings, engine: str, host: str, port: int) -> None:
    """Serve the page of a chat with `model` until cancelled; port 0 takes a free one."""
    with bind(host, port) as sock:
        async with opened_in_terminal(model, settings, engine) as chat:
            address, number = sock.getsockname()[:2]
            if not ipaddress.ip_address(address).is_loopback:
                print(f"Anyone who can reach {host}:{number} can ask questions: there is no password.", file=sys.stderr)
            print(f"Ask at {url_of(host, number)} (Ctrl-C ends it).", flush=True)
            await serve(chat, sock, host)


async def _stream(opened: Opened, asking: Asking) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(opened.conversation.ask(asking.question, asking.temperature)) as events:
            async for event in events:
                yield _message(as_dict(event))
    except (RunError, UserError) as problem:
        yield _message(as_dict(Failed.of(problem)))
    except Exception as problem:  # noqa: BLE001 (the client must receive a last event)
        _log.exception("a question has failed")
        reason = f"The question failed ({type(problem).__name__}): see the server's terminal, and ask again."
        yield _message(as_dict(Failed(reason)))


def _message(values: dict[str, object]) -> str:
    """Format a server-sent event. The JSON is ASCII, so no text can end its line."""
    return f"data: {json.dumps(values)}\n\n"


def _error(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"detail": sentence}, status)


def _refusal(request: Request, names: frozenset[str]) -> str:
    """Return the reason to reject a request; empty to accept it."""
    host = request.headers.get("host", "")
    if not is_trusted(host, names):
        return f"Host {host!r} is not a name of this server: use its IP address or this machine's name."
    headers = dict(request.scope["headers"])
    foreign = is_foreign(headers.get(b"origin"), headers.get(b"host"))
    return "Requests from other pages are rejected: open this server's own page." if foreign else ""
