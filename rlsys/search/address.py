"""The default address of a search server, the taking of a port, and the names that a server may be called by.

A page elsewhere can have its own name point to this machine, and so have a visitor's browser ask a server here as if
that were its own (DNS rebinding). The browser then sends that name, which is refused. Addresses and this machine's own
names cannot be taken in this way.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlsys.errors import Code, UserError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_TOPK = 3
TOKEN_VARIABLE = "RLSYS_SEARCH_TOKEN"  # environment variable with the bearer token that a server asks for
_BIND_CODES: dict[int, Code] = {errno.EADDRINUSE: "in_use", errno.EACCES: "denied"}
_INNER = (".local", ".localdomain", ".internal", ".lan", ".svc")


def is_url(text: str) -> bool:
    """True for what can be the address of a server: http or https, a host, nothing secret, no query."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return usable and not (parts.username or parts.query or parts.fragment)


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet; port 0 takes a free one. Raises UserError when it cannot be had."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    if port != 0:  # one that was served from a moment ago can be had again; a free one must not be shared
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OverflowError:
        sock.close()
        reason = f"cannot serve at {host}:{port}: choose a port of 0 to 65535."
        raise UserError(reason, code="out_of_range", key=f"{host}:{port}") from None
    except OSError as error:
        sock.close()
        place, code = f"{host}:{port}", _BIND_CODES.get(error.errno or 0, "not_found")
        reason = f"cannot serve at {place} ({error}): choose another host or port."
        raise UserError(reason, code=code, key=place) from None
    return sock


def own_names(*more: str) -> frozenset[str]:
    """This machine's names, and `more` of what it serves at."""
    return frozenset(name.lower() for name in ("localhost", socket.gethostname(), *more))


def is_trusted(header: str, names: frozenset[str]) -> bool:
    """True for a Host header (RFC 9110, 7.2: name or address, and perhaps a port) of an address or one of `names`."""
    name = _name(header)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


def is_inner(header: str) -> bool:
    """True for a Host header with a name that the DNS of the internet cannot hold: `gpu7`, `search.default.svc`."""
    name = _name(header)
    return bool(name) and ("." not in name or name.endswith(_INNER))


def is_foreign(origin: bytes | None, host: bytes | None) -> bool:
    """True for an Origin header, which only browsers send, of another page than one of `host`."""
    return origin is not None and origin.partition(b"://")[2] != host


def _name(header: str) -> str:
    name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
    return name.lower().removesuffix(".")


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
        from starlette.responses import PlainTextResponse  # whoever only looks for a server need not load it

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def careful(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [pair for pair in message["headers"] if pair[0] != b"cache-control"]
                message["headers"] = [*given, *self.HEADERS]
            await send(message)

        header = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"host"), "")
        reason = f"This server is not called {header!r}: ask it by its address or this machine's name.\n"
        app = self._app if is_trusted(header, self._names) else PlainTextResponse(reason, 421)
        await app(scope, receive, careful)
