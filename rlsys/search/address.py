"""Where a search server is found by default, and how its port is taken."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from rlsys.errors import UserError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_TOPK = 3
TOKEN_VARIABLE = "RLSYS_SEARCH_TOKEN"
"""Environment variable with the bearer token that a server asks for."""


def is_url(text: str) -> bool:
    """Whether `text` can be the address of a server: http or https, a host, nothing secret, no query."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return usable and not (parts.username or parts.query or parts.fragment)


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet: connections are refused until the server is ready.

    Port 0 takes a free one. Raises UserError when it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    if port != 0:
        # A port that was served from a moment ago can be had again; a free one must not be shared.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise UserError(f"cannot serve at {host}:{port} ({error}): choose another host or port") from None
    return sock
