"""Web search retriever, and web pages for /access, for the search server.

A hit is {"id": URL, "contents": '"title"\\ntext', "url": URL}. Its score is 1 / rank, because providers return no
scores. The text is the provider's snippet or, with `fetch_pages`, the page's best passage for the query. If the page
cannot be fetched or contains no query word, the snippet is used. One event loop fetches pages; a few subprocesses
parse them, because parsing is CPU-bound and only a process can be killed in the middle of it.

Invariants of retrieval:

- An outage never looks like an empty result: `find` raises ProviderError if any query of its batch fails, and the
  server returns 503.
- Successful results of a failed batch are kept for the retry, so that no query is paid for twice.
- `Retriever` requires constant results. Web results are constant only for as long as the server's cache holds them.

Pages are untrusted: time, bytes, redirects and addresses are limited. Pages are fetched one by one, as a person with a
browser does, without cookies and without asking for robots.txt. The URL of a search result may point to a cloud's
metadata service, a printer or this machine (server-side request forgery). So only public internet addresses are
allowed.

Invariants of `GuardedTransport`:

- Every request is checked, including each redirect.
- A name is resolved once, all its addresses are checked, and the connection uses one of them, which defeats DNS
  rebinding. TLS is still verified against the name.
- No proxy is used, because a proxy would resolve the name itself.
- The address tables are explicit. `ipaddress.is_global` accepts multicast and transition ranges that carry IPv4
  addresses, and differs between Python versions.
"""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
import itertools
import logging
import os
import socket
import ssl
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

import bm25s
import httpx
import numpy as np
import orjson

from rlsys.errors import RunError, UserError
from rlsys.search.retrieval import Hit
from rlsys.search.web import extract
from rlsys.search.web.extract import MAX_TEXT_CHARS, Page, clean, one_line
from rlsys.search.web.loop import LoopThread
from rlsys.search.web.providers import PROVIDERS, Keys, ProviderClient, ProviderLimits, Result
from rlsys.search.wire import BodyError, Encoding, read_body

_KEPT_ANSWERS = 4096
_WORKERS = 2
_JOB_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 16 * MAX_TEXT_CHARS
_AT_ONCE = 8  # pages of one request fetched at the same time
_log = logging.getLogger(__name__)
CONTENT_TYPES = frozenset({"text/html", "application/xhtml+xml", "text/plain"})
_TYPES = sorted(CONTENT_TYPES)
_USER_AGENT = "rlsys/0.1 (web search of a language model)"
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> numeric addresses, preferred first. Raises OSError for an unknown name."""

_NOT_PUBLIC_V4 = [
    IPv4Network(block)
    for block in (
        *("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16"),  # this network, loopback, link-local (cloud metadata)
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),  # private, and carrier-grade NAT
        *("192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15"),  # protocol assignments, 6to4 relays, benchmarking
        *("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),  # documentation
        *("224.0.0.0/4", "240.0.0.0/4"),  # multicast; reserved and broadcast
    )
]
_PUBLIC_V6 = IPv6Network("2000::/3")
# Protocol assignments with Teredo, and two documentation ranges.
_NOT_PUBLIC_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
_NAT64 = IPv6Network("64:ff9b::/96")
MAX_TRIES = 4  # most addresses tried per name


class UrlRefused(Exception):
    """A URL that must not be fetched, or whose response is not a page; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules for URLs and addresses that may be fetched."""

    ports: frozenset[int] = frozenset({80, 443})
    allow_private: frozenset[Network] = frozenset()
    """Non-public networks that are allowed, for tests and private sites."""

    def permits(self, address: Address) -> bool:
        """True if connections to `address` are allowed."""
        plain = _carried(address)
        if any(plain in network for network in self.allow_private):
            return True
        if isinstance(plain, IPv4Address):
            return not any(plain in network for network in _NOT_PUBLIC_V4)
        return plain.scope_id is None and plain in _PUBLIC_V6 and not any(plain in net for net in _NOT_PUBLIC_V6)

    def check(self, url: httpx.URL) -> tuple[str, int]:
        """Return the host, in ASCII, and the port of `url`. Raises UrlRefused."""
        if url.scheme not in ("http", "https"):
            raise UrlRefused(f"the scheme {url.scheme[:20]!r} is not http or https")
        if url.userinfo:
            raise UrlRefused("it has a user name in it")
        host = url.raw_host.decode("ascii").rstrip(".").lower()
        if not host:
            raise UrlRefused("it names no host")
        port = url.port if url.port is not None else {"http": 80, "https": 443}[url.scheme]
        if port not in self.ports:
            raise UrlRefused(f"port {port} is not one of {sorted(self.ports)}")
        last = host.rsplit(".", 1)[-1]
        if (last.isdigit() or last.startswith("0x") or ":" in host) and _literal(host) is None:
            # The URL standard treats a host with a numeric last label as an address; resolvers parse it differently.
            raise UrlRefused(f"the host {host[:60]!r} is an address in an unusual form")
        return host, port


def _carried(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 `address`, or else `address` itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def resolve(host: str, port: int) -> list[str]:
    """Resolve `host` with the system's resolver; see `Resolver`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class GuardedTransport(httpx.AsyncHTTPTransport):
    """Connects only to permitted addresses.

    Keep-alive is off, so that two names with the same address never share a connection.
    """

    def __init__(
        self, policy: Policy, *, max_connections: int, resolver: Resolver = resolve, tls: ssl.SSLContext | None = None
    ) -> None:
        self._policy, self._resolve = policy, resolver
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=0)
        super().__init__(verify=tls or True, limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request`, a GET, to the first reachable address.

        Raises UrlRefused, before it connects, for a URL or address that is not permitted.
        """
        host, port = self._policy.check(request.url)
        # The Host header and the TLS server name stay those of the URL.
        extensions = request.extensions | ({} if _literal(host) is not None else {"sni_hostname": host})
        error: httpx.TransportError = httpx.ConnectError(f"the name {host} has no address", request=request)
        for address in (await self._addresses(host, port, request))[:MAX_TRIES]:
            url = request.url.copy_with(host=str(address))
            pinned = httpx.Request(request.method, url, headers=request.headers, extensions=extensions)
            try:
                return await super().handle_async_request(pinned)
            except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
                error = failed
        raise error

    async def _addresses(self, host: str, port: int, request: httpx.Request) -> list[Address]:
        """Return the addresses of `host`. Raises UrlRefused unless all are permitted."""
        try:
            texts = [host] if _literal(host) is not None else await self._resolve(host, port)
            addresses = [ipaddress.ip_address(text) for text in texts]
        except (OSError, ValueError) as error:
            raise httpx.ConnectError(f"the name {host} cannot be resolved ({error})", request=request) from None
        for address in addresses:
            if not self._policy.permits(address):
                raise UrlRefused(f"{host} is at {address}, which is not on the public internet")
        return addresses


class PageError(Exception):
    """A page that cannot be fetched; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    timeout_s: float = 10.0  # one page, from name resolution to the last byte, redirects included
    max_bytes: int = 2 * 1024 * 1024  # limit for the body, both compressed and decompressed
    max_redirects: int = 5
    max_concurrent: int = 32  # pages in flight


@dataclass(frozen=True, slots=True)
class Fetched:
    """The raw body of a page."""

    body: bytes
    media_type: str  # one of CONTENT_TYPES
    charset: str | None  # declared by the server; not validated


class PageFetcher:
    """Fetches pages through `transport`, which restricts their addresses. For one event loop."""

    def __init__(self, transport: GuardedTransport, limits: FetchLimits) -> None:
        self._limits = limits
        self._slots = RankedSlots(limits.max_concurrent)
        self._http = httpx.AsyncClient(
            transport=transport,
            # If an address is unreachable, time remains for the next address of the same name.
            timeout=httpx.Timeout(limits.timeout_s, connect=limits.timeout_s / MAX_TRIES),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            headers={"User-Agent": _USER_AGENT, "Accept": ", ".join(_TYPES), "Accept-Encoding": Encoding.gzip},
            trust_env=False,
        )

    async def fetch(self, url: str, rank: int = 0) -> Fetched:
        """Fetch the page at `url`, with `rank` as priority (lowest first). Raises PageError."""
        async with self._slots.held(rank):
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    return await self._follow(url)
            except TimeoutError:
                reason = f"it took longer than {self._limits.timeout_s:g} s"
            except (UrlRefused, BodyError, httpx.HTTPError) as error:
                reason = str(error) or type(error).__name__
            except (httpx.InvalidURL, UnicodeError, ValueError) as error:
                reason = f"its address is not valid ({error})"
        raise PageError(f"{url[:200]!r} cannot be fetched: {reason}")

    async def close(self) -> None:
        await self._http.aclose()

    async def _follow(self, url: str) -> Fetched:
        request: httpx.Request | None = self._http.build_request("GET", url)
        for _ in range(self._limits.max_redirects + 1):
            assert request is not None
            response = await self._http.send(request, stream=True)
            try:
                request = response.next_request
                if request is None:
                    return await self._read(response)
            finally:
                await response.aclose()
        raise UrlRefused(f"it redirects more than {self._limits.max_redirects} times")

    async def _read(self, response: httpx.Response) -> Fetched:
        if response.status_code != httpx.codes.OK:
            raise UrlRefused(f"status {response.status_code}")
        header = Message()
        header["Content-Type"] = response.headers.get("content-type", "")
        media_type = header.get_content_type()
        if "content-type" not in response.headers or media_type not in CONTENT_TYPES:
            raise UrlRefused(f"its content type is not one of {', '.join(_TYPES)}")
        body = await read_body(response.headers, response.aiter_raw(), self._limits.max_bytes, Encoding.gzip)
        return Fetched(body, media_type, header.get_content_charset())


class RankedSlots:
    """A priority semaphore for one event loop: a free slot goes to the lowest rank, then to the earliest caller.

    The rank of a page is its number within its request. So no request waits for the later pages of another request.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def held(self, rank: int = 0) -> AsyncIterator[None]:
        """Hold a slot within the context."""
        await self._take(rank)
        try:
            yield
        finally:
            self._give()

    async def _take(self, rank: int) -> None:
        if self._free:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        waiting = (rank, next(self._arrivals), given)
        heapq.heappush(self._waiting, waiting)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # the slot was granted before the cancellation
                self._give()
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
            raise

    def _give(self) -> None:
        while self._waiting:
            *_, given = heapq.heappop(self._waiting)
            if not given.cancelled():
                given.set_result(None)
                return
        self._free += 1


@dataclass(eq=False)
class WebRetriever:
    """A `Retriever` over one web search provider."""

    client: ProviderClient
    reader: PageReader | None  # reads pages; None uses snippets
    parallel: int  # the provider's limit of requests in flight, because each batch waits for its slowest query
    passage_words: int  # maximum number of words of a page's passage
    described: Mapping[str, Any]  # return value of `describe`
    _kept: OrderedDict[tuple[str, int], list[Hit]] = field(default_factory=OrderedDict)
    _loop: LoopThread = field(default_factory=lambda: LoopThread("web-search"))

    def prepare(self, queries: Sequence[str]) -> list[str]:
        """Return the queries unchanged."""
        return list(queries)

    def find(self, prepared: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return up to `topk` hits per query, best first, with concurrent requests. Raises ProviderError."""
        return self._loop.run(self._find(prepared, topk))

    def describe(self) -> Mapping[str, Any]:
        """Return `kind`, `provider` and `fetch_pages`."""
        return self.described

    def close(self) -> None:
        """Close connections and subprocesses. No other method is called afterwards."""

        async def close() -> None:
            await self.client.close()
            if self.reader is not None:
                await self.reader.close()

        self._loop.close(close())

    async def _find(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        pages: dict[str, asyncio.Task[Page | None]] = {}
        found = await asyncio.gather(*(self._hits(query, topk, pages) for query in queries), return_exceptions=True)
        well = {query: hits for query, hits in zip(queries, found, strict=True) if not isinstance(hits, BaseException)}
        failures = [hits for hits in found if isinstance(hits, BaseException)]
        if not failures:
            return [well[query] for query in queries]
        self._kept |= {(query, topk): hits for query, hits in well.items()}
        while len(self._kept) > _KEPT_ANSWERS:
            self._kept.popitem(last=False)
        raise failures[0]

    async def _hits(self, query: str, topk: int, pages: dict[str, asyncio.Task[Page | None]]) -> list[Hit]:
        if (kept := self._kept.pop((query, topk), None)) is not None:
            return kept
        results = await self.client.search(query, topk)
        texts = await asyncio.gather(*(self._text(query, result, pages) for result in results))
        hits = []
        for rank, (result, text) in enumerate(zip(results, texts, strict=True), start=1):
            name = result.url or f"answer: {query}"  # a direct answer may have no URL
            shown = Page(one_line(result.title), clean(text)).contents
            hits.append(Hit(1 / rank, {"id": name, "contents": shown, "url": result.url}))
        return hits

    async def _text(self, query: str, result: Result, pages: dict[str, asyncio.Task[Page | None]]) -> str:
        """Return the passage or snippet of `result`; a page is fetched once for all queries that share `pages`."""
        if self.reader is None or not result.url:
            return result.snippet
        if result.url not in pages:
            pages[result.url] = asyncio.create_task(self.reader.read(result.url))
        page = await pages[result.url]
        if page is None:
            return result.snippet
        return await asyncio.to_thread(best_passage, page.text, query, self.passage_words) or result.snippet


class Workers:
    """Pool of up to `count` page-parsing subprocesses, for one event loop.

    The environment variables `hidden` are not passed on. A subprocess exits when a page exceeds `job_timeout_s`.
    """

    def __init__(self, count: int, job_timeout_s: float, hidden: Collection[str] = ()) -> None:
        self._job_timeout_s = job_timeout_s
        self._environ = {name: value for name, value in os.environ.items() if name not in hidden}
        self._slots = RankedSlots(count)
        self._idle: list[Process] = []

    async def read(self, fetched: Fetched, rank: int = 0) -> Page | None:
        """Parse a page, with `rank` as priority; None if it has no text. Raises RunError if no subprocess starts."""
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
        try:  # validated, because a hostile page may have compromised the subprocess
            found = orjson.loads(answer)
            return None if found is None else Page(str(found["title"]), str(found["text"]))
        except (ValueError, KeyError, TypeError):
            return None

    async def close(self) -> None:
        """Kill the idle subprocesses."""
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        command = (sys.executable, "-m", extract.__name__, str(self._job_timeout_s))
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, env=self._environ, limit=_MAX_ANSWER_BYTES
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
            raise RunError("a page reader did not start: see its error on standard error")
        return process


async def _ask(process: Process, fetched: Fetched) -> bytes:
    """Send a job and return the response line; bytes without a final newline mean that the subprocess failed."""
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
    """Fetches and parses pages by URL."""

    fetcher: PageFetcher
    workers: Workers

    async def read(self, url: str, rank: int = 0) -> Page | None:
        """Return the page at `url`, or None if it cannot be fetched or has no text; lower `rank` goes first."""
        try:
            page = await self.workers.read(await self.fetcher.fetch(url, rank), rank)
        except PageError as error:
            _log.info("%s", error)
            return None
        if page is None:
            _log.info("%r has no text, or parsing it exceeded the limits", url[:200])
        return page

    async def close(self) -> None:
        """Close connections and subprocesses."""
        await self.fetcher.close()
        await self.workers.close()


@dataclass(eq=False)
class WebPages:
    """A `PageSource` that fetches pages on demand, without a cache."""

    reader: PageReader  # owned and closed by this object
    timeout_s: float = 30.0  # time limit for all pages of one request
    _loop: LoopThread = field(default_factory=lambda: LoopThread("web-pages"))

    async def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """Return {"url", "contents"} of each URL, or None on failure or timeout.

        Any event loop may await it; it can be cancelled.
        """
        return await self._loop.result_of(self._fetch(urls))

    def close(self) -> None:
        """Close connections and subprocesses. No other method is called afterwards."""
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
            _log.info("%d of %d pages were not fetched within %g s", len(late), len(pages), self.timeout_s)
        return [found[url] for url in urls]

    async def _page(self, url: str, rank: int, places: asyncio.Semaphore) -> Mapping[str, Any] | None:
        async with places:
            page = await self.reader.read(url, rank)
        return None if page is None else {"url": url, "contents": page.contents}


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
    """Open a web search retriever, with API keys from `environ`.

    Raises UserError for an unknown provider, a missing key or an invalid endpoint.
    """
    if provider not in PROVIDERS:
        raise UserError(
            f"web search provider {provider!r} is unknown: choose one of {', '.join(PROVIDERS)}.",
            code="unknown",
            key="provider",
        )
    if passage_words < 1:
        raise UserError(
            f"passage_words={passage_words} is too short: give at least 1.", code="out_of_range", key="passage_words"
        )
    limits = limits or ProviderLimits()
    keys = Keys.of(PROVIDERS[provider], environ)
    client = ProviderClient(PROVIDERS[provider], keys, endpoint=endpoint, limits=limits)
    reader = open_reader(fetch_limits, policy) if fetch_pages else None
    described = {"kind": "web", "provider": provider, "fetch_pages": fetch_pages}
    return WebRetriever(client, reader, limits.max_concurrent, passage_words, described)


def open_reader(fetch_limits: FetchLimits | None = None, policy: Policy | None = None) -> PageReader:
    """Create a reader for pages of the public internet, for one event loop."""
    fetch_limits = fetch_limits or FetchLimits()
    transport = GuardedTransport(policy or Policy(), max_connections=fetch_limits.max_concurrent)
    secrets = {credential.variable for provider in PROVIDERS.values() for credential in provider.credentials}
    return PageReader(PageFetcher(transport, fetch_limits), Workers(_WORKERS, _JOB_TIMEOUT_S, secrets))


def best_passage(text: str, query: str, words: int) -> str | None:
    """Return the passage of `text` with the highest BM25 score for `query`, or None if no query word occurs.

    Passages are made of paragraphs (lines), up to `words` words. Text in languages without spaces seldom matches.
    """
    found = passages(text, words)
    terms = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)[0]
    if not found or not terms:
        return None
    texts = bm25s.tokenize(found, stopwords="en", show_progress=False, return_ids=False)
    if not any(texts):
        return None
    ranking = bm25s.BM25()
    ranking.index(texts, show_progress=False)
    scores = ranking.get_scores(list(terms))
    best = int(np.argmax(scores))
    return found[best] if scores[best] > 0 else None


def passages(text: str, words: int) -> list[str]:
    """Split `text` into passages of up to `words` words, at paragraph ends where possible."""
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
