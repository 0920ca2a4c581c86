"""Which names a server that asks for no password may be called by.

A page elsewhere can have its own name point to this machine, and so have a visitor's browser ask a server here as if that
were its own (DNS rebinding). The browser then sends that name, which is refused. Addresses and this machine's own names
cannot be taken in this way.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def own_names(host: str) -> frozenset[str]:
    """This machine's names, and `host`, which it serves at."""
    return frozenset(name.lower() for name in ("localhost", host, socket.gethostname()))


def is_trusted(header: str, names: frozenset[str]) -> bool:
    """Whether a Host header (RFC 9110, 7.2: name or address, and perhaps a port) is an address or one of `names`."""
    name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower().removesuffix(".") in names
    return True


class HostGate:
    """ASGI middleware that refuses requests by other names, and says to browsers how careful to be with answers."""

    HEADERS = (
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cache-control", b"no-store"),
    )

    def __init__(self, app: ASGIApp, *, names: frozenset[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def careful(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [pair for pair in message["headers"] if pair[0] != b"cache-control"]
                message["headers"] = [*given, *self.HEADERS]
            await send(message)

        header = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"host"), "")
        if is_trusted(header, self._names):
            await self._app(scope, receive, careful)
            return
        refusal = PlainTextResponse(
            f"This server is not called {header!r}: ask it by its address or this machine's name.\n", 421
        )
        await refusal(scope, receive, careful)
