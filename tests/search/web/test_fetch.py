"""Pages that misbehave, over a real socket."""

from __future__ import annotations

import tracemalloc

import pytest

from rlsys.search.web.web_search import Fetched, FetchLimits, GuardedTransport, PageError, PageFetcher, Policy
from tests.search.web.conftest import local
from tests.search.web.fake_web import BOMB_BYTES, HTML, FakeWeb, gzipped, redirect_to


async def fetch(web: FakeWeb, path: str, timeout_s: float = 300.0) -> Fetched:
    limits = FetchLimits(timeout_s=timeout_s, max_bytes=100_000)
    fetcher = PageFetcher(GuardedTransport(local(web, 80), max_connections=4), limits)
    try:
        return await fetcher.fetch(web.base + path)
    finally:
        await fetcher.close()


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("html", "text/html"), ("xhtml", "application/xhtml+xml"), ("gzip", "text/html"), ("hop/3", "text/html")],
)
async def test_pages_are_fetched_without_cookies(web: FakeWeb, name: str, media_type: str) -> None:
    assert await fetch(web, f"/page/{name}") == Fetched(HTML.encode(), media_type, "utf-8" if "x" not in name else None)
    assert not any("cookie" in headers for headers in web.headers)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/page/large", "larger"),
        ("/page/broken-gzip", "gzip"),
        ("/page/short-gzip", "early"),
        ("/page/pdf", "content type"),
        ("/page/untyped", "content type"),
        ("/page/missing", "404"),
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
        await fetch(web, path)
    assert "\n" not in str(caught.value)


async def test_a_page_that_never_ends_is_given_up(web: FakeWeb) -> None:
    with pytest.raises(PageError, match=r"longer|Timeout"):
        await fetch(web, "/page/drip", timeout_s=0.5)


async def test_a_bomb_takes_no_memory(web: FakeWeb) -> None:
    gzipped(BOMB_BYTES)
    tracemalloc.start()
    with pytest.raises(PageError, match="larger"):
        await fetch(web, "/page/bomb")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BOMB_BYTES / 16


@pytest.mark.parametrize("url", ["", "nonsense", "http://[::1", "http://x\ud800/", "http://\x00/", "http://a..b/"])
async def test_what_is_no_url_is_a_page_error(url: str) -> None:
    fetcher = PageFetcher(GuardedTransport(Policy(), max_connections=1), FetchLimits())
    with pytest.raises(PageError, match="cannot be fetched"):
        await fetcher.fetch(url)
    await fetcher.close()
