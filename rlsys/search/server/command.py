"""The command lines of the search server: `rlsys search serve` over an index, `rlsys search web` over a provider.

Contract: a user's mistake is one sentence and status 2, a server elsewhere that does not answer one and status 1.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlsys.errors import RunError, UserError
from rlsys.search.address import DEFAULT_HOST, DEFAULT_PORT, DEFAULT_TOPK
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.vectors import DEPTH
from rlsys.search.page_store import PageStore
from rlsys.search.retriever import Retriever
from rlsys.search.server.limits import ServerLimits
from rlsys.search.server.reranking import Scorer
from rlsys.search.server.serve import (
    TOKEN_VARIABLE,
    Parts,
    end_with_parent,
    limit_threads,
    read_token,
    serve_parts,
)

Load = Callable[[argparse.Namespace], Parts]
_MADE = ("family", "pooling", "query_prefix", "normalize", "max_tokens")
"""What a folder of rlsys knows of its encoder, and a FAISS file from elsewhere does not."""


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
    add(
        "--mmap",
        action="store_const",
        const=True,
        help="map the vectors: opens at once, replicas share memory",
    )
    add("--faiss-gpu", action="store_const", const=True, help="spread the vectors over all GPUs as float16")
    add("--pages", type=Path, help="jsonl of {url, contents} for /access")
    bare = parser.add_argument_group("a FAISS file from elsewhere")
    bare.add_argument("--corpus", type=Path, help="jsonl of the passages, row r of the file on line r + 1")
    bare.add_argument("--family", help="of the encoder where its name does not tell: e5, bge, dpr, ...")
    bare.add_argument("--pooling", help="in place of the family's: mean, cls, pooler or last")
    bare.add_argument("--query-prefix", help="in place of the family's")
    bare.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="in place of the family's")
    bare.add_argument("--max-tokens", type=int, help="where queries are cut (256)")
    return _run(parser, arguments, lambda given: str(given.index), _load_index)


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
    return _run(parser, arguments, lambda given: str(given.provider), _load_web)


def load_reranker(name: str, device: str) -> Scorer:
    """A cross-encoder; its libraries are loaded with it, and a server without one need not wait for them."""
    from rlsys.search.encoders.reranker import Reranker

    return Reranker.load(name, device=device)


def _run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    name: Callable[[argparse.Namespace], str],
    load: Load,
) -> int:
    _add_common(parser)
    given = parser.parse_args(arguments)
    if given.parent_pid is not None:
        end_with_parent(given.parent_pid)
    try:
        if given.threads is not None:
            limit_threads(given.threads)
        serve_parts(
            lambda: load(given),
            name=name(given),
            host=given.host,
            port=given.port,
            topk=given.topk,
            limits=_limits(given),
            token=read_token(given.token_file),
            allowed_hosts=given.allowed_host,
            listener=None if given.listener_fd is None else socket.socket(fileno=given.listener_fd),
        )
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def _load_index(given: argparse.Namespace) -> Parts:
    pages = None if given.pages is None else PageStore.open(given.pages)
    return Parts(_open_index(given), _reranker(given), pages)


def _open_index(given: argparse.Namespace) -> Retriever:
    searching = {key: getattr(given, key) for key in ("nprobe", "ef_search", "mmap", "faiss_gpu")}
    depth = max(DEPTH, given.max_topk)
    made = {key: getattr(given, key) for key in _MADE if getattr(given, key) is not None}
    if given.index.is_file():
        return _open_file(given, searching | {"depth": depth}, made)
    for key in (*made, *(["corpus"] if given.corpus else [])):
        raise UserError(
            f"--{key.replace('_', '-')} is for a FAISS file from elsewhere, and {given.index} is not a file: leave "
            "it out, a folder knows how it was built"
        )
    from rlsys.search.index.manifest import open_retriever

    deeper = {"depth": depth} if depth > DEPTH else {}
    chosen = {"encoder": given.encoder, "device": given.device, "dtype": given.dtype}
    return open_retriever(given.index, own_process=True, **chosen, **searching, **deeper)


def _open_file(given: argparse.Namespace, searching: dict[str, Any], made: dict[str, Any]) -> Retriever:
    from rlsys.search.index.dense import open_prebuilt
    from rlsys.search.index.vectors import SearchOptions

    for flag in ("corpus", "encoder"):
        if getattr(given, flag) is None:
            raise UserError(
                f"{given.index} is a FAISS file, which holds vectors alone: give --corpus, the passages that it was "
                "built from, and --encoder, what it was built with"
            )
    spec = EncoderSpec(given.encoder, device=given.device or "cpu", dtype=given.dtype, **made)
    options = SearchOptions(**{key: value for key, value in searching.items() if value is not None})
    return open_prebuilt(given.index, given.corpus, spec, options, own_process=True)


def _load_web(given: argparse.Namespace) -> Parts:
    from rlsys.search.web.client import ProviderLimits
    from rlsys.search.web.retriever import open_pages, open_web

    limits = ProviderLimits(given.max_concurrent, given.requests_per_second)
    retriever = open_web(
        given.provider,
        fetch_pages=given.fetch_pages,
        endpoint=given.endpoint,
        passage_words=given.passage_words,
        limits=limits,
    )
    return Parts(retriever, _reranker(given), open_pages())


def _reranker(given: argparse.Namespace) -> Scorer | None:
    return None if given.reranker is None else load_reranker(given.reranker, given.device or "cpu")


def _limits(given: argparse.Namespace) -> ServerLimits:
    return ServerLimits(**{field.name: getattr(given, field.name) for field in fields(ServerLimits)})


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--reranker", help="cross-encoder for /rerank: a Hugging Face folder or cached model")
    add("--host", default=DEFAULT_HOST, help="address to listen on (%(default)s, this machine alone)")
    add("--port", type=int, default=DEFAULT_PORT, help="(%(default)s)")
    add("--topk", type=int, default=DEFAULT_TOPK, help="passages where none are asked for (%(default)s)")
    add("--token-file", type=Path, help=f"file of the bearer token, else {TOKEN_VARIABLE}")
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name that clients know this machine by, where there is no token; may be given again",
    )
    add("--threads", type=int, help="of the models and the index")
    add("--listener-fd", type=int, help=argparse.SUPPRESS)
    add("--parent-pid", type=int, help=argparse.SUPPRESS)
    limits = parser.add_argument_group("limits")
    for field in fields(ServerLimits):
        flag = f"--{field.name.replace('_', '-')}"
        limits.add_argument(flag, type=type(field.default), default=field.default, metavar="N", help="(%(default)s)")
