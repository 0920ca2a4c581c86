"""A retriever that searches the web, and pages of the web for /access, for the search server.

A hit is {"id": URL, "contents": '"title"\\ntext', "url": URL} with the score 1 / rank: providers order their results
and say no more. The text is the provider's snippet or, with `pages`, the passage of the page that fits the query best;
a page that cannot be had, or where no word of the query occurs, leaves its snippet. Pages are fetched by one event loop
and read by a few worker processes: reading is bound by the CPU, and only a process can be ended in the middle of it.

Invariants: an outage never looks like "nothing was found": `find` raises ProviderError when any query of its batch gets
no answer, and the server turns that into 503; what was found in a batch that failed is kept for the next time, so that no
answer is paid for twice. The promise of `Retriever` that answers do not change is kept by the server's cache, as long as
a query stays in it; that cache is what makes repeated rollouts cheap, too.

Pages may be hostile: fetching is bounded in time, in bytes, in hops and in where they come from. They are fetched singly,
as a reader with a browser would; robots.txt is not consulted, cookies are not kept. The URL of a search result, fetched
without care, may name a cloud's metadata service, a printer or this machine (server-side request forgery), so only
addresses of the public internet are asked. Invariants of `GuardedTransport`: every request is checked, also each hop of a
chain of redirects; a name is resolved once, all its addresses are checked, and the connection is made to one of these, so
that DNS rebinding gains nothing; TLS is still verified against the name; no proxy is used, which would resolve the name
by itself. The tables are written out, as `ipaddress.is_global` passes multicast and transition ranges that carry IPv4
addresses, and differs between versions of Python.
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
_AT_ONCE = 8  # pages of one request that are fetched together
_log = logging.getLogger(__name__)
CONTENT_TYPES = frozenset({"text/html", "application/xhtml+xml", "text/plain"})
_TYPES = sorted(CONTENT_TYPES)
_USER_AGENT = "rlsys/0.1 (web search of a language model)"
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> numeric addresses, the preferred first. Raises OSError for a name that has none."""

_NOT_PUBLIC_V4 = [
    IPv4Network(block)
    for block in (
        *("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16"),  # this network, loopback, link-local: metadata of clouds
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),  # private, and carrier-grade NAT
        *("192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15"),  # protocol assignments, relays of 6to4, benchmarking
        *("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),  # documentation
        *("224.0.0.0/4", "240.0.0.0/4"),  # multicast; reserved and broadcast
    )
]
_PUBLIC_V6 = IPv6Network("2000::/3")
# Protocol assignments and Teredo, and twice documentation.
_NOT_PUBLIC_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
_NAT64 = IPv6Network("64:ff9b::/96")
MAX_TRIES = 4  # addresses of one name that are tried


class UrlRefused(Exception):
    """A URL that is not fetched, or whose answer is not the page; the text says why."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of what may be fetched."""

    ports: frozenset[int] = frozenset({80, 443})
    allow_private: frozenset[Network] = frozenset()
    """Networks that are fetched from though they are not public: for tests, and for sites of one's own."""

    def permits(self, address: Address) -> bool:
        """True where a connection to `address` may be made."""
        plain = _carried(address)
        if any(plain in network for network in self.allow_private):
            return True
        if isinstance(plain, IPv4Address):
            return not any(plain in network for network in _NOT_PUBLIC_V4)
        return plain.scope_id is None and plain in _PUBLIC_V6 and not any(plain in net for net in _NOT_PUBLIC_V6)

    def check(self, url: httpx.URL) -> tuple[str, int]:
        """The host, in ASCII, and the port of `url`. Raises UrlRefused."""
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
            # The URL standard takes it for an address, as its last label is a number. Resolvers disagree about which.
            raise UrlRefused(f"the host {host[:60]!r} is an address in an unusual form")
        return host, port


def _carried(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, where it does."""
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
    """The system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class GuardedTransport(httpx.AsyncHTTPTransport):
    """Connects to permitted addresses only, and keeps no connection: another name of its address must not share it."""

    def __init__(
        self, policy: Policy, *, max_connections: int, resolver: Resolver = resolve, tls: ssl.SSLContext | None = None
    ) -> None:
        self._policy, self._resolve = policy, resolver
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=0)
        super().__init__(verify=tls or True, limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request`, a GET, to the first address that answers. Raises UrlRefused before any connection."""
        host, port = self._policy.check(request.url)
        # The Host header stays, and so does the name that TLS asks for and verifies.
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
        """The addresses of `host`, all of them permitted."""
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
    """A page that cannot be had: one sentence."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of what one page may cost."""

    timeout_s: float = 10.0  # from the first look at the name to the last byte, over all redirects
    max_bytes: int = 2 * 1024 * 1024  # of the body, compressed and decompressed
    max_redirects: int = 5
    max_concurrent: int = 32  # pages in flight


@dataclass(frozen=True, slots=True)
class Fetched:
    """The body of a page as it came."""

    body: bytes
    media_type: str  # one of CONTENT_TYPES
    charset: str | None  # as the server declares it, if it does; not checked


class PageFetcher:
    """Fetches pages over `transport`, which decides where requests may go. For one event loop."""

    def __init__(self, transport: GuardedTransport, limits: FetchLimits) -> None:
        self._limits = limits
        self._slots = RankedSlots(limits.max_concurrent)
        self._http = httpx.AsyncClient(
            transport=transport,
            # So that an address that does not answer leaves time for the next one of its name.
            timeout=httpx.Timeout(limits.timeout_s, connect=limits.timeout_s / MAX_TRIES),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            headers={"User-Agent": _USER_AGENT, "Accept": ", ".join(_TYPES), "Accept-Encoding": Encoding.gzip},
            trust_env=False,
        )

    async def fetch(self, url: str, rank: int = 0) -> Fetched:
        """The page at `url`, which waits for its turn by `rank`. Raises PageError."""
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
        """Give the connections back."""
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
    """A semaphore of one event loop: a free slot goes to the lowest rank, so no request waits for the later pages of
    another; within a rank to who came first.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def held(self, rank: int = 0) -> AsyncIterator[None]:
        """Wait for a slot, and give it back."""
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
            if not given.cancelled():  # it was given before the cancellation arrived
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
            name = result.url or f"answer: {query}"  # a provider's own answer has no URL
            shown = Page(one_line(result.title), clean(text)).contents
            hits.append(Hit(1 / rank, {"id": name, "contents": shown, "url": result.url}))
        return hits

    async def _text(self, query: str, result: Result, pages: dict[str, asyncio.Task[Page | None]]) -> str:
        """The passage that stands for `result`; a page is fetched once for all queries that share `pages`."""
        if self.reader is None or not result.url:
            return result.snippet
        if result.url not in pages:
            pages[result.url] = asyncio.create_task(self.reader.read(result.url))
        page = await pages[result.url]
        if page is None:
            return result.snippet
        return await asyncio.to_thread(best_passage, page.text, query, self.passage_words) or result.snippet


class Workers:
    """Up to `count` processes of one event loop, without the variables `hidden`; a page that takes too long ends one."""

    def __init__(self, count: int, job_timeout_s: float, hidden: Collection[str] = ()) -> None:
        self._job_timeout_s = job_timeout_s
        self._environ = {name: value for name, value in os.environ.items() if name not in hidden}
        self._slots = RankedSlots(count)
        self._idle: list[Process] = []

    async def read(self, fetched: Fetched, rank: int = 0) -> Page | None:
        """The text of the page, None without one; waits for its turn by `rank`. Raises RunError if no process starts."""
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

    async def read(self, url: str, rank: int = 0) -> Page | None:
        """The page at `url`, None where it cannot be had or has no text; a lower `rank` goes first."""
        try:
            page = await self.workers.read(await self.fetcher.fetch(url, rank), rank)
        except PageError as error:
            _log.info("%s", error)
            return None
        if page is None:
            _log.info("%r has no text that can be read within the limits", url[:200])
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
        """{"url", "contents"} of each URL, None for what is not there in time. For any event loop; may be cancelled."""
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
    """Search of the web with keys from `environ`. Raises UserError for a bad provider, a missing key or a bad endpoint."""
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

    Passages are whole paragraphs (lines), up to `words` words. Without blanks between words a text seldom matches.
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
