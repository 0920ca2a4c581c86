"""Default address of a search server, port binding, and the check of Host and Origin headers.

The Host check stops DNS rebinding: a foreign web page can point its own domain at this machine, so that a visitor's
browser sends requests here. Such requests carry the foreign domain as Host and are rejected. A Host that is an IP
address or one of this machine's own names is safe.
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
TOKEN_VARIABLE = "RLSYS_SEARCH_TOKEN"  # environment variable with the server's bearer token
_BIND_CODES: dict[int, Code] = {errno.EADDRINUSE: "in_use", errno.EACCES: "denied"}
_INNER = (".local", ".localdomain", ".internal", ".lan", ".svc")


def is_url(text: str) -> bool:
    """True for a server's base URL: http or https, with a host, and without user name, password, query or fragment."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return usable and not (parts.username or parts.password or parts.query or parts.fragment)


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound but not listening; port 0 selects a free port. Raises UserError on failure."""
    # asyncio sends small packets at once (TCP_NODELAY) only if the protocol is named; else a response of two writes waits
    # 40 ms for the client's delayed acknowledgement.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if port != 0:  # allows an immediate restart on the same port; a port that the system selects must not be shared
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


def url_of(host: str, port: int) -> str:
    """Return the URL of a server at a host name or an address."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def own_names(*more: str) -> frozenset[str]:
    """Return this machine's names and `more`, in lower case."""
    return frozenset(name.lower() for name in ("localhost", socket.gethostname(), *more))


def is_trusted(header: str, names: frozenset[str]) -> bool:
    """True if a Host header (RFC 9110, 7.2) holds an IP address or one of `names`, with or without a port."""
    name = _name(header)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


def is_inner(header: str) -> bool:
    """True if a Host header holds a name that public DNS cannot resolve, such as `gpu7` or `search.default.svc`."""
    name = _name(header)
    return bool(name) and ("." not in name or name.endswith(_INNER))


def is_foreign(origin: bytes | None, host: bytes | None) -> bool:
    """True if the Origin header, which only browsers send, names another site than the Host header."""
    return origin is not None and origin.partition(b"://")[2] != host


def _name(header: str) -> str:
    name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
    return name.lower().removesuffix(".")


class HostGate:
    """ASGI middleware that rejects foreign Host headers (421) and adds browser security headers to responses."""

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
        from starlette.responses import PlainTextResponse  # clients import this module without loading starlette

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def careful(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [pair for pair in message["headers"] if pair[0] != b"cache-control"]
                message["headers"] = [*given, *self.HEADERS]
            await send(message)

        header = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"host"), "")
        reason = f"Host {header!r} is not a name of this server: use its IP address or this machine's name.\n"
        app = self._app if is_trusted(header, self._names) else PlainTextResponse(reason, 421)
        await app(scope, receive, careful)
