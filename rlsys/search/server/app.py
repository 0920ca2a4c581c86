"""The search server as an ASGI application: Search-R1's contract (`contract`) over any retriever.

    POST /retrieve, /rerank, /access      GET /health, /metrics (Prometheus), /openapi.json, /docs

A request that is wrong gets 4xx, a queue that is full 429, a server that cannot answer now 503, each with
`{"detail": one sentence}`; 429 and 503 come with Retry-After. A client that hangs up is not searched for any more.
Without a token, requests by a name that is not the server's and requests of other pages get 403 (`hosts`).
With a token, all but /health, /openapi.json and /docs want it, and /health says only that it is well without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from rlsys.search.address import DEFAULT_TOPK
from rlsys.search.page_store import PageSource
from rlsys.search.retriever import Retriever
from rlsys.search.server.contract import (
    AccessAnswer,
    AccessRequest,
    Body,
    Contract,
    Failure,
    Health,
    RankedAnswer,
    Refused,
    RerankRequest,
    RetrieveRequest,
)
from rlsys.search.server.gate import Gate, failure
from rlsys.search.server.limits import SMALL_BODY_BYTES, ServerLimits
from rlsys.search.server.metrics import Metrics
from rlsys.search.server.reranking import Scorer
from rlsys.search.server.service import NO_PAGES, NO_RERANKER, Busy, SearchService, Unavailable

PATHS = ("/retrieve", "/rerank", "/access", "/health", "/metrics")
_REASONS = {
    400: "The body is not JSON, or not whole.",
    401: "The bearer token is missing or wrong.",
    403: "The server was asked by a name that is not its own, or from another page.",
    404: "The server has no reranker, or no pages.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not said to be plain JSON.",
    422: "The body is JSON, but no such request, or beyond a limit.",
    429: "Too much waits already.",
    503: "No answer now: a time-out, a fault, or a server that shuts down.",
}
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""OpenTelemetry, which reads the environment in each request to see whether it is on."""
_log = logging.getLogger("uvicorn.error")
Result = TypeVar("Result")


def create_app(
    retriever: Retriever,
    topk: int = DEFAULT_TOPK,
    limits: ServerLimits | None = None,
    *,
    reranker: Scorer | None = None,
    pages: PageSource | None = None,
    token: str | None = None,
    trusts: Callable[[str], bool] | None = None,
) -> FastAPI:
    """The application; `topk` serves requests that leave it out. What it is given stays the caller's to close.

    Without a `token` it answers only requests whose Host header `trusts` accepts.
    """
    limits = limits or ServerLimits()
    metrics = Metrics()
    service: SearchService

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal service
        service = SearchService(retriever, topk, limits, metrics, reranker=reranker, pages=pages)
        yield
        await service.close()

    async def health(request: Request) -> Response:
        return _written(service.health() if request.state.trusted else {"status": "ok"})

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app = FastAPI(title="rlsys search server", version="1", redoc_url=None, lifespan=lifespan, telemetry=_NO_TELEMETRY)
    app.add_middleware(Gate, metrics=metrics, paths=PATHS, max_requests=limits.max_requests, token=token, trusts=trusts)
    table = _Routes(app, limits, secured=token is not None)
    table.post("/retrieve", RetrieveRequest, RankedAnswer, lambda asked: service.retrieve(asked))
    table.post(
        "/rerank",
        RerankRequest,
        RankedAnswer,
        lambda asked: service.rerank(asked),
        NO_RERANKER if reranker is None else "",
    )
    table.post(
        "/access",
        AccessRequest,
        AccessAnswer,
        lambda asked: service.access(asked),
        NO_PAGES if pages is None else "",
    )
    table.get("/health", health, {200: {"model": Health}}, secured=False)
    table.get("/metrics", show_metrics, {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    return app


class _DocumentedRoute(APIRoute):
    """A route that FastAPI describes and leaves alone: its endpoint takes the request and gives the response.

    FastAPI's own reading, checking and writing of bodies has no limits, and takes half of a short request's time.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


class _Routes:
    """Adds routes to an application, each with its description."""

    def __init__(self, app: FastAPI, limits: ServerLimits, *, secured: bool) -> None:
        self._app = app
        self._limits = limits
        self._contract = Contract(limits)
        self._secured = secured
        self._room = _Room(2 * limits.max_body_bytes)

    def post(
        self,
        path: str,
        asks: type[Body],
        gives: type[BaseModel],
        answer: Callable[[Body], Coroutine[Any, Any, Any]],
        lacks: str | None = None,
    ) -> None:
        """A body `asks` is answered by `{"result": await answer(body)}`, or by 404 where the server `lacks` something.

        None cannot be lacking; otherwise it is the sentence that says what is, empty where nothing is.
        """

        async def endpoint(request: Request) -> Response:
            if lacks:
                return failure(404, lacks)
            held = _Held(self._room)
            try:
                asked = self._contract.parse(asks, await _read_body(request, self._limits, held))
                return _written({"result": await _unless_gone(request, answer(asked))})
            except Refused as error:
                return failure(error.status, str(error), {"Connection": "close"} if error.status in (408, 413) else {})
            except Busy as error:
                return failure(429, str(error))
            except Unavailable as error:
                return failure(503, str(error))
            finally:
                held.release()

        endpoint.__doc__ = asks.__doc__
        responses = {200: {"model": gives}} | _failures(
            (400, 408, 413, 415, 422, 429, 503, *([] if lacks is None else [404]))
        )
        content = {"application/json": {"schema": self._contract.schema(asks)}}
        self._add("POST", path, endpoint, responses, body={"required": True, "content": content})

    def get(
        self,
        path: str,
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]],
        responses: dict[int | str, dict[str, Any]],
        *,
        secured: bool = True,
    ) -> None:
        """A route without a body; `secured` where it wants the token."""
        self._add("GET", path, endpoint, responses, secured=secured)

    def _add(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]],
        responses: dict[int | str, dict[str, Any]],
        *,
        body: dict[str, Any] | None = None,
        secured: bool = True,
    ) -> None:
        refusal = 403 if not self._secured else 401 if secured else None
        secured = secured and self._secured
        self._app.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=path.strip("/"),
            response_model=None,
            responses=responses | (_failures((refusal,)) if refusal else {}),
            # The gate checks the token; this only describes that.
            dependencies=[Security(HTTPBearer(scheme_name="token", auto_error=False))] if secured else None,
            openapi_extra=None if body is None else {"requestBody": body},
            route_class_override=_DocumentedRoute,
        )


def _failures(statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    described: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        described[status] = {"model": Failure, "description": _REASONS[status]}
        if status in (429, 503):
            described[status]["headers"] = {
                "Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer"}}
            }
    return described


class _Room:
    """Bytes of bodies that may be in work together."""

    def __init__(self, free: int) -> None:
        self.free = free


class _Held:
    """Bytes that one body takes of the room; a small one takes none."""

    def __init__(self, room: _Room) -> None:
        self._room = room
        self._bytes = 0

    def grow(self, size: int) -> None:
        """Take what a body of `size` bytes needs. Raises Busy where there is no room for it."""
        if size <= SMALL_BODY_BYTES:
            return
        if size - self._bytes > self._room.free:
            raise Busy(f"large bodies take all room already: try again later, or send {SMALL_BODY_BYTES} bytes at most")
        self._room.free -= size - self._bytes
        self._bytes = size

    def release(self) -> None:
        """Give back what was taken."""
        self._room.free += self._bytes
        self._bytes = 0


async def _read_body(request: Request, limits: ServerLimits, held: _Held) -> bytearray:
    """The body of a request. Raises Refused, and Busy where others take too much memory.

    What is too large is read to its end, and forgotten, as far as twice the limit: a client that is still sending
    when the connection is closed does not see the answer.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refused(415, f"Content-Type {kind!r} is not JSON; send application/json")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise Refused(415, f"Content-Encoding {coding!r} is not supported; send the body as it is")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for block in request.stream():
                size += len(block)
                if size <= limits.max_body_bytes:
                    held.grow(size)
                    body += block
                    continue
                body.clear()
                held.release()
                if size > 2 * limits.max_body_bytes:
                    break
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {limits.body_timeout_s:g} s") from None
    except ClientDisconnect:
        raise Refused(400, "the body is incomplete") from None
    except asyncio.CancelledError:
        # Only a server that shuts down cancels a request, and it waits for no more than the answer.
        raise Unavailable("the server is shutting down") from None
    if size > limits.max_body_bytes:
        raise Refused(413, f"the body is too large; send at most {limits.max_body_bytes} bytes")
    return body


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client hangs up or the server shuts down."""
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
            raise Refused(499, "the client hung up") from None
        raise Unavailable("the server is shutting down") from None
    finally:
        watching.cancel()


def _written(body: dict[str, Any]) -> Response:
    try:
        text = _dumped(body)
    except (TypeError, ValueError) as error:
        _log.exception("an answer is not JSON")
        raise Unavailable(f"a document cannot be written as JSON ({error})") from None
    return Response(text, media_type="application/json")


def _dumped(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        # It knows no integer beyond 64 bits and no half of a surrogate pair; documents may hold both.
        return json.dumps(body, allow_nan=False).encode()
