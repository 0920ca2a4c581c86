"""A server process: everything loaded, then the port answers, until a signal or the parent's end.

On SIGINT or SIGTERM no new connection is taken; requests in work are answered, or after `_SHUTDOWN_S` turned away
with 503; then the threads end and the retriever is closed. A thread that does not end, because a model or another
server hangs, ends with the process after `_FORCE_S`.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlsys.errors import UserError
from rlsys.search.address import DEFAULT_HOST, DEFAULT_PORT, DEFAULT_TOPK, TOKEN_VARIABLE, bind
from rlsys.search.connections import LimitedConfig, LimitedServer
from rlsys.search.hosts import is_inner, is_trusted, own_names
from rlsys.search.page_store import PageSource
from rlsys.search.retriever import Retriever
from rlsys.search.server.app import create_app
from rlsys.search.server.limits import ServerLimits
from rlsys.search.server.reranking import Scorer

_SHUTDOWN_S = 4
_FORCE_S = 8.0
_PARENT_POLL_S = 0.5
_OPEN = (
    "%s can be reached from other machines, and no token is asked for: whoever reaches it can search. Set %s, or "
    "serve at %s"
)
_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of. It closes all of it at its end."""

    retriever: Retriever
    reranker: Scorer | None = None
    pages: PageSource | None = None

    def close(self) -> None:
        """Give back what they hold; the reranker holds nothing."""
        self.retriever.close()
        if self.pages is not None:
            self.pages.close()


def serve_parts(
    load: Callable[[], Parts],
    *,
    name: str,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    topk: int = DEFAULT_TOPK,
    limits: ServerLimits | None = None,
    token: str | None = None,
    allowed_hosts: Sequence[str] = (),
    listener: socket.socket | None = None,
) -> None:
    """Take the port, `load`, and serve until SIGINT or SIGTERM.

    `listener` is a bound socket to use in place of `host` and `port`; `name` stands in the log; `allowed_hosts` are
    further names that clients know this machine by. Raises UserError for a taken port or a `topk` beyond the limits.
    """
    limits = limits or ServerLimits()
    if not 1 <= topk <= limits.max_topk:
        raise UserError(f"topk {topk} is out of range: give 1 to {limits.max_topk}")
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises a signal that ended it again; SIGTERM must not end the process before all is closed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with listener or bind(host, port) as sock, suppress(KeyboardInterrupt):
        parts = load()
        app = create_app(
            parts.retriever,
            topk,
            limits,
            reranker=parts.reranker,
            pages=parts.pages,
            token=token,
            trusts=_trusting(host, sock, allowed_hosts),
        )
        # Requests that are turned away, and clients that ask now and then, have connections too.
        config = LimitedConfig(app, 2 * limits.max_requests, access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S)
        address, number = sock.getsockname()[:2]
        try:
            sock.listen(config.backlog)
        except OSError as error:
            raise UserError(
                f"{address}:{number} was taken while the index was loaded ({error}): choose another port"
            ) from None
        if token is None and not _is_local(sock):
            _log.warning(_OPEN, address, TOKEN_VARIABLE, DEFAULT_HOST)
        _log.info("serving %s at http://%s:%d", name, address, number)
        by_force = threading.Timer(_FORCE_S, _end_by_force, [parts])
        by_force.daemon = True
        try:
            _Server(config, by_force).run(sockets=[sock])
        finally:
            parts.close()
            by_force.cancel()


def _trusting(host: str, sock: socket.socket, more: Sequence[str]) -> Callable[[str], bool]:
    """Tells which Host headers are answered by a server at `host`, bound to `sock`, that has `more` names."""
    if _is_local(sock):
        return partial(is_trusted, names=own_names(host, *more))
    # Other machines know this one by names of their network, which no page of the internet can take.
    names = own_names(host, socket.getfqdn(), *more)
    return lambda header: is_trusted(header, names) or is_inner(header)


def _is_local(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


class _Server(LimitedServer):
    """A server that starts a clock when it begins to shut down."""

    def __init__(self, config: LimitedConfig, clock: threading.Timer) -> None:
        super().__init__(config)
        self._clock = clock

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, while the clock runs."""
        self._clock.start()
        await super().shutdown(sockets)


def _end_by_force(parts: Parts) -> None:
    _log.error("a search has not ended within %g s of the signal: the server is ended by force", _FORCE_S)
    try:
        parts.close()
    finally:
        os._exit(1)


def read_token(file: str | Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The bearer token: the text of `file`, else of RLSYS_SEARCH_TOKEN, else None.

    Never an argument, as other users of a machine can read those. Raises UserError for one that no header can hold.
    """
    try:
        text = environment.get(TOKEN_VARIABLE) if file is None else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"token file {file} cannot be read: {error}") from None
    if text is None:
        return None
    token = text.strip()
    if not token or not all("!" <= character <= "~" for character in token):
        where = TOKEN_VARIABLE if file is None else f"token file {file}"
        raise UserError(f"{where} holds no token: give visible ASCII characters without spaces")
    return token


def limit_threads(threads: int) -> None:
    """Bound the threads of torch, FAISS and tokenizers; to be called before they are imported."""
    if threads < 1:
        raise UserError(f"threads {threads} is out of range: give 1 or more")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["RAYON_NUM_THREADS"] = str(threads)


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
