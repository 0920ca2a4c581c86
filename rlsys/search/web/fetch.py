"""Fetching a page of the web, which may be hostile: bounded in time, in bytes, in hops and in where it goes.

Pages are fetched singly, on request, as a reader with a browser would; robots.txt is not consulted. Cookies
are neither kept nor sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from email.message import Message
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from rlsys.search.body import BodyError, Encoding, read_body
from rlsys.search.web.guard import MAX_TRIES, GuardedTransport, Refused
from rlsys.search.web.slots import Slots

_USER_AGENT = "rlsys/0.1 (web search of a language model)"
CONTENT_TYPES = frozenset({"text/html", "application/xhtml+xml", "text/plain"})


class PageError(Exception):
    """A page that cannot be had: one sentence."""


class _Unwanted(Exception):
    """An answer that is not the page; the text says why."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What one page may cost."""

    timeout_s: float = 10.0
    """From the first look at the name to the last byte, over all redirects."""
    max_bytes: int = 2 * 1024 * 1024
    """Of the body, compressed and decompressed."""
    max_redirects: int = 5
    max_concurrent: int = 32
    """Pages in flight."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The body of a page as it came."""

    body: bytes
    media_type: str
    """One of CONTENT_TYPES."""
    charset: str | None
    """As the server declares it, if it does; not checked."""


class PageFetcher:
    """Fetches pages over `transport`, which decides where requests may go. For one event loop."""

    def __init__(self, transport: GuardedTransport, limits: FetchLimits) -> None:
        self._limits = limits
        self._slots = Slots(limits.max_concurrent)
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
            except (Refused, BodyError, _Unwanted, httpx.HTTPError) as error:
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
