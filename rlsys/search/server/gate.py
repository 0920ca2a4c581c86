"""The outermost layer of the server: who may come in, how many at once, and what became of each request.

Without a token, a request that another page has a browser send is refused: one that comes by a name which is not the
server's (DNS rebinding), and one with the Origin of another page.
With a token, every path needs it as `Authorization: Bearer <token>` but those of `OPEN`, also a path that does
not exist. Whether a request showed it is left in the ASGI scope's state under "trusted".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from hmac import compare_digest
from time import perf_counter

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlsys.search.hosts import is_foreign
from rlsys.search.server.metrics import Metrics

OPEN = frozenset({"/health", "/openapi.json", "/docs"})
"""Paths that need no token. /health says little to those without it."""
RETRY_AFTER_S = 1
_QUOTED_CHARS = 200


class Gate:
    """ASGI middleware. Counts requests to `paths` by name and the rest as "other", so that names stay few."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        paths: Collection[str],
        max_requests: int,
        token: str | None = None,
        trusts: Callable[[str], bool] | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._max_requests = max_requests
        self._wanted = None if token is None else f"Bearer {token}".encode()
        # Clients send the same one again and again.
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
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.request(path, status, perf_counter() - began)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that may not come in."""
        if self._wanted is None and (reason := self._stranger(scope)):
            return failure(403, reason)
        trusted = self._wanted is None or compare_digest(_credentials(scope), self._wanted)
        scope.setdefault("state", {})["trusted"] = trusted
        if not trusted and scope["path"] not in OPEN:
            reason = "this server needs its bearer token: send Authorization: Bearer TOKEN"
            return failure(401, reason, {"WWW-Authenticate": "Bearer"})
        if self._inside > self._max_requests and scope["path"] not in OPEN:
            return failure(429, f"{self._max_requests} requests are in work already: try again later")
        return None

    def _stranger(self, scope: Scope) -> str:
        """Why a request may come from another page in a browser; empty where it cannot."""
        headers = dict(scope["headers"])
        host = headers.get(b"host")
        # Every browser names one.
        if host is not None and self._trusts is not None and not self._trusts(host.decode("latin-1")):
            return (
                f"this server is not known as {host.decode('latin-1')[:_QUOTED_CHARS]!r}: ask it by its address or its "
                "machine's name, or start it with --allowed-host NAME or with a token"
            )
        if is_foreign(headers.get(b"origin"), host):
            return "another page may not ask this server: start it with a token, and send that"
        return ""


def failure(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    """The answer that says in one sentence why there is none; one that may be retried says when."""
    retry = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return Response(orjson.dumps({"detail": reason}), status, retry | (headers or {}), media_type="application/json")


def _credentials(scope: Scope) -> bytes:
    """The Authorization header, its scheme in any case (RFC 9110, 11.1) made `Bearer`."""
    value: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, secret = value.partition(b" ")
    return b"Bearer " + secret.strip() if scheme.lower() == b"bearer" else b""
