"""A server process: everything loaded, then the port answers, until a signal or the parent's end."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from rlsys.errors import UserError
from rlsys.search.address import DEFAULT_HOST, DEFAULT_PORT, DEFAULT_TOPK, bind
from rlsys.search.index.dense import DenseRetriever
from rlsys.search.server.app import create_app
from rlsys.search.server.service import ServerLimits

_SHUTDOWN_S = 5
_PARENT_POLL_S = 0.5
_log = logging.getLogger("uvicorn.error")


def serve(
    index: str | Path,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    topk: int = DEFAULT_TOPK,
    encoder: str | None = None,
    device: str = "cpu",
    limits: ServerLimits | None = None,
    listener: socket.socket | None = None,
) -> None:
    """`rlsys search serve`: serve an index folder until SIGINT or SIGTERM.

    `listener` is a bound socket to use in place of `host` and `port`. Raises UserError for a taken port, an
    index that does not fit together, or a `topk` beyond the limits.
    """
    limits = limits or ServerLimits()
    if not 1 <= topk <= limits.max_topk:
        raise UserError(f"topk {topk} is out of range: give 1 to {limits.max_topk}")
    with listener or bind(host, port) as sock, suppress(KeyboardInterrupt):
        app = create_app(DenseRetriever.open(index, encoder, device=device), topk, limits)
        config = uvicorn.Config(app, access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S)
        where = "{}:{}".format(*sock.getsockname()[:2])
        try:
            sock.listen(config.backlog)
        except OSError as error:
            raise UserError(
                f"{where} was taken while the index was loaded ({error}): choose another port"
            ) from None
        _log.info("serving %s at http://%s", index, where)
        uvicorn.Server(config).run(sockets=[sock])


def end_with_parent(parent_pid: int) -> None:
    """Watch the parent process and end this one when it is gone, gracefully at first.

    A watch, because Linux's own signal on a parent's death comes when the parent's *thread* ends.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * _SHUTDOWN_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """The process that `launch.SearchServer` starts; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rlsys.search.server", description="Serve an index.")
    parser.add_argument("index", type=Path)
    parser.add_argument("--host", default=DEFAULT_HOST)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--topk", type=int, default=DEFAULT_TOPK)
    parser.add_argument("--encoder", help="encoder of the queries where it is not that of the passages")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--listener-fd", type=int, help="inherited bound socket, in place of host and port")
    parser.add_argument("--parent-pid", type=int, help="end when this process, the parent, is gone")
    given = parser.parse_args(arguments)
    if given.parent_pid is not None:
        end_with_parent(given.parent_pid)
    listener = None if given.listener_fd is None else socket.socket(fileno=given.listener_fd)
    try:
        serve(
            given.index,
            host=given.host,
            port=given.port,
            topk=given.topk,
            encoder=given.encoder,
            device=given.device,
            listener=listener,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
