"""Runs the search server process: `rlsys search serve` over an index, `rlsys search web` over a web search provider.

The server loads everything, then listens until a signal or the end of its parent process. On shutdown it accepts no new
connections. Requests in flight are answered, or get 503 after `_SHUTDOWN_S`; then threads and retriever are closed. If
a thread hangs in a model or in a call to another server, the process exits after `_FORCE_S`.

Raises UserError for mistakes of the user, and RunError if another server does not respond.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsys.errors import Code, RunError, UserError, code_of, with_code
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
from rlsys.search.corpus import PageStore
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.backend import BackendRetriever, check_kind, is_backend
from rlsys.search.index.dense import DEPTH, SearchOptions, VectorRetriever, open_prebuilt
from rlsys.search.index.folder import BM25, DENSE, HYBRID, REMOTE, read_manifest
from rlsys.search.retrieval import PageSource, Retriever
from rlsys.search.server import mcp
from rlsys.search.server.asgi import create_app
from rlsys.search.server.contract import ServerLimits

if TYPE_CHECKING:
    from rlsys.search.encoders.encoder import Reranker

_SHUTDOWN_S = 4
_FORCE_S = 8.0
_PARENT_POLL_S = 0.5
_OPEN = (
    "%s is reachable from other machines and requires no token, so anyone who reaches it can search: set %s, or "
    "serve at %s"
)
_MADE = ("family", "pooling", "query_prefix", "normalize", "max_tokens")
"""Encoder settings that a manifest records. For a bare FAISS file, they come from flags."""
_log = logging.getLogger("uvicorn.error")


def serve_index(arguments: Sequence[str] | None = None, program: str = "python -m rlsys.search.server") -> int:
    """Serve an index folder, or a FAISS file with its corpus, until a signal. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=program, description="Serve a search index over HTTP.")
    add = parser.add_argument
    add("index", type=Path, help="folder of `rlsys search index`, or a FAISS file, which needs --corpus")
    add("--kind", help="package.module.attribute that built the index, if it is from outside of rlsys: runs its code")
    add("--encoder", help="query encoder, if its folder has moved or it differs from the passage encoder")
    add("--device", help="device of the models: cpu, cuda or cuda:N")
    add("--dtype", help="float32, float16 or bfloat16")
    add("--nprobe", type=int, help="number of IVF lists that a query visits")
    add("--ef-search", type=int, help="breadth of an HNSW search")
    add("--mmap", action="store_const", const=True, help="map the vectors: opens at once, replicas share memory")
    add("--faiss-gpu", action="store_const", const=True, help="spread the vectors over all GPUs as float16")
    add("--pages", type=Path, help="jsonl of {url, contents} for /access")
    bare = parser.add_argument_group("bare FAISS file, without an index folder")
    bare.add_argument("--corpus", type=Path, help="jsonl of the passages; row r of the FAISS file is line r + 1")
    bare.add_argument("--family", help="encoder family, if the encoder's name does not contain it: e5, bge, dpr, ...")
    bare.add_argument("--pooling", help="override the family's pooling: mean, cls, pooler or last")
    bare.add_argument("--query-prefix", help="override the family's query prefix")
    bare.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="override the family's normalisation")
    bare.add_argument("--max-tokens", type=int, help="truncation length of queries (256)")
    return _run(parser, arguments, "index", _load_index)


def serve_web(arguments: Sequence[str]) -> int:
    """Serve a web search provider until a signal. Returns the exit status."""
    keys = "GOOGLE_API_KEY and GOOGLE_CSE_ID, SERPAPI_API_KEY, SERPER_API_KEY, BRAVE_API_KEY, BING_API_KEY"
    about = f"Serve web search over HTTP. Keys come from the environment: {keys}."
    parser = argparse.ArgumentParser(prog="rlsys search web", description=about)
    add = parser.add_argument
    add("provider", help="google, serpapi, serper, brave or bing")
    add("--fetch-pages", action="store_true", help="return the best passage of each page instead of its snippet")
    add("--passage-words", type=int, default=150, help="words of a page's passage (%(default)s)")
    add("--endpoint", help="URL of a compatible service, instead of the provider's URL")
    add("--requests-per-second", type=float, help="rate limit of the subscription")
    add("--max-concurrent", type=int, default=16, help="maximum number of requests in flight (%(default)s)")
    add("--device", help="device of the reranker: cpu, cuda or cuda:N")
    return _run(parser, arguments, "provider", _load_web)


def load_reranker(name: str, device: str) -> Reranker:
    """Load a cross-encoder; imports its libraries only here, so that servers without one start faster."""
    from rlsys.search.encoders.encoder import Reranker

    return Reranker.load(name, device=device)


def _run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    subject: str,
    load: Callable[[argparse.Namespace], tuple[Retriever, PageSource | None]],
) -> int:
    """Parse the arguments and serve what `load` returns; the log names the value of the argument `subject`."""
    add = parser.add_argument
    add("--reranker", help="cross-encoder for /rerank: a Hugging Face folder or cached model")
    add("--host", default=DEFAULT_HOST, help="address to listen on (%(default)s: only this machine can reach it)")
    add("--port", type=int, default=DEFAULT_PORT, help="(%(default)s)")
    add("--topk", type=int, default=DEFAULT_TOPK, help="passages per query, for requests without topk (%(default)s)")
    add("--token-file", type=Path, help=f"file with the bearer token; default: the variable {TOKEN_VARIABLE}")
    allowed = "further host name that clients use for this machine, for servers without a token; repeatable"
    add("--allowed-host", action="append", default=[], metavar="NAME", help=allowed)
    add("--mcp", action="store_true", help=f"also offer MCP tools over streamable HTTP, at {mcp.PATH}")
    add("--mcp-stdio", action="store_true", help="offer MCP tools on stdin and stdout, without HTTP")
    add("--threads", type=int, help="threads of the models and the index")
    add("--listener-fd", type=int, help=argparse.SUPPRESS)
    add("--parent-pid", type=int, help=argparse.SUPPRESS)
    limits = parser.add_argument_group("limits")
    for field in fields(ServerLimits):
        flag = f"--{field.name.replace('_', '-')}"
        limits.add_argument(flag, type=type(field.default), default=field.default, metavar="N", help="(%(default)s)")
    given = parser.parse_args(arguments)
    if given.parent_pid is not None:
        _end_with_parent(given.parent_pid)

    def parts() -> Parts:
        if given.threads is not None:  # torch and tokenizers read these variables on import
            os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(given.threads))
        retriever, pages = load(given)
        reranker = None if given.reranker is None else load_reranker(given.reranker, given.device or "cpu")
        return Parts(retriever, reranker, pages)

    _check_threads(given.threads)
    bounds = ServerLimits(**{field.name: getattr(given, field.name) for field in fields(ServerLimits)})
    if given.mcp or given.mcp_stdio:
        mcp.require_mcp()
    if given.mcp_stdio:
        _serve_stdio(parts, given.topk, bounds)
        return 0
    serve_parts(
        parts,
        name=str(getattr(given, subject)),
        **{key: getattr(given, key) for key in ("host", "port", "topk")},
        limits=bounds,
        with_mcp=given.mcp,
        token=read_token(given.token_file),
        allowed_hosts=given.allowed_host,
        listener=None if given.listener_fd is None else socket.socket(fileno=given.listener_fd),
    )
    return 0


def run_alone(serve: Callable[[], int]) -> int:
    """Run `serve` and return the exit status: 2 after UserError, 1 after RunError. Prints the error as one sentence."""
    try:
        return serve()
    except (UserError, RunError) as error:
        print(with_code(error, code_of(error)), file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


def _check_threads(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise UserError(f"--threads {threads} is out of range: give 1 or more.", code="out_of_range", key="--threads")


def _load_index(given: argparse.Namespace) -> tuple[Retriever, PageSource | None]:
    pages = None if given.pages is None else PageStore(given.pages)
    searching = {key: getattr(given, key) for key in ("nprobe", "ef_search", "mmap", "faiss_gpu")}
    depth = max(DEPTH, given.max_topk)
    made = {key: getattr(given, key) for key in _MADE if getattr(given, key) is not None}
    if given.index.is_file():
        if given.kind is not None:
            reason = f"--kind is only for an index folder, and {given.index} is a file: leave it out."
            raise UserError(reason, code="conflict", key="--kind")
        if given.corpus is None or given.encoder is None:
            problem = f"{given.index} is a FAISS file, which holds only vectors"
            remedy = "give --corpus, the passages that it was built from, and --encoder, the encoder that built it"
            key = "--corpus" if given.corpus is None else "--encoder"
            raise UserError(f"{problem}: {remedy}.", code="missing", key=key)
        spec = EncoderSpec(given.encoder, device=given.device or "cpu", dtype=given.dtype, **made)
        options = SearchOptions(depth=depth, **{key: value for key, value in searching.items() if value is not None})
        return open_prebuilt(given.index, given.corpus, spec, options, own_process=True), pages
    for key in (*made, *(["corpus"] if given.corpus else [])):
        flag = f"--{key.replace('_', '-')}"
        problem = f"{flag} is only for a bare FAISS file, and {given.index} is not a file"
        reason = f"{problem}: leave it out, because the manifest of an index folder records it."
        raise UserError(reason, code="conflict", key=flag)

    deeper = {"depth": depth} if depth > DEPTH else {}
    chosen = {"encoder": given.encoder, "device": given.device, "dtype": given.dtype}
    opened = open_retriever(
        given.index, own_process=True, trusted=given.kind, threads=given.threads, **chosen, **searching, **deeper
    )
    return opened, pages


def _load_web(given: argparse.Namespace) -> tuple[Retriever, PageSource | None]:
    from rlsys.search.web.providers import ProviderLimits
    from rlsys.search.web.web_search import WebPages, open_reader, open_web

    chosen = {key: getattr(given, key) for key in ("fetch_pages", "endpoint", "passage_words")}
    limits = ProviderLimits(given.max_concurrent, given.requests_per_second)
    return open_web(given.provider, limits=limits, **chosen), WebPages(open_reader())


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a server, which it closes on shutdown."""

    retriever: Retriever
    reranker: Reranker | None = None
    pages: PageSource | None = None

    def close(self) -> None:
        """Close retriever and pages; the reranker needs no closing."""
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
    with_mcp: bool = False,
) -> None:
    """Bind the port, call `load`, and serve until SIGINT or SIGTERM.

    Args:
        name: Name of the index or provider in the log.
        allowed_hosts: Further host names that clients use for this machine.
        listener: Bound socket to use instead of `host` and `port`.
        with_mcp: Also offer MCP tools.

    Raises UserError for a taken port or a `topk` beyond the limits.
    """
    limits = limits or ServerLimits()
    _check_topk(topk, limits)
    if threading.current_thread() is threading.main_thread():
        # After its shutdown uvicorn re-raises the signal; SIGTERM must not kill the process before `close`.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with listener or bind(host, port) as sock, suppress(KeyboardInterrupt):
        parts = load()
        address, number = sock.getsockname()[:2]
        local = ipaddress.ip_address(address).is_loopback
        names = own_names(host, *allowed_hosts, *([] if local else [socket.getfqdn()]))

        def trusts(header: str) -> bool:
            # Other machines may use names of the local network; public DNS cannot point such a name to this machine.
            return is_trusted(header, names) or (not local and is_inner(header))

        loaded: dict[str, Any] = {"reranker": parts.reranker, "pages": parts.pages, "with_mcp": with_mcp}
        app = create_app(parts.retriever, topk, limits, token=token, trusts=trusts, **loaded)
        # Twice the requests, because rejected requests and idle clients hold connections too.
        config = LimitedConfig(app, 2 * limits.max_requests, access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S)
        try:
            sock.listen(config.backlog)
        except OSError as error:
            place = f"{address}:{number}"
            reason = f"{place} was taken by another process during loading ({error}): choose another port."
            raise UserError(reason, code="in_use", key=place) from None
        if token is None and not local:
            _log.warning(_OPEN, address, TOKEN_VARIABLE, DEFAULT_HOST)
        _log.info("serving %s at http://%s:%d", name, address, number)
        server = _Server(config, parts)
        try:
            server.run(sockets=[sock])
        finally:
            parts.close()
            server.clock.cancel()


def _check_topk(topk: int, limits: ServerLimits) -> None:
    if not 1 <= topk <= limits.max_topk:
        raise UserError(f"topk {topk} is out of range: give 1 to {limits.max_topk}.", code="out_of_range", key="topk")


def _serve_stdio(load: Callable[[], Parts], topk: int, limits: ServerLimits) -> None:
    """Serve MCP tools on stdin and stdout until stdin ends."""
    _check_topk(topk, limits)
    parts = load()
    try:
        asyncio.run(mcp.serve_stdio(parts, topk, limits))
    finally:
        parts.close()


class _Server(LimitedServer):
    """A server whose process exits by force if the shutdown takes longer than `_FORCE_S`."""

    def __init__(self, config: LimitedConfig, parts: Parts) -> None:
        super().__init__(config)
        self._parts = parts
        self.clock = threading.Timer(_FORCE_S, self._end_by_force)
        self.clock.daemon = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the `_FORCE_S` timer and shut down."""
        self.clock.start()
        await super().shutdown(sockets)

    def _end_by_force(self) -> None:
        _log.error("a search is still running %g s after the signal: the server exits by force", _FORCE_S)
        try:
            self._parts.close()
        finally:
            os._exit(1)


def read_token(file: str | Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the bearer token from `file`, or from the environment if `file` is None; None if there is no token.

    The token is never a command-line argument, because other users can read those. Raises UserError for an invalid
    token.
    """
    try:
        text = environment.get(TOKEN_VARIABLE) if file is None else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        codes: dict[type[Exception], Code] = {UnicodeDecodeError: "malformed", PermissionError: "denied"}
        reason = f"token file {file} cannot be read ({error}): give a text file with only the token."
        raise UserError(reason, code=codes.get(type(error), "not_found"), key=str(file)) from None
    token = None if text is None else text.strip()
    if token is not None and not re.fullmatch("[!-~]+", token):
        where = TOKEN_VARIABLE if file is None else str(file)
        reason = f"{where} holds no token: give visible ASCII characters without spaces."
        raise UserError(reason, code="malformed", key=where)
    return token


def _end_with_parent(parent_pid: int) -> None:
    """Start a thread that ends this process when its parent ends.

    PR_SET_PDEATHSIG is unsuitable, because it fires when the parent's *thread* ends.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * _SHUTDOWN_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def open_retriever(
    folder: str | Path,
    trusted: str | None = None,
    *,
    own_process: bool = False,
    threads: int | None = None,
    **options: Any,
) -> Retriever:
    """Open the index in `folder`, of any kind.

    `trusted` is the kind that the user has named, which a kind from outside of the package needs. `options` apply to
    kinds with vectors: encoder, device and dtype of `VectorRetriever.open`, and the fields of `SearchOptions`. Raises
    UserError for an option that the kind lacks, for an unknown kind, and for another kind than `trusted`. `threads` is
    that of `LexicalRetriever.open`, for kinds with BM25.
    """
    # Imports only the libraries of this kind.
    kind = str(read_manifest(folder)["kind"])
    check_kind(folder, trusted)
    given = {name: value for name, value in options.items() if value is not None}
    loading: dict[str, Any] = {name: given.pop(name) for name in ("encoder", "device", "dtype") if name in given}
    if kind in (DENSE, HYBRID):
        dense = {**loading, "options": SearchOptions(**given), "own_process": own_process}
        if kind == DENSE:
            return VectorRetriever.open(folder, **dense)
        from rlsys.search.index.fusion import HybridRetriever

        return HybridRetriever.open(folder, threads=threads, **dense)
    if names := [*loading, *given]:
        reason = f"{folder} is an index of kind {kind!r}, which has no option {', '.join(names)}: leave it out."
        raise UserError(reason, code="conflict", key=names[0])
    if kind == BM25:
        from rlsys.search.index.lexical import LexicalRetriever

        return LexicalRetriever.open(folder, threads=threads)
    if kind in REMOTE:
        from rlsys.search.index.remote import RemoteRetriever

        return RemoteRetriever.open(folder)
    if is_backend(kind):
        return BackendRetriever.open(folder, trusted=trusted)
    known = ", ".join((DENSE, BM25, HYBRID, *REMOTE))
    reason = f"{folder} is an index of kind {kind!r}, which this version of rlsys does not support"
    remedy = f"it knows {known} and package.module.attribute; upgrade rlsys, or build the index again"
    raise UserError(f"{reason}: {remedy}.", code="unsupported", key=str(folder))
