"""Implements the search server as an ASGI application: Search-R1's contract (see `contract`) over any retriever.

    POST /retrieve, /rerank, /access      GET /health, /metrics (Prometheus), /openapi.json, /docs
    POST /mcp, if asked for: the same as MCP tools (`mcp`)

Errors: 4xx for an invalid request, 429 for a full queue, 503 for a temporary fault, each with one sentence,
`{"detail": ...}`; 429 and 503 have Retry-After. If the client disconnects, its search is cancelled.

Access to a server without a token: a request gets 403 if its Host is foreign (DNS rebinding) or its Origin is another
site. Access to a server with a token: every path that is not in `OPEN`, even an unknown path, requires
`Authorization: Bearer <token>`; without this header, /health returns only the status.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from hmac import compare_digest
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlsys.search.address import DEFAULT_TOPK, is_foreign
from rlsys.search.retrieval import PageSource, Retriever
from rlsys.search.server import mcp
from rlsys.search.server.contract import (
    SMALL_BODY_BYTES,
    AccessAnswer,
    AccessRequest,
    Body,
    Contract,
    Health,
    RankedAnswer,
    RequestRefused,
    RerankRequest,
    RetrieveRequest,
    ServerLimits,
)
from rlsys.search.server.service import NO_PAGES, NO_RERANKER, Metrics, SearchService

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from rlsys.search.encoders.encoder import Reranker

PATHS = frozenset({"/retrieve", "/rerank", "/access", "/health", "/metrics", mcp.PATH})
"""Paths counted by name in metrics; others are counted as "other", which bounds the number of labels."""
OPEN = frozenset({"/health", "/openapi.json", "/docs"})  # paths that require no token
RETRY_AFTER_S = 1
_QUOTED_CHARS = 200
_REASONS = {
    400: "The body is not JSON, or incomplete.",
    401: "The bearer token is missing or wrong.",
    403: "The Host is not a name of this server, or the Origin is another page.",
    404: "The server has no reranker, or no pages.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "Content-Type or Content-Encoding is not plain JSON.",
    422: "The body is JSON, but not a valid request, or beyond a limit.",
    429: "The queue is full.",
    503: "Temporarily unavailable: a timeout, a fault, or a shutdown.",
}
# Telemetry is off, because OpenTelemetry would read the environment in every request.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
_log = logging.getLogger("uvicorn.error")
Result = TypeVar("Result")
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]
Responses = dict[int | str, dict[str, Any]]


def create_app(
    retriever: Retriever,
    topk: int = DEFAULT_TOPK,
    limits: ServerLimits | None = None,
    *,
    reranker: Reranker | None = None,
    pages: PageSource | None = None,
    token: str | None = None,
    trusts: Callable[[str], bool] | None = None,
    with_mcp: bool = False,
) -> FastAPI:
    """Create the application. The caller owns and closes the retriever, reranker and pages.

    Without a `token`, requests are rejected unless `trusts` returns True for their Host header. `with_mcp` adds the MCP
    tools.
    """
    limits = limits or ServerLimits()
    metrics = Metrics()
    service: SearchService

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal service
        service = SearchService(retriever, topk, limits, metrics, reranker=reranker, pages=pages)
        async with AsyncExitStack() as stack:
            if tools is not None:
                await stack.enter_async_context(tools.session_manager.run())
            yield
        await service.close()

    async def health(request: Request) -> Response:
        return _written(service.health() if request.state.trusted else {"status": "ok"})

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    tools = mcp.mcp_server(lambda: service, limits, pages=pages is not None) if with_mcp else None
    app = FastAPI(title="rlsys search server", version="1", redoc_url=None, lifespan=lifespan, telemetry=_NO_TELEMETRY)
    app.add_middleware(RequestGate, metrics=metrics, max_requests=limits.max_requests, token=token, trusts=trusts)
    routes = _Routes(app, limits, secured=token is not None)
    routes.post("/retrieve", RetrieveRequest, RankedAnswer, lambda asked: service.retrieve(asked))
    no_reranker, no_pages = NO_RERANKER if reranker is None else "", NO_PAGES if pages is None else ""
    routes.post("/rerank", RerankRequest, RankedAnswer, lambda asked: service.rerank(asked), no_reranker)
    routes.post("/access", AccessRequest, AccessAnswer, lambda asked: service.access(asked), no_pages)
    routes.add("GET", "/health", health, {200: {"model": Health}}, secured=False)
    routes.add("GET", "/metrics", show_metrics, {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    if tools is not None:
        routes.add_mcp(tools)
    return app


class RequestGate:
    """Outermost ASGI middleware: authorises and counts requests, and sets `scope["state"]["trusted"]`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        max_requests: int,
        token: str | None,
        trusts: Callable[[str], bool] | None,
    ) -> None:
        self._app, self._metrics, self._max_requests = app, metrics, max_requests
        self._wanted = None if token is None else f"Bearer {token}".encode()
        # Cached, because clients repeat the same Host header.
        self._trusts = None if trusts is None else lru_cache(256)(trusts)
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._inside += 1
        try:
            await (self._refusal(scope) or self._app)(scope, receive, noting)
        finally:
            self._inside -= 1
            path = scope["path"] if scope["path"] in PATHS else "other"
            self._metrics.request(path, status, perf_counter() - began)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the error response to a rejected request, or None to admit it."""
        if self._wanted is None and (reason := self._foreign_origin(dict(scope["headers"]))):
            return failure(403, reason)
        # The scheme is case-insensitive (RFC 9110, 11.1).
        value: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, secret = value.partition(b" ")
        shown = b"Bearer " + secret.strip() if scheme.lower() == b"bearer" else b""
        trusted = self._wanted is None or compare_digest(shown, self._wanted)
        scope.setdefault("state", {})["trusted"] = trusted
        if scope["path"] in OPEN:
            return None
        if not trusted:
            reason = "this server needs its bearer token: send Authorization: Bearer TOKEN"
            return failure(401, reason, {"WWW-Authenticate": "Bearer"})
        if self._inside > self._max_requests:
            return failure(429, f"{self._max_requests} requests are in flight already: try again later")
        return None

    def _foreign_origin(self, headers: dict[bytes, bytes]) -> str:
        """Return the reason to reject a request that a browser may send for another page, or an empty string."""
        host = headers.get(b"host")
        name = None if host is None else host.decode("latin-1")  # every browser sends a Host
        if name is not None and self._trusts is not None and not self._trusts(name):
            remedy = "use its IP address or machine name, or start it with --allowed-host NAME or with a token"
            return f"Host {name[:_QUOTED_CHARS]!r} is not a name of this server: {remedy}"
        if is_foreign(headers.get(b"origin"), host):
            return "requests from another web page are rejected: start the server with a token, and send it"
        return ""


def failure(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error response with one sentence; 429 and 503 get Retry-After."""
    retry = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return Response(orjson.dumps({"detail": reason}), status, retry | (headers or {}), media_type="application/json")


class _DocumentedRoute(APIRoute):
    """A route that FastAPI only documents.

    FastAPI's body parsing has no limits, and doubles the time of a short request.
    """

    def get_route_handler(self) -> Endpoint:
        return self.endpoint


class _Application:
    """Keeps Starlette from taking an ASGI application for a function of a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Routes:
    """Adds routes with their OpenAPI description to an application."""

    def __init__(self, app: FastAPI, limits: ServerLimits, *, secured: bool) -> None:
        self._app, self._limits, self._secured = app, limits, secured
        self._contract = Contract(limits)
        self.free_bytes = 2 * limits.max_body_bytes
        """Remaining bytes of the memory budget shared by all large bodies in flight."""

    def post(
        self,
        path: str,
        asks: type[Body],
        gives: type[BaseModel],
        answer: Callable[[Body], Coroutine[Any, Any, Any]],
        lacking: str | None = None,
    ) -> None:
        """Add a POST route that parses a body as `asks` and responds `{"result": await answer(body)}`.

        `lacking` is the reason why the server cannot answer: every response is then 404. It is empty if the server can
        answer. None is for routes that every server can answer: their documentation lists no 404.
        """

        async def endpoint(request: Request) -> Response:
            if lacking:
                return failure(404, lacking)
            held = _HeldBytes(self)
            try:
                asked = self._contract.parse(asks, await _read_body(request, self._limits, held))
                return _written({"result": await _unless_gone(request, answer(asked))})
            except RequestRefused as error:
                return failure(error.status, str(error), {"Connection": "close"} if error.status in (408, 413) else {})
            finally:
                held.hold(0)

        endpoint.__doc__ = asks.__doc__
        responses: Responses = {200: {"model": gives}}
        responses |= _failures((400, 408, 413, 415, 422, 429, 503, *([] if lacking is None else [404])))
        content = {"application/json": {"schema": self._contract.schema(asks)}}
        extra = {"requestBody": {"required": True, "content": content}}
        self.add("POST", path, endpoint, responses, openapi_extra=extra)

    def add_mcp(self, tools: MCPServer[Any]) -> None:
        """Add the MCP tools, without sessions. `RequestGate` checks Host, Origin and token."""
        from mcp.server.transport_security import TransportSecuritySettings

        unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        most = self._limits.max_body_bytes
        inner = tools.streamable_http_app(
            stateless_http=True, json_response=True, transport_security=unchecked, max_request_body_size=most
        )

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            held = _HeldBytes(self)
            try:
                body: bytes | None = bytes(await _read_body(Request(scope, receive), self._limits, held))

                async def again() -> Message:
                    nonlocal body
                    if body is None:
                        return await receive()
                    message, body = {"type": "http.request", "body": body, "more_body": False}, None
                    return message

                await inner(scope, again, send)
            except RequestRefused as error:
                await failure(error.status, str(error), {"Connection": "close"})(scope, receive, send)
            finally:
                held.hold(0)

        self._app.router.routes.append(Route(mcp.PATH, _Application(answer), methods=["POST"]))

    def add(
        self, method: str, path: str, endpoint: Endpoint, responses: Responses, *, secured: bool = True, **more: Any
    ) -> None:
        """Add a route; `secured` routes require the token if the server has one."""
        refusal = 403 if not self._secured else 401 if secured else None
        self._app.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=path.strip("/"),
            response_model=None,
            responses=responses | (_failures((refusal,)) if refusal else {}),
            # Documentation only; `RequestGate` checks the token.
            dependencies=[Security(HTTPBearer(scheme_name="token", auto_error=False))] if refusal == 401 else None,
            route_class_override=_DocumentedRoute,
            **more,
        )


def _failures(statuses: Iterable[int]) -> Responses:
    wait = {"Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer"}}}
    return {
        status: {"model": Contract.Failure, "description": _REASONS[status]}
        | ({"headers": wait} if status in (429, 503) else {})
        for status in statuses
    }


@dataclass(slots=True)
class _HeldBytes:
    """Share of one body in the memory budget; a small body takes no share."""

    _routes: _Routes
    _bytes: int = 0

    def hold(self, size: int) -> None:
        """Resize the share to a body of `size` bytes; 0 releases it. Raises RequestRefused beyond the budget."""
        size = size if size > SMALL_BODY_BYTES else 0
        if size - self._bytes > self._routes.free_bytes:
            reason = f"memory for large bodies is used up: try again later, or send at most {SMALL_BODY_BYTES} bytes"
            raise RequestRefused(429, reason)
        self._routes.free_bytes -= size - self._bytes
        self._bytes = size


async def _read_body(request: Request, limits: ServerLimits, held: _HeldBytes) -> bytearray:
    """Read the body of a request. Raises RequestRefused, also if other bodies use up the memory budget.

    A body beyond the limit is discarded, but reading continues up to twice the limit. Otherwise the connection would
    close while the client is still sending, and the client would not see the response.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestRefused(415, f"Content-Type {kind!r} is not JSON: send application/json")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise RequestRefused(415, f"Content-Encoding {coding!r} is not supported: send the body without encoding")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for block in request.stream():
                size += len(block)
                if size <= limits.max_body_bytes:
                    held.hold(size)
                    body += block
                    continue
                body.clear()
                held.hold(0)
                if size > 2 * limits.max_body_bytes:
                    break
    except TimeoutError:
        raise RequestRefused(408, f"the body did not arrive within {limits.body_timeout_s:g} s") from None
    except ClientDisconnect:
        raise RequestRefused(400, "the body is incomplete") from None
    except asyncio.CancelledError:
        # Only a shutdown cancels a request here; the server still sends this response.
        raise RequestRefused(503, "the server is shutting down") from None
    if size > limits.max_body_bytes:
        raise RequestRefused(413, f"the body is too large: send at most {limits.max_body_bytes} bytes")
    return body


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. On a client disconnect or a shutdown, cancel `work` and raise RequestRefused."""
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        task.uncancel()
        if watching.done():
            raise RequestRefused(499, "the client hung up") from None
        raise RequestRefused(503, "the server is shutting down") from None
    finally:
        watching.cancel()


def _written(body: dict[str, Any]) -> Response:
    try:
        try:
            text = orjson.dumps(body)
        except orjson.JSONEncodeError:
            # orjson rejects integers beyond 64 bits and lone surrogates, which documents may contain.
            text = json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        _log.exception("an answer is not JSON")
        raise RequestRefused(503, f"a document cannot be written as JSON ({error})") from None
    return Response(text, media_type="application/json")
