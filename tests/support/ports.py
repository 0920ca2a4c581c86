"""Reserves ports for servers of tests that run in parallel."""

import socket
from collections import deque

from rlsys.cluster.local_ray import promised_port

_PROMISES: deque[socket.socket] = deque(maxlen=200)
"""Sockets that reserve ports; the oldest are closed to limit open files, as their ports are in use or free again."""


def free_port() -> int:
    """Return a free port that is reserved until a server of the caller listens on it."""
    _PROMISES.append(promised_port())
    return int(_PROMISES[-1].getsockname()[1])
