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
    limits = limits or FetchLimits()
    fetcher = PageFetcher(GuardedTransport(local(web, 80), max_connections=4), limits)
    try:
        return await fetcher.fetch(web.base + path)
    finally:
        await fetcher.close()


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("html", "text/html"),
        ("xhtml", "application/xhtml+xml"),
        ("gzip", "text/html"),
        ("hop/3", "text/html"),
    ],
)
async def test_pages_are_fetched(web: FakeWeb, name: str, media_type: str) -> None:
    assert await fetch(web, f"/page/{name}") == Fetched(HTML.encode(), media_type, "utf-8" if "x" not in name else None)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/page/bomb", "larger than 100000 bytes"),
        ("/page/double-bomb", "encoding 'gzip, gzip' is not gzip"),
        ("/page/flood", "larger than 100000 bytes"),
        ("/page/brotli", "encoding 'br' is not gzip"),
        ("/page/broken-gzip", "it is not gzip"),
        ("/page/short-gzip", "ends too early"),
        ("/page/pdf", "content type is not one of"),
        ("/page/image", "content type is not one of"),
        ("/page/untyped", "content type is not one of"),
        ("/page/missing", "status 404"),
        ("/page/drip", "longer than 0.5 s"),
        ("/page/hop/9", "redirects more than 5 times"),
        (redirect_to("http://10.0.0.1/"), r"10\.0\.0\.1, which is not on the public internet"),
        (redirect_to("http://169.254.169.254/latest/meta-data"), r"not on the public internet"),
        (redirect_to("http://[::1]/"), "not on the public internet"),
        (redirect_to("http://2130706433/"), "unusual form"),
        (redirect_to("http://0177.0.0.1/"), "0177"),
        (redirect_to("file:///etc/passwd"), "scheme 'file'"),
        (redirect_to("http://user@127.0.0.1/"), "user name"),
        (redirect_to("http://127.0.0.1:22/"), "port 22"),
    ],
)
async def test_what_is_refused_is_one_sentence(web: FakeWeb, path: str, reason: str) -> None:
    gzipped(BOMB_BYTES)
    tracemalloc.start()
    with pytest.raises(PageError, match=reason) as caught:
        await fetch(web, path, FetchLimits(timeout_s=0.5 if "drip" in path else 10, max_bytes=100_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    if path == "/page/bomb":
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
