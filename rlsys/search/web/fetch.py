"""Fetches pages of the web, which may be hostile: bounded in time, in bytes, in hops and in where they come from.

Pages are fetched singly, on request, as a reader with a browser would; robots.txt is not consulted. Cookies are neither
kept nor sent.

A URL of a search result is a stranger's. Fetched without care it may name a cloud's metadata service, a printer or this
machine (server-side request forgery), so only addresses of the public internet are asked. Invariants of
`GuardedTransport`:
  - every request is checked, so every hop of a chain of redirects is;
  - a name is resolved once, all its addresses are checked, and the connection is made to one that was checked: a name
    that answers otherwise the next time (DNS rebinding) gains nothing;
  - TLS is still verified against the name;
  - no proxy is used: it would resolve the name by itself, and all of this would check nothing.
The tables are written out, as `ipaddress.is_global` passes multicast and the transition ranges that carry IPv4
addresses, and differs between versions of Python.
"""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
import itertools
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.message import Message
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import httpx

from rlsys.search.body import BodyError, Encoding, read_body

CONTENT_TYPES = frozenset({"text/html", "application/xhtml+xml", "text/plain"})
_USER_AGENT = "rlsys/0.1 (web search of a language model)"
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> numeric addresses, the preferred first. Raises OSError for a name that has none."""

_NOT_PUBLIC_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # carrier-grade NAT
            "127.0.0.0/8",  # loopback
            "169.254.0.0/16",  # link-local, clouds' metadata services
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",  # private
            "198.18.0.0/15",  # benchmarking
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, broadcast
        ),
    )
)
_PUBLIC_V6 = IPv6Network("2000::/3")
# Protocol assignments and Teredo, and twice documentation.
_NOT_PUBLIC_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")
MAX_TRIES = 4  # addresses of one name that are tried


class UrlRefused(Exception):
    """A URL that is not fetched; the text says why."""


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
            # The URL standard takes it for an address, as its last label is a number. Decimal, octal, hexadecimal and short forms: resolvers disagree about what they are.
            raise UrlRefused(f"the host {host[:60]!r} is an address in an unusual form")
        return host, port


def _carried(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR:
        return IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
    return address


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
    """A transport of httpx that connects to permitted addresses only.

    Connections are not kept: the pool tells them apart by address, and two names of one address must not share a
    connection whose certificate was checked for one of them.
    """

    def __init__(
        self, policy: Policy, *, max_connections: int, resolver: Resolver = resolve, tls: ssl.SSLContext | None = None
    ) -> None:
        self._policy = policy
        self._resolve = resolver
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=0)
        super().__init__(verify=tls or True, limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request`, a GET, to the first address that answers. Raises UrlRefused before any connection."""
        host, port = self._policy.check(request.url)
        # The Host header stays, and so does the name that TLS asks for and verifies.
        extensions = request.extensions | ({} if _literal(host) is not None else {"sni_hostname": host})
        error: httpx.TransportError | None = None
        for address in (await self._addresses(host, port, request))[:MAX_TRIES]:
            url = request.url.copy_with(host=str(address))
            pinned = httpx.Request(request.method, url, headers=request.headers, extensions=extensions)
            try:
                return await super().handle_async_request(pinned)
            except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
                error = failed
        assert error is not None
        raise error

    async def _addresses(self, host: str, port: int, request: httpx.Request) -> list[Address]:
        """At least one address, all of them permitted."""
        try:
            texts = [host] if _literal(host) is not None else await self._resolve(host, port)
            addresses = [ipaddress.ip_address(text) for text in texts]
        except (OSError, ValueError) as error:
            raise httpx.ConnectError(f"the name {host} cannot be resolved ({error})", request=request) from None
        if not addresses:
            raise httpx.ConnectError(f"the name {host} has no address", request=request)
        for address in addresses:
            if not self._policy.permits(address):
                raise UrlRefused(f"{host} is at {address}, which is not on the public internet")
        return addresses


class PageError(Exception):
    """A page that cannot be had: one sentence."""


class _Unwanted(Exception):
    """An answer that is not the page; the text says why."""


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
            headers={
                "User-Agent": _USER_AGENT,
                "Accept": ", ".join(sorted(CONTENT_TYPES)),
                "Accept-Encoding": Encoding.gzip,
            },
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
            except (UrlRefused, BodyError, _Unwanted, httpx.HTTPError) as error:
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
        raise _Unwanted(f"it redirects more than {self._limits.max_redirects} times")

    async def _read(self, response: httpx.Response) -> Fetched:
        if response.status_code != httpx.codes.OK:
            raise _Unwanted(f"status {response.status_code}")
        header = Message()
        header["Content-Type"] = response.headers.get("content-type", "")
        media_type = header.get_content_type()
        if "content-type" not in response.headers or media_type not in CONTENT_TYPES:
            raise _Unwanted(f"its content type is not one of {', '.join(sorted(CONTENT_TYPES))}")
        body = await read_body(response.headers, response.aiter_raw(), self._limits.max_bytes, Encoding.gzip)
        return Fetched(body, media_type, header.get_content_charset())


class RankedSlots:
    """A semaphore of one event loop: a free slot goes to the lowest rank, within a rank to who came first.

    With the position of a page in its request as its rank, no request waits for the later pages of another.
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
