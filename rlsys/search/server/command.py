"""The search server's process and its command lines: `rlsys search serve` over an index, `rlsys search web` over a provider.

Everything is loaded, then the port answers, until a signal or the parent's end. On SIGINT or SIGTERM no new connection is
taken; requests in work are answered, or after `_SHUTDOWN_S` turned away with 503; then the threads end and the retriever
is closed. A thread that does not end, because a model or another server hangs, ends with the process after `_FORCE_S`.

Contract: a user's mistake is one sentence and status 2, a server elsewhere that does not answer one and status 1.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsys.errors import RunError, UserError
from rlsys.search.address import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_TOPK,
    TOKEN_VARIABLE,
    bind,
    is_inner,
    is_trusted,
    own_names,
)
from rlsys.search.connections import LimitedConfig, LimitedServer
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.vectors import DEPTH
from rlsys.search.page_store import PageSource, PageStore
from rlsys.search.retrieval import Retriever
from rlsys.search.server.asgi import create_app
from rlsys.search.server.contract import ServerLimits

if TYPE_CHECKING:
    from rlsys.search.encoders.reranker import Reranker

_SHUTDOWN_S = 4
_FORCE_S = 8.0
_PARENT_POLL_S = 0.5
_OPEN = (
    "%s can be reached from other machines, and no token is asked for: whoever reaches it can search. Set %s, or "
    "serve at %s"
)
_MADE = ("family", "pooling", "query_prefix", "normalize", "max_tokens")
"""Flags of what a folder of rlsys knows of its encoder, and a FAISS file from elsewhere does not."""
_log = logging.getLogger("uvicorn.error")


def serve_index(arguments: Sequence[str] | None = None, program: str = "python -m rlsys.search.server") -> int:
    """Serve an index folder, or a FAISS file with its corpus, until a signal; returns the exit status."""
    parser = argparse.ArgumentParser(prog=program, description="Serve a search index over HTTP.")
    add = parser.add_argument
    add("index", type=Path, help="folder of `rlsys search index`, or a FAISS file, which needs --corpus")
    add("--encoder", help="of the queries, where it lies elsewhere now or is not that of the passages")
    add("--device", help="where models compute: cpu, cuda or cuda:N")
    add("--dtype", help="float32, float16 or bfloat16")
    add("--nprobe", type=int, help="lists of an IVF index that a query visits")
    add("--ef-search", type=int, help="breadth of a search in an HNSW index")
    add("--mmap", action="store_const", const=True, help="map the vectors: opens at once, replicas share memory")
    add("--faiss-gpu", action="store_const", const=True, help="spread the vectors over all GPUs as float16")
    add("--pages", type=Path, help="jsonl of {url, contents} for /access")
    bare = parser.add_argument_group("a FAISS file from elsewhere")
    bare.add_argument("--corpus", type=Path, help="jsonl of the passages, row r of the file on line r + 1")
    bare.add_argument("--family", help="of the encoder where its name does not tell: e5, bge, dpr, ...")
    bare.add_argument("--pooling", help="in place of the family's: mean, cls, pooler or last")
    bare.add_argument("--query-prefix", help="in place of the family's")
    bare.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="in place of the family's")
    bare.add_argument("--max-tokens", type=int, help="where queries are cut (256)")
    return _run(parser, arguments, "index", _load_index)


def serve_web(arguments: Sequence[str] | None = None, program: str = "rlsys search web") -> int:
    """Serve a provider of web search until a signal; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Serve web search over HTTP. Keys come from the environment: GOOGLE_API_KEY and GOOGLE_CSE_ID, "
        "SERPAPI_API_KEY, SERPER_API_KEY, BRAVE_API_KEY, BING_API_KEY.",
    )
    add = parser.add_argument
    add("provider", help="google, serpapi, serper, brave or bing")
    add("--fetch-pages", action="store_true", help="answer with the best passage of a page, not its snippet")
    add("--passage-words", type=int, default=150, help="length of a page's passage (%(default)s)")
    add("--endpoint", help="URL to ask in place of the provider's own, for compatible services")
    add("--requests-per-second", type=float, help="limit of the subscription")
    add("--max-concurrent", type=int, default=16, help="requests in flight (%(default)s)")
    add("--device", help="where the reranker computes: cpu, cuda or cuda:N")
    return _run(parser, arguments, "provider", _load_web)


def load_reranker(name: str, device: str) -> Reranker:
    """A cross-encoder; its libraries are loaded with it, and a server without one need not wait for them."""
    from rlsys.search.encoders.reranker import Reranker

    return Reranker.load(name, device=device)


def _run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    subject: str,
    load: Callable[[argparse.Namespace], tuple[Retriever, PageSource | None]],
) -> int:
    """Serve what `load` makes of the arguments; the one called `subject` stands in the log."""
    _add_common(parser)
    given = parser.parse_args(arguments)
    if given.parent_pid is not None:
        _end_with_parent(given.parent_pid)

    def parts() -> Parts:
        retriever, pages = load(given)
        reranker = None if given.reranker is None else load_reranker(given.reranker, given.device or "cpu")
        return Parts(retriever, reranker, pages)

    try:
        if given.threads is not None:
            _limit_threads(given.threads)
        serve_parts(
            parts,
            name=str(getattr(given, subject)),
            host=given.host,
            port=given.port,
            topk=given.topk,
            limits=ServerLimits(**{field.name: getattr(given, field.name) for field in fields(ServerLimits)}),
            token=read_token(given.token_file),
            allowed_hosts=given.allowed_host,
            listener=None if given.listener_fd is None else socket.socket(fileno=given.listener_fd),
        )
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--reranker", help="cross-encoder for /rerank: a Hugging Face folder or cached model")
    add("--host", default=DEFAULT_HOST, help="address to listen on (%(default)s, this machine alone)")
    add("--port", type=int, default=DEFAULT_PORT, help="(%(default)s)")
    add("--topk", type=int, default=DEFAULT_TOPK, help="passages where none are asked for (%(default)s)")
    add("--token-file", type=Path, help=f"file of the bearer token, else {TOKEN_VARIABLE}")
    allowed = "a further name that clients know this machine by, where there is no token; may be given again"
    add("--allowed-host", action="append", default=[], metavar="NAME", help=allowed)
    add("--threads", type=int, help="of the models and the index")
    add("--listener-fd", type=int, help=argparse.SUPPRESS)
    add("--parent-pid", type=int, help=argparse.SUPPRESS)
    limits = parser.add_argument_group("limits")
    for field in fields(ServerLimits):
        flag = f"--{field.name.replace('_', '-')}"
        limits.add_argument(flag, type=type(field.default), default=field.default, metavar="N", help="(%(default)s)")


def _load_index(given: argparse.Namespace) -> tuple[Retriever, PageSource | None]:
    pages = None if given.pages is None else PageStore.open(given.pages)
    searching = {key: getattr(given, key) for key in ("nprobe", "ef_search", "mmap", "faiss_gpu")}
    depth = max(DEPTH, given.max_topk)
    made = {key: getattr(given, key) for key in _MADE if getattr(given, key) is not None}
    if given.index.is_file():
        return _open_file(given, searching | {"depth": depth}, made), pages
    for key in (*made, *(["corpus"] if given.corpus else [])):
        raise UserError(
            f"--{key.replace('_', '-')} is for a FAISS file from elsewhere, and {given.index} is not a file: leave "
            "it out, a folder knows how it was built"
        )
    from rlsys.search.index.manifest import open_retriever

    deeper = {"depth": depth} if depth > DEPTH else {}
    chosen = {"encoder": given.encoder, "device": given.device, "dtype": given.dtype}
    return open_retriever(given.index, own_process=True, **chosen, **searching, **deeper), pages


def _open_file(given: argparse.Namespace, searching: dict[str, Any], made: dict[str, Any]) -> Retriever:
    from rlsys.search.index.dense import open_prebuilt
    from rlsys.search.index.vectors import SearchOptions

    if given.corpus is None or given.encoder is None:
        raise UserError(
            f"{given.index} is a FAISS file, which holds vectors alone: give --corpus, the passages that it was "
            "built from, and --encoder, what it was built with"
        )
    spec = EncoderSpec(given.encoder, device=given.device or "cpu", dtype=given.dtype, **made)
    options = SearchOptions(**{key: value for key, value in searching.items() if value is not None})
    return open_prebuilt(given.index, given.corpus, spec, options, own_process=True)


def _load_web(given: argparse.Namespace) -> tuple[Retriever, PageSource | None]:
    from rlsys.search.web.providers import ProviderLimits
    from rlsys.search.web.web_search import open_pages, open_web

    retriever = open_web(
        given.provider,
        fetch_pages=given.fetch_pages,
        endpoint=given.endpoint,
        passage_words=given.passage_words,
        limits=ProviderLimits(given.max_concurrent, given.requests_per_second),
    )
    return retriever, open_pages()


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a server, which closes them at its end."""

    retriever: Retriever
    reranker: Reranker | None = None
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
        trusts = _trusting(host, sock, allowed_hosts)
        app = create_app(
            parts.retriever, topk, limits, token=token, trusts=trusts, reranker=parts.reranker, pages=parts.pages
        )
        # Requests that are turned away, and clients that ask now and then, have connections too.
        config = LimitedConfig(app, 2 * limits.max_requests, access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S)
        address, number = sock.getsockname()[:2]
        try:
            sock.listen(config.backlog)
        except OSError as error:
            reason = f"{address}:{number} was taken while the index was loaded ({error}): choose another port"
            raise UserError(reason) from None
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
    """A test of the Host headers that are answered by a server at `host`, bound to `sock`, that has `more` names."""
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
        """Shut down as uvicorn does it, while the clock runs."""
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


def _limit_threads(threads: int) -> None:
    """Bound the threads of torch, FAISS and tokenizers; to be called before they are imported."""
    if threads < 1:
        raise UserError(f"threads {threads} is out of range: give 1 or more")
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))


def _end_with_parent(parent_pid: int) -> None:
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
