"""Reserves ports for servers of tests that run in parallel."""

from __future__ import annotations

import socket
from collections import deque

from rlsys.cluster.local_ray import promised_port

_PROMISES: deque[socket.socket] = deque(maxlen=200)
"""Sockets that reserve ports; old ones are dropped to limit open files, because their ports are in use or done."""


def free_port() -> int:
    """Return a free port, reserved for the caller until a server listens on it."""
    _PROMISES.append(promised_port())
    return int(_PROMISES[-1].getsockname()[1])
