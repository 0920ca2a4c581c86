"""The retrieval server: Search-R1's HTTP contract over any `Retriever`.

    POST /retrieve  {"queries": [str], "topk": int | null, "return_scores": bool = false}
      with scores     {"result": [[{"document": {"id", "contents", ...}, "score": float}]]}
      without         {"result": [[{"id", "contents", ...}]]}
    GET  /health    {"status": "ok", "passages": int, ...}

A request that is wrong gets 4xx and {"detail": one sentence}; a server that cannot answer now gives 503 with
Retry-After. The port answers only once everything is loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect

from rlsys.search.address import DEFAULT_TOPK
from rlsys.search.retriever import Hit, Retriever
from rlsys.search.server.service import Overloaded, SearchService, ServerLimits

_RETRY_AFTER_S = 1
_SHUTDOWN_S = 5
_PARENT_POLL_S = 0.5
_log = logging.getLogger("uvicorn.error")


class RetrieveRequest(BaseModel):
    """Body of POST /retrieve."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def create_app(retriever: Retriever, topk: int = DEFAULT_TOPK, limits: ServerLimits | None = None) -> FastAPI:
    """The application; `topk` serves requests that leave it out."""
    limits = limits or ServerLimits()
    service: SearchService

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal service
        service = SearchService(retriever, limits)
        yield
        await service.close()

    app = FastAPI(title="rlsys retrieval", lifespan=lifespan, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return service.health()

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        asked = parse_request(await _read_body(request, limits), limits)
        try:
            hits = await service.retrieve(asked.queries, topk if asked.topk is None else asked.topk)
        except Overloaded as error:
            raise _unavailable(str(error)) from None
        except Exception as error:  # noqa: BLE001  a fault of the retriever must not end as a bare 500
            _log.exception("a search failed")
            raise _unavailable(f"the search failed ({type(error).__name__}): see the server's log") from None
        body = {"result": [_shape(line, with_scores=asked.return_scores) for line in hits]}
        return Response(orjson.dumps(body), media_type="application/json")

    return app


def parse_request(body: bytes, limits: ServerLimits) -> RetrieveRequest:
    """Check a body. Raises HTTPException, 400 for what is not JSON and 422 for what is not a request."""
    try:
        request = RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise HTTPException(400, f"the body is not JSON: {first['msg']}") from None
        where = ".".join(map(str, first["loc"])) or "the body"
        shape = '{"queries": [str], "topk": int or null, "return_scores": bool}'
        raise HTTPException(422, f"{where}: {first['msg']}; send {shape}") from None
    if not request.queries:
        raise HTTPException(422, "queries: the list is empty; send at least one query")
    if len(request.queries) > limits.max_queries:
        raise HTTPException(
            422, f"queries: {len(request.queries)} are too many; send at most {limits.max_queries}"
        )
    longest = max(range(len(request.queries)), key=lambda row: len(request.queries[row]))
    if len(request.queries[longest]) > limits.max_query_chars:
        length = len(request.queries[longest])
        raise HTTPException(
            422, f"queries.{longest}: {length} characters are too many; send at most {limits.max_query_chars}"
        )
    if request.topk is not None and not 1 <= request.topk <= limits.max_topk:
        raise HTTPException(422, f"topk: {request.topk} is out of range; send 1 to {limits.max_topk}")
    return request


async def _read_body(request: Request, limits: ServerLimits) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(limits.request_timeout_s):
            async for block in request.stream():
                body += block
                if len(body) > limits.max_body_bytes:
                    raise HTTPException(
                        413, f"the body is too large; send at most {limits.max_body_bytes} bytes"
                    )
    except TimeoutError:
        raise HTTPException(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body is incomplete") from None
    return bytes(body)


def _shape(hits: Sequence[Hit], *, with_scores: bool) -> list[Any]:
    if with_scores:
        return [{"document": hit.document, "score": hit.score} for hit in hits]
    return [hit.document for hit in hits]


def _unavailable(reason: str) -> HTTPException:
    return HTTPException(503, reason, headers={"Retry-After": str(_RETRY_AFTER_S)})
