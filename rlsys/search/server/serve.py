"""A server process: everything loaded, then the port answers, until a signal or the parent's end.

On SIGINT or SIGTERM no new connection is taken; requests in work are answered, or after `_SHUTDOWN_S` turned away
with 503; then the threads end and the retriever is closed.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import uvicorn

from rlsys.errors import UserError
from rlsys.search.address import DEFAULT_HOST, DEFAULT_PORT, DEFAULT_TOPK, bind
from rlsys.search.pages import PageSource
from rlsys.search.retriever import Retriever
from rlsys.search.server.app import create_app
from rlsys.search.server.limits import ServerLimits
from rlsys.search.server.reranking import Scorer

TOKEN_VARIABLE = "RLSYS_SEARCH_TOKEN"
_SHUTDOWN_S = 4
_PARENT_POLL_S = 0.5
_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of. It closes the retriever at its end."""

    retriever: Retriever
    reranker: Scorer | None = None
    pages: PageSource | None = None


def load_parts(
    index: str | Path,
    *,
    reranker: str | None = None,
    pages: str | Path | None = None,
    device: str | None = None,
    **options: Any,
) -> Parts:
    """Open an index folder, and a reranker and a pages file where they are named.

    `device` is where models compute; `options` go to `open_retriever`. Raises UserError.
    """
    from rlsys.search.encoders.reranker import Reranker
    from rlsys.search.index.open import open_retriever
    from rlsys.search.pages import PageStore

    return Parts(
        open_retriever(index, device=device, **options),
        None if reranker is None else Reranker.load(reranker, device=device or "cpu"),
        None if pages is None else PageStore.open(pages),
    )


def serve(
    index: str | Path,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    topk: int = DEFAULT_TOPK,
    limits: ServerLimits | None = None,
    token: str | None = None,
    listener: socket.socket | None = None,
    **options: Any,
) -> None:
    """`rlsys search serve`: serve an index folder until SIGINT or SIGTERM. `options` are those of `load_parts`.

    Raises what `load_parts` and `serve_parts` raise.
    """
    serve_parts(
        lambda: load_parts(index, **options),
        name=str(index),
        host=host,
        port=port,
        topk=topk,
        limits=limits,
        token=token,
        listener=listener,
    )


def serve_parts(
    load: Callable[[], Parts],
    *,
    name: str,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    topk: int = DEFAULT_TOPK,
    limits: ServerLimits | None = None,
    token: str | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Take the port, `load`, and serve until SIGINT or SIGTERM.

    `listener` is a bound socket to use in place of `host` and `port`; `name` stands in the log. Raises UserError
    for a taken port or a `topk` beyond the limits.
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
            parts.retriever, topk, limits, reranker=parts.reranker, pages=parts.pages, token=token
        )
        config = uvicorn.Config(
            app, access_log=False, proxy_headers=False, timeout_graceful_shutdown=_SHUTDOWN_S
        )
        address, number = sock.getsockname()[:2]
        try:
            sock.listen(config.backlog)
        except OSError as error:
            raise UserError(
                f"{address}:{number} was taken while the index was loaded ({error}): choose another port"
            ) from None
        if token is None and not ipaddress.ip_address(address).is_loopback:
            _log.warning(
                "%s can be reached from other machines, and no token is asked for: whoever reaches it can search. "
                "Set %s, or serve at %s",
                address,
                TOKEN_VARIABLE,
                DEFAULT_HOST,
            )
        _log.info("serving %s at http://%s:%d", name, address, number)
        try:
            uvicorn.Server(config).run(sockets=[sock])
        finally:
            parts.retriever.close()


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The process that `launch.SearchServer` starts; returns the exit status."""
    given = _parser().parse_args(arguments)
    if given.parent_pid is not None:
        end_with_parent(given.parent_pid)
    if given.threads is not None:
        limit_threads(given.threads)
    listener = None if given.listener_fd is None else socket.socket(fileno=given.listener_fd)
    try:
        serve(
            given.index,
            host=given.host,
            port=given.port,
            topk=given.topk,
            limits=ServerLimits(**{field.name: getattr(given, field.name) for field in fields(ServerLimits)}),
            token=read_token(given.token_file),
            listener=listener,
            reranker=given.reranker,
            pages=given.pages,
            encoder=given.encoder,
            device=given.device,
            nprobe=given.nprobe,
            ef_search=given.ef_search,
            faiss_gpu=given.faiss_gpu,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlsys.search.server", description="Serve an index.")
    parser.add_argument("index", type=Path)
    parser.add_argument("--host", default=DEFAULT_HOST)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--topk", type=int, default=DEFAULT_TOPK)
    parser.add_argument("--encoder", help="encoder of the queries where it is not that of the passages")
    parser.add_argument("--device", help="where models compute, e.g. cpu or cuda")
    parser.add_argument("--nprobe", type=int, help="cells that an IVF index looks into")
    parser.add_argument("--ef-search", type=int, help="candidates that an HNSW index keeps")
    parser.add_argument("--faiss-gpu", action="store_const", const=True, help="put the index on the GPUs")
    parser.add_argument("--reranker", help="cross-encoder for /rerank: a Hugging Face folder or cached model")
    parser.add_argument("--pages", type=Path, help="jsonl of {url, contents} for /access")
    parser.add_argument("--token-file", type=Path, help=f"file of the bearer token, else {TOKEN_VARIABLE}")
    parser.add_argument("--threads", type=int, help="of the models and the index")
    parser.add_argument("--listener-fd", type=int, help="inherited bound socket, in place of host and port")
    parser.add_argument("--parent-pid", type=int, help="end when this process, the parent, is gone")
    limits = parser.add_argument_group("limits", "see rlsys.search.server.limits")
    for field in fields(ServerLimits):
        flag = f"--{field.name.replace('_', '-')}"
        limits.add_argument(flag, type=type(field.default), default=field.default, metavar="N")
    return parser
