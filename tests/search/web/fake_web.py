"""Fake web of one server on a real socket: a search provider in Serper's format, and pages that misbehave."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "s3cret-key-0123456789"
BOMB_BYTES = 64 * 1024 * 1024
CSE_ID = "engine-9876543210"
KEYS = ("GOOGLE_API_KEY", "SERPAPI_API_KEY", "SERPER_API_KEY", "BRAVE_API_KEY", "BING_API_KEY")
ENVIRON = {**dict.fromkeys(KEYS, KEY), "GOOGLE_CSE_ID": CSE_ID}
RESULTS = 200
"""Number of results for every query."""
ARTICLE = "".join(
    f"<p>{text}</p>"
    for text in (
        "Rivers carry water from mountains to the sea, and most old towns were founded beside one of them. " * 6,
        "The lighthouse of Kalmar was built in 1852 by the engineer Astrid Holm, who also drew its lamp. " * 3,
        "Bread was the main food of the region, together with fish, cheese and a soup of white cabbage. " * 6,
    )
)
HTML = f"<html><head><title>Old  Towns</title></head><body><article>{ARTICLE}</article></body></html>"


class FakeWeb:
    """Server that records its requests; `script` sets the next answers."""

    def __init__(self) -> None:
        self.base = ""
        self.script: list[Callable[[], Response]] = []
        """Answers that providers give before any results, in order."""
        self.asked: list[dict[str, Any]] = []
        """Parameters or body of each request to a provider, with the headers that hold a key."""
        self.fetched: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        """Headers of each request for a page."""

    def forget(self) -> None:
        for seen in (self.script, self.asked, self.fetched, self.headers):
            seen.clear()

    def app(self) -> Starlette:
        search = Route("/search", self._search, methods=["GET", "POST"])
        return Starlette(routes=[Route("/page/{name:path}", self._page), search])

    def item(self, index: int) -> tuple[str, str, str]:
        """Return title, URL and snippet of result `index`, from 0."""
        return f"Title {index}", f"{self.base}/page/r{index}", f"Snippet {index} & more."

    async def _search(self, request: Request) -> Response:
        asked = dict(request.query_params) | json.loads(await request.body() or "{}")
        self.asked.append(asked | {name: value for name, value in request.headers.items() if value == KEY})
        if self.script:
            return self.script.pop(0)()
        first = (asked.get("page", 1) - 1) * asked["num"]
        rows = range(first, min(first + asked["num"], RESULTS))
        organic = [dict(zip(("title", "link", "snippet"), self.item(row), strict=True)) for row in rows]
        return JSONResponse({"searchParameters": {"q": asked["q"], "type": "search"}, "organic": organic})

    async def _page(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.fetched.append(name)
        self.headers.append(request.headers)
        if name.startswith("to/"):
            return RedirectResponse(bytes.fromhex(name[3:]).decode())
        if name.startswith("hop/"):
            left = int(name[4:])
            answer = RedirectResponse(f"/page/hop/{left - 1}") if left else Response(HTML, media_type="text/html")
            answer.set_cookie("seen", "yes")
            return answer
        return PAGES[name]()


def redirect_to(url: str) -> str:
    """Return the path of a page that redirects to `url`."""
    return f"/page/to/{url.encode().hex()}"


@cache
def gzipped(size: int) -> bytes:
    """Return `size` zero bytes, compressed to a thousandth."""
    return gzip.compress(bytes(size))


def never_ending() -> Response:
    """Return a response that sends a byte every 10 ms and never ends."""

    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b"."
            await asyncio.sleep(0.01)

    return StreamingResponse(drip(), media_type="text/html")


def _packed(body: bytes) -> Callable[[], Response]:
    return lambda: Response(body, media_type="text/html", headers={"Content-Encoding": "gzip"})


PAGES: dict[str, Callable[[], Response]] = {
    **dict.fromkeys(("html", "r0", "r2"), lambda: Response(HTML, media_type="text/html")),
    "r1": lambda: Response("gone", 410),
    "xhtml": lambda: Response(HTML, media_type="application/xhtml+xml"),
    "text": lambda: Response("Plain\x00 text\x1b[31m.\r\n\r\nMore.", media_type="text/plain"),
    "gzip": _packed(gzip.compress(HTML.encode())),
    "bomb": lambda: _packed(gzipped(BOMB_BYTES))(),
    "broken-gzip": _packed(b"\x1f\x8b not gzip"),
    "short-gzip": _packed(gzip.compress(HTML.encode())[:-20]),
    "large": lambda: Response(bytes(1 << 20), media_type="text/html"),
    "drip": never_ending,
    "pdf": lambda: Response(b"%PDF-1.7", media_type="application/pdf"),
    "untyped": lambda: Response(HTML),
    "missing": lambda: Response("no", 404),
    "empty": lambda: Response("<html><body></body></html>", media_type="text/html"),
}
