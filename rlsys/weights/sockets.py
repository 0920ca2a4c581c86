"""Opens the sockets of torch process groups, and sets environment variables for a while, for new groups and processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables for the network interface of gloo and NCCL, which could otherwise choose an unreachable one."""


def listener(host: str, port: int) -> tuple[int, int]:
    """Open a socket for torch's TCPStore that listens on a single address; return the socket's descriptor and port.

    The store's own socket would listen on all interfaces, and the store has no authentication. Port 0 picks a free
    port.
    """
    # Same backlog as torch's store: all ranks connect at once.
    server = socket.create_server((host, port), backlog=2048)
    number = int(server.getsockname()[1])
    return server.detach(), number


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment `variables` during the body, also for processes started in it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
