"""The contract: as upstream clients use it, as OpenAPI describes it, and as no client should."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import aiohttp
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import load_all_checks

from rlsys.search.server.asgi import create_app
from rlsys.search.server.contract import ServerLimits
from tests.support.serving import serving

from .gated import Gated, Lengths, Pages, in_process, until

TOKEN = "s3cret"
LIMITS = ServerLimits(
    max_queries=5, max_query_chars=40, max_topk=9, max_document_chars=30, cache_entries=0, body_timeout_s=0.3
)


class Urls(Gated):
    """Passages with a URL, as those of ASearcher's corpora."""

    def find(self, prepared: Any, topk: int) -> list[list[Any]]:
        lines = super().find(prepared, topk)
        return [
            [hit._replace(document={**hit.document, "url": f"https://a/{row}"}) for row, hit in enumerate(line)]
            for line in lines
        ]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(Urls(), 3, reranker=Lengths(), pages=Pages())) as address:
        yield address


# ---- upstream clients


def test_search_r1_batch_search(url: str) -> None:
    payload = {"queries": ["Who wrote Faust?", "Mali"], "topk": 3, "return_scores": True}
    results = requests.post(f"{url}/retrieve", json=payload, timeout=60).json()["result"]
    assert len(results) == 2
    for query, line in zip(payload["queries"], results, strict=True):  # type: ignore[call-overload]
        assert len(line) == 3
        text = ""
        for place, hit in enumerate(line):
            title, _, rest = hit["document"]["contents"].partition("\n")
            text += f"Doc {place + 1}(Title: {title}) {rest}\n"
            assert isinstance(hit["score"], float)
        assert text.startswith(f"Doc 1(Title: {query})")


async def test_asearcher_and_rlinf_query_and_access(url: str) -> None:
    asked = {"queries": ["Mali"], "topk": 5, "return_scores": False}
    timeout = aiohttp.ClientTimeout(total=120, sock_connect=120)
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/retrieve", json=asked, timeout=timeout) as response:
            response.raise_for_status()
            found = await response.json()
        documents = [[hit["contents"] for hit in line] for line in found["result"]]
        urls = [[hit["url"] for hit in line] for line in found["result"]]
        wanted = {"urls": ["https://b.example/", "https://gone.example/", "https://a.example/"]}
        async with session.post(f"{url}/access", json=wanted, timeout=timeout) as response:
            response.raise_for_status()
            pages = [page["contents"] if page is not None else "" for page in (await response.json())["result"]]
    assert documents == [["Mali"] * 5]
    assert urls == [[f"https://a/{row}" for row in range(5)]]
    assert pages == ["page of https://b.example/", "", "page of https://a.example/"]


def test_search_r1_reranks_what_it_retrieved(url: str) -> None:
    found = requests.post(f"{url}/retrieve", json={"queries": ["Mali", "Peru"]}, timeout=60).json()["result"]
    body = {"queries": ["Mali", "Peru"], "documents": found, "rerank_topk": 2, "return_scores": True}
    ranked = requests.post(f"{url}/rerank", json=body, timeout=60).json()["result"]
    assert [[hit["document"]["contents"] for hit in line] for line in ranked] == [["Mali"] * 2, ["Peru"] * 2]
    again = {**body, "documents": ranked}
    assert requests.post(f"{url}/rerank", json=again, timeout=60).json()["result"] == ranked


# ---- the description


@pytest.fixture(scope="module")
def described() -> Any:
    app = create_app(Gated(), 3, LIMITS, reranker=Lengths(), pages=Pages(), token=TOKEN)
    load_all_checks()
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize("path", ["/retrieve", "/rerank", "/access", "/health", "/metrics"])
def test_the_description_is_true(described: Any, path: str, mode: schemathesis.GenerationMode) -> None:
    """All of schemathesis' checks: valid bodies are answered as described, invalid ones refused, never a 500."""
    method = "GET" if path in ("/health", "/metrics") else "POST"
    if mode.is_negative and method == "GET":
        return  # Nothing to send that could be wrong.

    @seed(0)
    @settings(
        max_examples=25, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        body: Any = case.body
        if path == "/rerank" and mode.is_positive:
            # As many lists as queries, which JSON schema cannot say.
            lists = body["documents"]
            body["documents"] = [lists[row % len(lists)] for row in range(len(body["queries"]))]
        case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})

    check()


# ---- bodies, paths and headers that are wrong


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, ""),
        (b"queries=Paris", 400, ""),
        (b'{"queries": ["\xff"]}', 400, ""),
        (b'{"queries": ["\\ud800"]}', 400, ""),
        (b'{"queries": ' + b"[" * 100_000, 400, ""),
        (b"[]", 422, "the body"),
        (b"{}", 422, "queries"),
        (b'{"queries": "Paris"}', 422, "queries"),
        (b'{"queries": []}', 422, "queries"),
        (b'{"queries": ["a", null]}', 422, "queries.1"),
        (b'{"queries": ["a"], "topk": 0}', 422, "topk"),
        (b'{"queries": ["a"], "topk": 101}', 422, "topk"),
        (b'{"queries": ["a"], "topk": 1e999}', 422, "topk"),
        (b'{"queries": ["a"], "topk": 2.5}', 422, "topk"),
        (b'{"queries": ["a"], "topk": true}', 422, "topk"),
        (b'{"queries": ["a"], "topk": "3"}', 422, "topk"),
        (b'{"queries": ["a"], "topk": NaN}', 422, "topk"),
        (b'{"queries": ["a"], "topk": 9' + b"9" * 400 + b"}", 422, "topk"),
        (b'{"queries": ["a"], "return_scores": "yes"}', 422, "return_scores"),
        (b'{"queries": ["a"], "top_k": 3}', 422, "top_k"),
        (b'{"queries": ["a"], "rerank": true}', 422, "rerank"),
        (json.dumps({"queries": ["a", "b" * 8193]}).encode(), 422, "queries.1"),
        (b'{"queries": [' + b'"a",' * 1500 + b'"a"], "topk": 100}', 422, "queries"),
        (json.dumps({"queries": ["a"] * 4097}).encode(), 422, "queries"),
    ],
)
async def test_a_wrong_body_is_a_4xx_that_names_its_field(body: bytes, status: int, field: str) -> None:
    async with in_process(Gated()) as client:
        answer = await client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(field)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/retrieve", 405),
        ("PUT", "/access", 405),
        ("POST", "/health", 405),
        ("GET", "/%00", 404),
        ("POST", "/access", 404),
        ("POST", "/rerank", 404),
    ],
)
async def test_other_paths_and_methods_and_what_is_not_loaded_are_4xx(method: str, path: str, status: int) -> None:
    async with in_process(Gated()) as client:
        assert (await client.request(method, path)).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
    ],
)
async def test_a_body_of_another_kind_is_415(headers: dict[str, str], status: int) -> None:
    async with in_process(Gated()) as client:
        answer = await client.post("/retrieve", content=b'{"queries": ["a"]}', headers=headers)
    assert answer.status_code == status


# ---- bytes that no HTTP library would send


def raw(url: str, head: str, body: bytes = b"", then: bytes = b"") -> bytes:
    """The answer; `then` is sent until it comes."""
    host, port = url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=60)) as sock:
        sock.sendall(head.replace("\n", "\r\n").encode() + body)
        while then:
            sock.settimeout(0.02)
            try:
                return sock.recv(65536)
            except TimeoutError:
                sock.settimeout(60)
                sock.sendall(then)
        return sock.recv(65536)


POST = "POST /retrieve HTTP/1.1\nHost: a\nContent-Type: application/json\n"


@pytest.fixture
def small() -> Iterator[tuple[str, Gated]]:
    gated = Gated(prepare_open=False)
    limits = ServerLimits(max_body_bytes=1000, body_timeout_s=0.3, max_batch=1)
    with serving(create_app(gated, 3, limits)) as address:
        yield address, gated
        gated.may_prepare.set()


def test_a_body_that_never_ends_is_408_and_one_that_is_too_large_413(small: tuple[str, Gated]) -> None:
    chunked = POST + "Transfer-Encoding: chunked\n\n"
    assert raw(small[0], POST + "Content-Length: 100\n\n", b'{"queries": ').startswith(b"HTTP/1.1 408")
    assert raw(small[0], chunked, b"2\r\n{ \r\n", then=b"1\r\n \r\n").startswith(b"HTTP/1.1 408")
    assert raw(small[0], POST + "Content-Length: 1500\n\n", b" " * 1500).startswith(b"HTTP/1.1 413")
    endless = raw(small[0], chunked, then=b"1f4\r\n" + b" " * 500 + b"\r\n")
    assert endless.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in endless.lower()


async def test_a_client_that_hangs_up_is_not_searched_for(small: tuple[str, Gated]) -> None:
    address, gated = small

    async def seen(path: str, text: bytes) -> None:
        async with asyncio.timeout(60):
            while text not in await (await session.get(address + path)).read():
                await asyncio.sleep(0.01)

    async with aiohttp.ClientSession() as session:
        first = threading.Thread(target=raw, args=(address, POST + "Content-Length: 22\n\n", b'{"queries": ["stays"]}'))
        first.start()
        await until(lambda: gated.seen == [["stays"]])
        host, port = address.removeprefix("http://").split(":")
        leaving = socket.create_connection((host, int(port)))
        leaving.sendall((POST + "Content-Length: 22\n\n").replace("\n", "\r\n").encode() + b'{"queries": ["leave"]}')
        await seen("/health", b'"pending":1')
        leaving.close()
        await seen("/metrics", b'path="/retrieve",status="499"')
        gated.may_prepare.set()
        async with session.post(f"{address}/retrieve", json={"queries": ["last"]}) as response:
            assert response.status == 200
    first.join()
    assert gated.seen == [["stays"], ["last"]]
