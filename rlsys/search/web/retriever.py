"""Search of the web behind the search server.

A hit is {"id": URL, "contents": '"title"\\ntext', "url": URL} with the score 1 / rank: providers order their
results and say no more. The text is the provider's snippet or, with `pages`, the passage of the page that fits
the query best; a page that cannot be had, or where no word of the query occurs, leaves its snippet.

Invariants:
  - an outage never looks like "nothing was found": `find` raises ProviderError when any query of its batch
    gets no answer, and the server turns that into 503;
  - no answer is paid for twice because of another query's failure: what was found in a batch that failed
    is kept for the next time it is asked.
The web itself changes from day to day, so the promise of `Retriever` that answers do not change is kept by the
server's cache, as long as a query stays in it; that cache is what makes repeated rollouts cheap, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.errors import UserError
from rlsys.search.retriever import Hit
from rlsys.search.web.client import Keys, ProviderClient, ProviderLimits
from rlsys.search.web.extract import clean, contents, one_line
from rlsys.search.web.fetch import FetchLimits, PageError, PageFetcher
from rlsys.search.web.guard import GuardedTransport, Policy
from rlsys.search.web.loop import LoopThread
from rlsys.search.web.pages import WebPages
from rlsys.search.web.passage import best_passage
from rlsys.search.web.providers import PROVIDERS, Result
from rlsys.search.web.reader import PageReader, Workers

_KEPT_ANSWERS = 4096
_WORKERS = 2
_JOB_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)

Page = asyncio.Task[str | None]
"""The text of a page, None where it cannot be had."""


class WebRetriever:
    """A `Retriever` over one provider.

    Args:
        client: of the provider.
        reader: of pages; None answers with snippets.
        passage_words: length of the passage of a page.
        described: what `describe` says.
    """

    def __init__(
        self,
        client: ProviderClient,
        reader: PageReader | None,
        *,
        parallel: int,
        passage_words: int,
        described: Mapping[str, Any],
    ) -> None:
        self._client = client
        self._reader = reader
        self._parallel = parallel
        self._passage_words = passage_words
        self._described = dict(described)
        self._kept: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self._loop = LoopThread("web-search")

    @property
    def parallel(self) -> int:
        """Batches in `find` at once: as many as the provider takes requests, as each waits for its slowest."""
        return self._parallel

    def prepare(self, queries: Sequence[str]) -> list[str]:
        """The queries: nothing is computed of them here."""
        return list(queries)

    def find(self, prepared: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each query, best first, all asked at once. Raises ProviderError."""
        return self._loop.run(self._find(prepared, topk))

    def describe(self) -> Mapping[str, Any]:
        """`kind`, `provider` and `fetch_pages`."""
        return self._described

    def close(self) -> None:
        """Give connections and processes back; nothing is called after."""
        self._loop.close(self._close())

    async def _close(self) -> None:
        await self._client.close()
        if self._reader is not None:
            await self._reader.close()

    async def _find(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        pages: dict[str, Page] = {}
        found = await asyncio.gather(*(self._hits(query, topk, pages) for query in queries), return_exceptions=True)
        failures = [hits for hits in found if isinstance(hits, BaseException)]
        if not failures:
            return [hits for hits in found if not isinstance(hits, BaseException)]
        for query, hits in zip(queries, found, strict=True):
            if not isinstance(hits, BaseException):
                self._keep((query, topk), hits)
        raise failures[0]

    def _keep(self, asked: tuple[str, int], hits: list[Hit]) -> None:
        self._kept[asked] = hits
        if len(self._kept) > _KEPT_ANSWERS:
            self._kept.popitem(last=False)

    async def _hits(self, query: str, topk: int, pages: dict[str, Page]) -> list[Hit]:
        kept = self._kept.pop((query, topk), None)
        if kept is not None:
            return kept
        results = await self._client.search(query, topk)
        texts = await asyncio.gather(*(self._text(query, result, pages) for result in results))
        return [
            Hit(1 / rank, _document(query, result, text))
            for rank, (result, text) in enumerate(zip(results, texts, strict=True), start=1)
        ]

    async def _text(self, query: str, result: Result, pages: dict[str, Page]) -> str:
        """The passage that stands for `result`; a page is fetched once for all queries that share `pages`."""
        if self._reader is None or not result.url:
            return result.snippet
        if result.url not in pages:
            pages[result.url] = asyncio.create_task(_read(self._reader, result.url))
        text = await pages[result.url]
        if text is None:
            return result.snippet
        return await asyncio.to_thread(best_passage, text, query, self._passage_words) or result.snippet


async def _read(reader: PageReader, url: str) -> str | None:
    try:
        return (await reader.read(url)).text
    except PageError as error:
        _log.info("%s", error)
        return None


def _document(query: str, result: Result, text: str) -> dict[str, str]:
    """A provider's own answer has no URL; then the query names it."""
    return {
        "id": result.url or f"answer: {query}",
        "contents": contents(one_line(result.title), clean(text)),
        "url": result.url,
    }


def open_web(
    provider: str,
    *,
    fetch_pages: bool = False,
    endpoint: str | None = None,
    passage_words: int = 150,
    limits: ProviderLimits | None = None,
    fetch_limits: FetchLimits | None = None,
    policy: Policy | None = None,
    environ: Mapping[str, str] = os.environ,
) -> WebRetriever:
    """Search of the web by a provider of `PROVIDERS`, with keys from `environ`.

    Raises UserError for an unknown provider, a missing key or an endpoint that is not a URL.
    """
    if provider not in PROVIDERS:
        raise UserError(f"web search provider {provider!r} is unknown: choose one of {', '.join(PROVIDERS)}")
    if passage_words < 1:
        raise UserError(f"passage_words={passage_words} is too short: give at least 1")
    chosen = PROVIDERS[provider]
    limits = limits or ProviderLimits()
    client = ProviderClient(chosen, Keys.of(chosen, environ), endpoint=endpoint, limits=limits)
    reader = open_reader(fetch_limits, policy) if fetch_pages else None
    return WebRetriever(
        client,
        reader,
        parallel=limits.max_concurrent,
        passage_words=passage_words,
        described={"kind": "web", "provider": provider, "fetch_pages": fetch_pages},
    )


def open_reader(fetch_limits: FetchLimits | None = None, policy: Policy | None = None) -> PageReader:
    """A reader of pages of the public internet, for one event loop."""
    fetch_limits = fetch_limits or FetchLimits()
    transport = GuardedTransport(policy or Policy(), max_connections=fetch_limits.max_concurrent)
    secrets = {credential.variable for provider in PROVIDERS.values() for credential in provider.credentials}
    return PageReader(PageFetcher(transport, fetch_limits), Workers(_WORKERS, _JOB_TIMEOUT_S, secrets))


def open_pages(fetch_limits: FetchLimits | None = None, policy: Policy | None = None) -> WebPages:
    """Pages of the public internet for /access."""
    return WebPages(open_reader(fetch_limits, policy))
