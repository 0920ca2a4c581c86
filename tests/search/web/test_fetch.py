"""Pages that misbehave, over a real socket."""

from __future__ import annotations

import ipaddress
import tracemalloc

import httpx
import pytest

from rlsys.search.web.web_search import Fetched, FetchLimits, GuardedTransport, PageError, PageFetcher, Policy
from tests.search.web.fake_web import BOMB_BYTES, HTML, FakeWeb, gzipped, redirect_to

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


def local(web: FakeWeb, *more_ports: int) -> Policy:
    port = httpx.URL(web.base).port
    assert port is not None
    return Policy(frozenset({port, *more_ports}), frozenset({LOOPBACK}))


async def fetch(web: FakeWeb, path: str, limits: FetchLimits | None = None) -> Fetched:
    limits = limits or FetchLimits(timeout_s=60.0)
    fetcher = PageFetcher(GuardedTransport(local(web, 80), max_connections=4), limits)
    try:
        return await fetcher.fetch(web.base + path)
    finally:
        await fetcher.close()


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("html", "text/html"), ("xhtml", "application/xhtml+xml"), ("gzip", "text/html"), ("hop/3", "text/html")],
)
async def test_pages_are_fetched(web: FakeWeb, name: str, media_type: str) -> None:
    assert await fetch(web, f"/page/{name}") == Fetched(HTML.encode(), media_type, "utf-8" if "x" not in name else None)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/page/bomb", "larger"),
        ("/page/double-bomb", "gzip, gzip"),
        ("/page/flood", "larger"),
        ("/page/brotli", "'br'"),
        ("/page/broken-gzip", "gzip"),
        ("/page/short-gzip", "early"),
        ("/page/pdf", "content type"),
        ("/page/untyped", "content type"),
        ("/page/missing", "404"),
        ("/page/drip", "longer"),
        ("/page/hop/9", "redirects"),
        (redirect_to("http://169.254.169.254/latest/meta-data"), r"169\.254\.169\.254"),
        (redirect_to("http://[::1]/"), "::1"),
        (redirect_to("http://2130706433/"), "2130706433"),
        (redirect_to("file:///etc/passwd"), "'file'"),
        (redirect_to("http://user@127.0.0.1/"), "user name"),
        (redirect_to("http://127.0.0.1:22/"), "port 22"),
    ],
)
async def test_what_is_refused_is_one_sentence(web: FakeWeb, path: str, reason: str) -> None:
    with pytest.raises(PageError, match=reason) as caught:
        await fetch(web, path, FetchLimits(timeout_s=0.5 if "drip" in path else 60, max_bytes=100_000))
    assert "\n" not in str(caught.value)


async def test_a_bomb_takes_no_memory(web: FakeWeb) -> None:
    gzipped(BOMB_BYTES)
    tracemalloc.start()
    with pytest.raises(PageError):
        await fetch(web, "/page/bomb", FetchLimits(timeout_s=300, max_bytes=100_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BOMB_BYTES / 16


async def test_no_cookie_is_kept(web: FakeWeb) -> None:
    await fetch(web, "/page/hop/2")
    assert web.cookies == ["", "", ""]


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "http://", "http://[::1", "http://x\ud800/", "http://\x00/", "http://a..b/", "//x/"],
)
async def test_what_is_no_url_is_a_page_error(url: str) -> None:
    fetcher = PageFetcher(GuardedTransport(Policy(), max_connections=1), FetchLimits())
    with pytest.raises(PageError, match="cannot be fetched"):
        await fetcher.fetch(url)
    await fetcher.close()
