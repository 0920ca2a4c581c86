"""Sockets and interfaces for the process groups of torch."""

from __future__ import annotations

import socket

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""By which gloo and NCCL are told an interface; without it they may take one that leads nowhere."""
_BACKLOG = 2048  # Connections that torch's store lets wait: all ranks come to it at once.


def listener(host: str, port: int) -> tuple[int, int]:
    """Return a new socket's descriptor and its port, for torch's TCPStore to listen at one address of this machine.

    Left to itself, the store listens on all interfaces, and it asks nobody who they are. Port 0 takes a free one.
    Raises OSError.
    """
    server = socket.create_server((host, port), backlog=_BACKLOG)
    number = int(server.getsockname()[1])
    return server.detach(), number
