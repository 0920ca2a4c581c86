"""Ports for servers of tests, which may run beside each other."""

from __future__ import annotations

import socket
from collections import deque

from rlsys.cluster.local_ray import promised_port

_PROMISES: deque[socket.socket] = deque(maxlen=200)
"""More would be too many open files. Those of long ago are listened at, or no longer needed."""


def free_port() -> int:
    """A port that nobody listens at, and that others are not given before somebody does."""
    _PROMISES.append(promised_port())
    return int(_PROMISES[-1].getsockname()[1])
