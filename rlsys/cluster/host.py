"""The process of a worker: an empty shell in which a plain object is built and then called.

Everything that the process writes goes to its own log file, native libraries' output included.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsys.cluster.network import interface_settings, own_addresses, promised_port


class _Shell:
    def __init__(self, log: str, path: list[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        faulthandler.enable(file=2)
        self._worker: Any = None
        self._promised: list[socket.socket] = []
        import ray

        # The groups of torch and SGLang meet on the network that Ray's nodes meet on: of one machine, its loopback.
        os.environ.update(interface_settings(ray.util.get_node_ip_address(), own_addresses()))

    def free_address(self) -> tuple[str, int]:
        """This machine's address in the cluster and a port that is nobody else's until one of this run listens at it."""
        import ray

        self._promised.append(promised_port())
        return ray.util.get_node_ip_address(), int(self._promised[-1].getsockname()[1])

    def _method(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._worker, name)
        return method


class SyncHost(_Shell):
    """Carries out one call at a time."""

    def build(self, factory: Callable[..., Any], *args: Any) -> None:
        """Make the worker."""
        self._worker = factory(*args)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker."""
        return self._method(method)(*args)


class AsyncHost(_Shell):
    """Carries out many calls at a time on one event loop."""

    async def build(self, factory: Callable[..., Any], *args: Any) -> None:
        """Make the worker; a `start` coroutine method of it is awaited."""
        self._worker = factory(*args)
        await self._worker.start()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker, awaiting what is awaitable."""
        result = self._method(method)(*args)
        return await result if inspect.isawaitable(result) else result
