"""A retriever that searches the web, and pages of the web for /access, for the search server.

A hit is {"id": URL, "contents": '"title"\\ntext', "url": URL} with the score 1 / rank: providers order their results
and say no more. The text is the provider's snippet or, with `pages`, the passage of the page that fits the query best;
a page that cannot be had, or where no word of the query occurs, leaves its snippet. Pages are fetched by one event loop
and read by a few worker processes: reading is bound by the CPU, and only a process can be ended in the middle of it.

Invariants:
  - an outage never looks like "nothing was found": `find` raises ProviderError when any query of its batch gets no
    answer, and the server turns that into 503;
  - no answer is paid for twice because of another query's failure: what was found in a batch that failed is kept for
    the next time it is asked.
The web itself changes from day to day, so the promise of `Retriever` that answers do not change is kept by the server's
cache, as long as a query stays in it; that cache is what makes repeated rollouts cheap, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import bm25s
import numpy as np
import orjson

from rlsys.errors import RunError, UserError
from rlsys.search.retrieval import Hit
from rlsys.search.web import extract
from rlsys.search.web.extract import MAX_TEXT_CHARS, Page, clean, contents, one_line
from rlsys.search.web.fetch import Fetched, FetchLimits, GuardedTransport, PageError, PageFetcher, Policy, RankedSlots
from rlsys.search.web.loop import LoopThread
from rlsys.search.web.providers import PROVIDERS, Keys, ProviderClient, ProviderLimits, Result

_KEPT_ANSWERS = 4096
_WORKERS = 2
_JOB_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 16 * MAX_TEXT_CHARS
_AT_ONCE = 8  # pages of one request that are fetched together
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class WebRetriever:
    """A `Retriever` over one provider."""

    client: ProviderClient
    reader: PageReader | None  # of pages; None answers with snippets
    parallel: int  # as many as the provider takes requests, as each batch waits for its slowest
    passage_words: int  # length of the passage of a page
    described: Mapping[str, Any]  # what `describe` says
    _kept: OrderedDict[tuple[str, int], list[Hit]] = field(default_factory=OrderedDict)
    _loop: LoopThread = field(default_factory=lambda: LoopThread("web-search"))

    def prepare(self, queries: Sequence[str]) -> list[str]:
        """The queries: nothing is computed of them here."""
        return list(queries)

    def find(self, prepared: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most `topk` hits of each query, best first, all asked at once. Raises ProviderError."""
        return self._loop.run(self._find(prepared, topk))

    def describe(self) -> Mapping[str, Any]:
        """`kind`, `provider` and `fetch_pages`."""
        return self.described

    def close(self) -> None:
        """Give connections and processes back; nothing is called after."""

        async def close() -> None:
            await self.client.close()
            if self.reader is not None:
                await self.reader.close()

        self._loop.close(close())

    async def _find(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        pages: dict[str, asyncio.Task[str | None]] = {}
        found = await asyncio.gather(*(self._hits(query, topk, pages) for query in queries), return_exceptions=True)
        failures = [hits for hits in found if isinstance(hits, BaseException)]
        if not failures:
            return [hits for hits in found if not isinstance(hits, BaseException)]
        for query, hits in zip(queries, found, strict=True):
            if not isinstance(hits, BaseException):
                self._kept[query, topk] = hits
        while len(self._kept) > _KEPT_ANSWERS:
            self._kept.popitem(last=False)
        raise failures[0]

    async def _hits(self, query: str, topk: int, pages: dict[str, asyncio.Task[str | None]]) -> list[Hit]:
        kept = self._kept.pop((query, topk), None)
        if kept is not None:
            return kept
        results = await self.client.search(query, topk)
        texts = await asyncio.gather(*(self._text(query, result, pages) for result in results))
        hits = []
        for rank, (result, text) in enumerate(zip(results, texts, strict=True), start=1):
            name = result.url or f"answer: {query}"  # a provider's own answer has no URL
            shown = contents(one_line(result.title), clean(text))
            hits.append(Hit(1 / rank, {"id": name, "contents": shown, "url": result.url}))
        return hits

    async def _text(self, query: str, result: Result, pages: dict[str, asyncio.Task[str | None]]) -> str:
        """The passage that stands for `result`; a page is fetched once for all queries that share `pages`."""
        if self.reader is None or not result.url:
            return result.snippet
        if result.url not in pages:
            pages[result.url] = asyncio.create_task(_read(self.reader, result.url))
        text = await pages[result.url]
        best = text and await asyncio.to_thread(best_passage, text, query, self.passage_words)
        return best or result.snippet


async def _read(reader: PageReader, url: str) -> str | None:
    try:
        return (await reader.read(url)).text
    except PageError as error:
        _log.info("%s", error)
        return None


class Workers:
    """Up to `count` worker processes, started when they are first needed. For one event loop.

    Args:
        job_timeout_s: a page that takes longer ends its process, and has no text.
        hidden: variables of the environment that the processes do not get.
    """

    def __init__(self, count: int, job_timeout_s: float, hidden: Collection[str] = ()) -> None:
        self._job_timeout_s = job_timeout_s
        self._environ = {name: value for name, value in os.environ.items() if name not in hidden}
        self._slots = RankedSlots(count)
        self._idle: list[Process] = []

    async def read(self, fetched: Fetched, rank: int = 0) -> Page | None:
        """The text of the page; None where it has no text, or cannot be read within the limits.

        It waits for its turn by `rank`. Raises RunError when no process can be started.
        """
        async with self._slots.held(rank):
            process = self._idle.pop() if self._idle else await self._start()
            answer = b""
            try:
                answer = await _ask(process, fetched)
            finally:
                if answer.endswith(b"\n"):
                    self._idle.append(process)
                else:
                    await _end(process)
        try:  # the process that wrote it has read a stranger's bytes
            found = orjson.loads(answer)
            return None if found is None else Page(str(found["title"]), str(found["text"]))
        except (ValueError, KeyError, TypeError):
            return None

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", extract.__name__, str(self._job_timeout_s)),
            stdin=PIPE,
            stdout=PIPE,
            env=self._environ,
            limit=_MAX_ANSWER_BYTES,
        )
        assert process.stdout is not None
        ready = b""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await process.stdout.readline()
        except TimeoutError:
            raise RunError(f"a page reader did not start within {_START_TIMEOUT_S:g} s") from None
        finally:
            if ready != extract.READY:
                await _end(process)
        if ready != extract.READY:
            raise RunError("a page reader did not start: see its message on standard error")
        return process


async def _ask(process: Process, fetched: Fetched) -> bytes:
    """The answer of a worker, a line; anything else when it has ended, or said what none says."""
    assert process.stdin is not None
    assert process.stdout is not None
    job = {"media_type": fetched.media_type, "charset": fetched.charset, "bytes": len(fetched.body)}
    try:
        process.stdin.write(orjson.dumps(job) + b"\n" + fetched.body)
        await process.stdin.drain()
        return await process.stdout.readline()
    except (ConnectionError, ValueError):
        return b""


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


@dataclass(frozen=True, slots=True)
class PageReader:
    """Reads the text of pages, by URL."""

    fetcher: PageFetcher
    workers: Workers

    async def read(self, url: str, rank: int = 0) -> Page:
        """The page at `url`; among pages that wait, those of a lower `rank` go first.

        Raises PageError for a page that cannot be had or has no text.
        """
        page = await self.workers.read(await self.fetcher.fetch(url, rank), rank)
        if page is None:
            raise PageError(f"{url[:200]!r} has no text that can be read within the limits")
        return page

    async def close(self) -> None:
        """Give connections and processes back."""
        await self.fetcher.close()
        await self.workers.close()


@dataclass(eq=False)
class WebPages:
    """Fetches pages when they are asked for; keeps none."""

    reader: PageReader  # it belongs to this object, which closes it
    timeout_s: float = 30.0  # for the pages of one request
    _loop: LoopThread = field(default_factory=lambda: LoopThread("web-pages"))

    async def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """{"url", "contents"} of each URL, in order; None for a page that cannot be had in time.

        May be called from any event loop. Cancelling it ends its connections.
        """
        return await self._loop.result_of(self._fetch(urls))

    def close(self) -> None:
        """Give connections and processes back; nothing is called after."""
        self._loop.close(self.reader.close())

    async def _fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        places = asyncio.Semaphore(_AT_ONCE)
        ranked = enumerate(dict.fromkeys(urls))
        if not (pages := {url: asyncio.create_task(self._page(url, rank, places)) for rank, url in ranked}):
            return []
        try:
            _, late = await asyncio.wait(pages.values(), timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for page in pages.values():
                page.cancel()
            await asyncio.gather(*pages.values(), return_exceptions=True)
        found = {url: None if page.cancelled() else page.result() for url, page in pages.items()}
        if late:
            _log.info("%d of %d pages were not there in %g s", len(late), len(pages), self.timeout_s)
        return [found[url] for url in urls]

    async def _page(self, url: str, rank: int, places: asyncio.Semaphore) -> Mapping[str, Any] | None:
        try:
            async with places:
                page = await self.reader.read(url, rank)
        except PageError as error:
            _log.info("%s", error)
            return None
        return {"url": url, "contents": page.contents}


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
    described = {"kind": "web", "provider": provider, "fetch_pages": fetch_pages}
    return WebRetriever(
        client, reader, parallel=limits.max_concurrent, passage_words=passage_words, described=described
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


def best_passage(text: str, query: str, words: int) -> str | None:
    """The passage of `text` with the highest BM25 score for `query`; None where no word of it occurs.

    Passages are whole paragraphs (lines), as many as fit into `words` words; a longer paragraph is cut. The statistics
    of BM25 are those of the page alone. Words are found by blanks, so a text in a script without them has one passage a
    paragraph and seldom a match.
    """
    found = passages(text, words)
    terms = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)[0]
    if not found or not terms:
        return None
    ranking = bm25s.BM25()
    ranking.index(bm25s.tokenize(found, stopwords="en", show_progress=False), show_progress=False)
    scores = ranking.get_scores(list(terms))
    best = int(np.argmax(scores))
    return found[best] if scores[best] > 0 else None


def passages(text: str, words: int) -> list[str]:
    """`text` in order, in passages of at most `words` words that end where paragraphs do, where possible."""
    found: list[str] = []
    lines: list[str] = []
    used = 0
    for paragraph in text.splitlines():
        tokens = paragraph.split()
        for start in range(0, len(tokens), words):
            part = tokens[start : start + words]
            if used + len(part) > words:
                found.append("\n".join(lines))
                lines, used = [], 0
            lines.append(" ".join(part))
            used += len(part)
    return [*found, "\n".join(lines)] if lines else found
