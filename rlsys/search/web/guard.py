"""Which addresses a fetched page may come from: only those of the public internet.

A URL of a search result is a stranger's. Fetched without care it may name a cloud's metadata service, a
printer or this machine (server-side request forgery). Invariants of `GuardedTransport`:
  - every request is checked, so every hop of a chain of redirects is;
  - a name is resolved once, all its addresses are checked, and the connection is made to one that was
    checked: a name that answers otherwise the next time (DNS rebinding) gains nothing;
  - TLS is still verified against the name;
  - no proxy is used: it would resolve the name by itself, and all of this would check nothing.
The tables are written out, as `ipaddress.is_global` passes multicast and the transition ranges that carry
IPv4 addresses, and differs between versions of Python.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import httpx

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> numeric addresses, the preferred first. Raises OSError for a name that has none."""

_NOT_PUBLIC_V4 = tuple(
    IPv4Network(network)
    for network in (
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
    )
)
_PUBLIC_V6 = IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")
MAX_TRIES = 4
"""Addresses of one name that are tried."""


class Refused(Exception):
    """A URL that is not fetched; the text says why."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be fetched."""

    ports: frozenset[int] = frozenset({80, 443})
    allow_private: frozenset[Network] = frozenset()
    """Networks that are fetched from though they are not public: for tests, and for sites of one's own."""

    def permits(self, address: Address) -> bool:
        """Whether a connection to `address` may be made."""
        plain = _carried(address)
        return any(plain in network for network in self.allow_private) or _is_public(plain)

    def check(self, url: httpx.URL) -> tuple[str, int]:
        """The host, in ASCII, and the port of `url`. Raises Refused."""
        if url.scheme not in ("http", "https"):
            raise Refused(f"the scheme {url.scheme[:20]!r} is not http or https")
        if url.userinfo:
            raise Refused("it has a user name in it")
        host = url.raw_host.decode("ascii").rstrip(".").lower()
        if not host:
            raise Refused("it names no host")
        port = url.port if url.port is not None else {"http": 80, "https": 443}[url.scheme]
        if port not in self.ports:
            raise Refused(f"port {port} is not one of {sorted(self.ports)}")
        if _looks_numeric(host) and _literal(host) is None:
            # Decimal, octal, hexadecimal and short forms: resolvers disagree about what they are.
            raise Refused(f"the host {host[:60]!r} is an address in an unusual form")
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


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    if address.scope_id is not None or address not in _PUBLIC_V6:
        return False
    return not any(address in network for network in _NOT_PUBLIC_V6)


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _looks_numeric(host: str) -> bool:
    """Whether the URL standard takes `host` for an address: its last label is a number."""
    last = host.rsplit(".", 1)[-1]
    return last.isdigit() or last.startswith("0x") or ":" in host


async def resolve(host: str, port: int) -> list[str]:
    """The system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class GuardedTransport(httpx.AsyncBaseTransport):
    """A transport of httpx that connects to permitted addresses only.

    Connections are not kept: the pool tells them apart by address, and two names of one address must not
    share a connection whose certificate was checked for one of them.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_connections: int,
        resolver: Resolver = resolve,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._policy = policy
        self._resolve = resolver
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(verify=tls or True, limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request`, a GET, to the first address that answers. Raises Refused before any connection."""
        host, port = self._policy.check(request.url)
        error: httpx.TransportError | None = None
        for address in (await self._addresses(host, port, request))[:MAX_TRIES]:
            try:
                return await self._inner.handle_async_request(_pinned(request, host, address))
            except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
                error = failed
        assert error is not None
        raise error

    async def aclose(self) -> None:
        await self._inner.aclose()

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
                raise Refused(f"{host} is at {address}, which is not on the public internet")
        return addresses


def _pinned(request: httpx.Request, host: str, address: Address) -> httpx.Request:
    """`request` to `address`; its Host header, and the name that TLS asks for and verifies, stay."""
    extensions = dict(request.extensions)
    if _literal(host) is None:
        extensions["sni_hostname"] = host
    return httpx.Request(
        request.method,
        request.url.copy_with(host=str(address)),
        headers=request.headers,
        extensions=extensions,
    )
