"""A web of one server on a real socket: search providers in their public formats, and pages that misbehave.

The formats are written after the references of the APIs, not after the code under test.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "s3cret-key-0123456789"
BOMB_BYTES = 64 * 1024 * 1024
CSE_ID = "engine-9876543210"
ENVIRON = {
    "GOOGLE_API_KEY": KEY,
    "GOOGLE_CSE_ID": CSE_ID,
    "SERPAPI_API_KEY": KEY,
    "SERPER_API_KEY": KEY,
    "BRAVE_API_KEY": KEY,
    "BING_API_KEY": KEY,
}
ARTICLE = "".join(
    f"<p>{text}</p>"
    for text in (
        "Rivers carry water from mountains to the sea, and most old towns were founded beside one of them. " * 6,
        "The lighthouse of Kalmar was built in 1852 by the engineer Astrid Holm, who also drew its lamp. " * 3,
        "Bread was the main food of the region, together with fish, cheese and a soup of white cabbage. " * 6,
    )
)
HTML = f"<html><head><title>Old  Towns</title></head><body><article>{ARTICLE}</article></body></html>"


@dataclass
class FakeWeb:
    """What was asked, and what the next answers are instead of results."""

    results: int = 200
    """Results that every provider has for any query."""
    script: list[Callable[[], Response]] = field(default_factory=list)
    """Answers of providers that come first, in order."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Parameters, or the body, of requests to providers, without keys."""
    fetched: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    cookies: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    base: str = ""

    def forget(self) -> None:
        """Be as new for the next test."""
        self.results, self.most_running = 200, 0
        for seen in (self.script, self.asked, self.fetched, self.hosts, self.cookies):
            seen.clear()

    def app(self) -> Starlette:
        routes = [
            Route("/google", self._provider(self._google)),
            Route("/serpapi", self._provider(self._serpapi)),
            Route("/serper", self._provider(self._serper), methods=["POST"]),
            Route("/brave", self._provider(self._brave)),
            Route("/bing", self._provider(self._bing)),
            Route("/page/{name:path}", self._page),
        ]
        return Starlette(routes=routes)

    def _provider(self, answer: Callable[..., Any]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                asked = {name: values[0] for name, values in parse_qs(request.url.query).items()}
                if request.method == "POST":
                    asked |= json.loads(await request.body())
                for secret in ("key", "cx", "api_key"):
                    asked.pop(secret, None)
                self.asked.append(asked)
                await asyncio.sleep(0)
                if self.script:
                    return self.script.pop(0)()
                return answer(request, asked)
            finally:
                self.running -= 1

        return handle

    def item(self, index: int) -> tuple[str, str, str]:
        """Title, URL and snippet of result `index`, from 0."""
        return f"Title {index}", f"{self.base}/page/r{index}", f"Snippet {index} & more."

    def _items(self, first: int, count: int, title: str, url: str, snippet: str) -> list[dict[str, Any]]:
        rows = range(first, min(first + count, self.results))
        return [dict(zip((title, url, snippet), self.item(row), strict=True)) for row in rows]

    def _google(self, request: Request, asked: dict[str, Any]) -> Response:
        query = request.query_params
        if query.get("key") != KEY or query.get("cx") != CSE_ID:
            return JSONResponse({"error": {"code": 400, "message": "API key not valid."}}, 400)
        count, start = int(asked["num"]), int(asked["start"])
        if not 1 <= count <= 10 or start + count - 1 > 100:
            return JSONResponse({"error": {"code": 400, "message": "invalid argument"}}, 400)
        items = self._items(start - 1, count, "title", "link", "snippet")
        queries: dict[str, Any] = {"request": [{"count": len(items)}]}
        if start - 1 + count < self.results:
            queries["nextPage"] = [{"startIndex": start + count}]
        body = {"kind": "customsearch#search", "queries": queries}
        return JSONResponse(body | ({"items": items} if items else {}))

    def _serpapi(self, request: Request, asked: dict[str, Any]) -> Response:
        if request.query_params.get("api_key") != KEY:
            return JSONResponse({"error": f"Invalid API key. You sent {KEY}"}, 401)
        assert asked["engine"] == "google"
        start = int(asked["start"])
        body: dict[str, Any] = {"search_metadata": {"status": "Success"}}
        items = self._items(start, 10, "title", "link", "snippet")
        if not items:
            return JSONResponse(body | {"error": "Google hasn't returned any results for this query."})
        body["organic_results"] = items
        if start == 0:
            body["answer_box"] = {"type": "organic_result", "answer": "42", "snippet": "It is 42."}
            body["related_questions"] = [{"question": "Why?", "snippet": "Because.", "link": "http://why/"}]
        if start + 10 < self.results:
            body["serpapi_pagination"] = {"current": 1, "next": "https://serpapi.com/search.json?start=10"}
        return JSONResponse(body)

    def _serper(self, request: Request, asked: dict[str, Any]) -> Response:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"message": "Unauthorized.", "statusCode": 403}, 403)
        first = (asked.get("page", 1) - 1) * asked["num"]
        organic = self._items(first, asked["num"], "title", "link", "snippet")
        return JSONResponse({"searchParameters": {"q": asked["q"], "type": "search"}, "organic": organic})

    def _brave(self, request: Request, asked: dict[str, Any]) -> Response:
        if request.headers.get("x-subscription-token") != KEY:
            return JSONResponse({"type": "ErrorResponse", "error": {"detail": "The token is invalid."}}, 422)
        count, offset = int(asked["count"]), int(asked["offset"])
        if not (1 <= count <= 20 and 0 <= offset <= 9 and len(asked["q"]) <= 400):
            return JSONResponse({"type": "ErrorResponse", "error": {"detail": "Unprocessable."}}, 422)
        items = self._items(offset * count, count, "title", "url", "description")
        for item in items:
            item["description"] = item["description"].replace("&", "&amp;")
        more = (offset + 1) * count < self.results
        query = {"original": asked["q"], "more_results_available": more}
        return JSONResponse({"type": "search", "query": query, "web": {"type": "search", "results": items}})

    def _bing(self, request: Request, asked: dict[str, Any]) -> Response:
        if request.headers.get("ocp-apim-subscription-key") != KEY:
            return JSONResponse({"error": {"code": "401", "message": "Access denied."}}, 401)
        count, offset = int(asked["count"]), int(asked["offset"])
        assert 1 <= count <= 50
        items = self._items(offset, count, "name", "url", "snippet")
        body: dict[str, Any] = {"_type": "SearchResponse", "queryContext": {"originalQuery": asked["q"]}}
        if items:
            body["webPages"] = {"totalEstimatedMatches": self.results, "value": items}
        return JSONResponse(body)

    async def _page(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.fetched.append(name)
        self.hosts.append(request.headers["host"])
        self.cookies.append(request.headers.get("cookie", ""))
        if name.startswith("to/"):
            return RedirectResponse(bytes.fromhex(name[3:]).decode())
        if name.startswith("hop/"):
            left = int(name[4:])
            answer = RedirectResponse(f"/page/hop/{left - 1}") if left else Response(HTML, media_type="text/html")
            answer.set_cookie("seen", "yes")
            return answer
        return PAGES[name.split("/")[0]]()


def redirect_to(url: str) -> str:
    """The path of a page that redirects to `url`."""
    return f"/page/to/{url.encode().hex()}"


@cache
def gzipped(size: int) -> bytes:
    """`size` zeros, compressed a thousandfold."""
    return gzip.compress(bytes(size))


def _encoded(body: bytes, encoding: str) -> Response:
    return Response(body, media_type="text/html", headers={"Content-Encoding": encoding})


def never_ending() -> Response:
    """A byte at a time, often enough that no read takes long, without an end."""

    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b"."
            await asyncio.sleep(0.01)

    return StreamingResponse(drip(), media_type="text/html")


def _flood() -> Response:
    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield bytes(65536)

    return StreamingResponse(blocks(), media_type="text/html")


PAGES: dict[str, Callable[[], Response]] = {
    "html": lambda: Response(HTML, media_type="text/html"),
    "r0": lambda: Response(HTML, media_type="text/html"),
    "r1": lambda: Response("gone", 410),
    "r2": lambda: Response(HTML, media_type="text/html"),
    "xhtml": lambda: Response(HTML, media_type="application/xhtml+xml"),
    "text": lambda: Response("Plain\x00 text\x1b[31m.\r\n\r\nMore.", media_type="text/plain"),
    "gzip": lambda: _encoded(gzip.compress(HTML.encode()), "gzip"),
    "bomb": lambda: _encoded(gzipped(BOMB_BYTES), "gzip"),
    "double-bomb": lambda: _encoded(gzip.compress(gzipped(BOMB_BYTES)), "gzip, gzip"),
    "broken-gzip": lambda: _encoded(b"\x1f\x8b not gzip", "gzip"),
    "short-gzip": lambda: _encoded(gzip.compress(HTML.encode())[:-20], "gzip"),
    "brotli": lambda: _encoded(b"?", "br"),
    "flood": _flood,
    "drip": never_ending,
    "pdf": lambda: Response(b"%PDF-1.7", media_type="application/pdf"),
    "image": lambda: Response(b"\x89PNG", media_type="image/png"),
    "untyped": lambda: Response(HTML),
    "missing": lambda: Response("no", 404),
    "empty": lambda: Response("<html><body></body></html>", media_type="text/html"),
}
