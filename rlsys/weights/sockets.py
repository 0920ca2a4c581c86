"""Sockets and interfaces for the process groups of torch."""

from __future__ import annotations

import socket

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""By which gloo and NCCL are told an interface; without it they may take one that leads nowhere."""


def listener(host: str, port: int) -> tuple[int, int]:
    """Return a new socket's descriptor and its port, for torch's TCPStore to listen at one address of this machine.

    Left to itself, the store listens on all interfaces, and it asks nobody who they are. Port 0 is a free one.
    """
    # As many may wait as torch's store lets: all ranks come to it at once.
    server = socket.create_server((host, port), backlog=2048)
    number = int(server.getsockname()[1])
    return server.detach(), number
