"""Test doubles for the server: a retriever whose stages wait for the test, a reranker, pages, and a client."""

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from rlsys.search.retrieval import Hit
from rlsys.search.server.asgi import create_app
from rlsys.search.server.contract import ServerLimits


class Gated:
    """Retriever that finds `query/rank` for a query. Each stage records its input, then waits until its gate is open.

    A gate that starts closed stays so until the test opens it. `seen` has the inputs of `prepare`, `found` those of
    `find`.
    """

    def __init__(self, parallel: int = 1, *, prepare_open: bool = True, find_open: bool = True) -> None:
        self.parallel = parallel
        self.may_prepare, self.may_find = threading.Event(), threading.Event()
        if prepare_open:
            self.may_prepare.set()
        if find_open:
            self.may_find.set()
        self.seen: list[list[str]] = []
        self.found: list[tuple[list[str], int]] = []
        self.threads: set[str] = set()

    def prepare(self, queries: Sequence[str]) -> Any:
        self.seen.append(list(queries))
        self.threads.add(threading.current_thread().name)
        assert self.may_prepare.wait(600)
        if "poison" in queries:
            raise RuntimeError("broken")
        return list(queries)

    def find(self, prepared: Any, topk: int) -> list[list[Hit]]:
        self.found.append((prepared, topk))
        self.threads.add(threading.current_thread().name)
        assert self.may_find.wait(600)
        places = [(rank, 1.0 - rank / topk, f"https://a/{rank}") for rank in range(topk)]
        return [
            [Hit(score, {"id": f"{query}/{rank}", "contents": query, "url": url}) for rank, score, url in places]
            for query in prepared
        ]

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "gated", "passages": 7}

    def close(self) -> None:
        """Do nothing, as there is nothing to release."""


class Lengths:
    """A reranker whose score is the length of the text."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        self.pairs += pairs
        return [float(len(text)) for _, text in pairs]

    def describe(self) -> Mapping[str, Any]:
        return {"model": "lengths"}


class Pages:
    """Store of two web pages."""

    known: Mapping[str, Mapping[str, Any]] = {
        url: {"url": url, "contents": f"page of {url}"} for url in ("https://a.example/", "https://b.example/")
    }

    async def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        return [self.known.get(url) for url in urls]

    def close(self) -> None:
        pass


@asynccontextmanager
async def in_process(
    retriever: Any, limits: ServerLimits | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an application, both in this event loop."""
    app = create_app(retriever, 3, limits, **options)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client
