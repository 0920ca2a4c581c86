"""`rlsys watch` as a process: the port is taken, then the page is there, until a signal.

Loopback by default. Whoever reaches the server can read the run, and nobody is asked for a password: elsewhere this is
said when it starts.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlsys.errors import UserError
from rlsys.report.watch.app import create_app
from rlsys.report.watch.live import LiveRun
from rlsys.search.address import bind, own_names
from rlsys.search.connections import PAGE_CONNECTIONS, LimitedConfig, LimitedServer

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8800
_SHUTDOWN_S = 3


def serve_run(path: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the run in `path` until SIGINT or SIGTERM; port 0 takes a free one. `say` is told where it is.

    Raises UserError for a folder that is no run and for a port that is taken.
    """
    run = LiveRun(path)
    closing = asyncio.Event()
    with bind(host, port) as sock, suppress(KeyboardInterrupt):
        app = create_app(run, own_names(host), closing)
        # What is asked is nobody's news; what fails is.
        config = LimitedConfig(app, PAGE_CONNECTIONS, log_level=logging.WARNING, timeout_graceful_shutdown=_SHUTDOWN_S)
        address, number = sock.getsockname()[:2]
        try:
            sock.listen(config.backlog)
        except OSError as error:
            raise UserError(f"cannot serve at {address}:{number} ({error}): choose another port") from None
        say(f"{path} is shown at http://{_shown(address)}:{number} until Ctrl-C.")
        if not ipaddress.ip_address(address).is_loopback:
            say(
                f"Other machines can reach {address}, and nobody is asked for a password: whoever does can read the run. "
                f"Serve at {DEFAULT_HOST} to keep it here."
            )
        _Server(config, closing).run(sockets=[sock])


def _shown(address: str) -> str:
    """As it stands in a URL; one that means every address of this machine by the machine's name."""
    if ipaddress.ip_address(address).is_unspecified:
        return socket.gethostname()
    return f"[{address}]" if ":" in address else address


class _Server(LimitedServer):
    """A server that ends its streams when it begins to shut down: they would last for ever."""

    def __init__(self, config: LimitedConfig, closing: asyncio.Event) -> None:
        super().__init__(config)
        self._closing = closing

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, once the streams are told."""
        self._closing.set()
        await super().shutdown(sockets)
