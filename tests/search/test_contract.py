"""The contract: as upstream clients use it, as OpenAPI describes it, and as no client should."""

from __future__ import annotations

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

from rlsys.search.index.dense import VectorRetriever
from rlsys.search.server.asgi import create_app
from rlsys.search.server.contract import ServerLimits
from tests.support.ports import free_port

from .conftest import serving
from .gated import Gated, Lengths, Pages, until

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
    app = create_app(Urls(), 3, reranker=Lengths(), pages=Pages())
    with serving(app, free_port()) as address:
        yield address


def test_search_r1_batch_search(url: str) -> None:
    payload = {"queries": ["Who wrote Faust?", "Mali"], "topk": 3, "return_scores": True}
    results = requests.post(f"{url}/retrieve", json=payload, timeout=30).json()["result"]
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
        wanted = {"urls": ["https://a.example/", "https://gone.example/"]}
        async with session.post(f"{url}/access", json=wanted, timeout=timeout) as response:
            response.raise_for_status()
            pages = [page["contents"] if page is not None else "" for page in (await response.json())["result"]]
    assert documents == [["Mali"] * 5]
    assert urls == [[f"https://a/{row}" for row in range(5)]]
    assert pages == ["page of https://a.example/", ""]


def test_verl_search_tool(url: str) -> None:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    payload = {"queries": ["Mali", "Peru"], "topk": 3, "return_scores": True}
    response = requests.post(f"{url}/retrieve", headers=headers, json=payload, timeout=30)
    response.raise_for_status()
    for line in response.json().get("result", []):
        assert all(hit["document"]["contents"].split("\n")[0] in payload["queries"] for hit in line)  # type: ignore[operator]


def test_search_r1_reranks_what_it_retrieved(url: str) -> None:
    found = requests.post(f"{url}/retrieve", json={"queries": ["Mali", "Peru"]}, timeout=30).json()["result"]
    body = {"queries": ["Mali", "Peru"], "documents": found, "rerank_topk": 2, "return_scores": True}
    ranked = requests.post(f"{url}/rerank", json=body, timeout=30).json()["result"]
    assert [[hit["document"]["contents"] for hit in line] for line in ranked] == [["Mali"] * 2, ["Peru"] * 2]
    again = {**body, "documents": ranked}
    assert requests.post(f"{url}/rerank", json=again, timeout=30).json()["result"] == ranked


def raw(url: str, head: str, body: bytes = b"", then: bytes = b"") -> bytes:
    """What comes back for bytes that no HTTP library would send; `then` is sent until the server answers."""
    host, port = url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=20)) as sock:
        sock.sendall(head.replace("\n", "\r\n").encode() + body)
        if then:
            sock.settimeout(0.02)
            while True:
                try:
                    return sock.recv(65536)
                except TimeoutError:
                    sock.settimeout(20)
                    sock.sendall(then)
                    sock.settimeout(0.02)
        return sock.recv(65536)


POST = "POST /retrieve HTTP/1.1\nHost: a\nContent-Type: application/json\n"


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[str, Gated]]:
    gated = Gated(prepare_open=False)
    limits = ServerLimits(max_body_bytes=1000, body_timeout_s=0.3, max_batch=1)
    with serving(create_app(gated, 3, limits), free_port()) as address:
        yield address, gated
        gated.may_prepare.set()


def test_a_body_that_never_ends_is_408(small: tuple[str, Gated]) -> None:
    answer = raw(small[0], POST + "Content-Length: 100\n\n", b'{"queries": ')
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.3 s" in answer
    chunked = raw(small[0], POST + "Transfer-Encoding: chunked\n\n", b"2\r\n{ \r\n", then=b"1\r\n \r\n")
    assert chunked.startswith(b"HTTP/1.1 408")


def test_a_body_that_is_too_large_is_413(small: tuple[str, Gated]) -> None:
    head = POST + "Content-Length: 1500\n\n"
    assert raw(small[0], head, b" " * 1500).startswith(b"HTTP/1.1 413")
    endless = raw(small[0], POST + "Transfer-Encoding: chunked\n\n", then=b"1f4\r\n" + b" " * 500 + b"\r\n")
    assert endless.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in endless.lower()


def test_what_is_no_http_is_400(small: tuple[str, Gated]) -> None:
    assert raw(small[0], "nonsense\n\n").startswith(b"HTTP/1.1 400")


async def test_a_client_that_hangs_up_is_not_searched_for(small: tuple[str, Gated]) -> None:
    address, gated = small

    async def pending() -> int:
        async with session.get(f"{address}/health") as response:
            return int((await response.json())["pending"])

    async with aiohttp.ClientSession() as session:
        first = threading.Thread(target=raw, args=(address, POST + "Content-Length: 22\n\n", b'{"queries": ["stays"]}'))
        first.start()
        await until(lambda: gated.seen == [["stays"]])
        host, port = address.removeprefix("http://").split(":")
        leaving = socket.create_connection((host, int(port)))
        leaving.sendall((POST + "Content-Length: 22\n\n").replace("\n", "\r\n").encode() + b'{"queries": ["leave"]}')
        while await pending() == 0:
            pass
        leaving.close()
        while b'path="/retrieve",status="499"' not in await (await session.get(f"{address}/metrics")).read():
            pass
        gated.may_prepare.set()
        async with session.post(f"{address}/retrieve", json={"queries": ["last"]}) as response:
            assert response.status == 200
    first.join()
    assert gated.seen == [["stays"], ["last"]]


@pytest.fixture(scope="module")
def described(retriever: VectorRetriever) -> Any:
    app = create_app(retriever, 3, LIMITS, reranker=Lengths(), pages=Pages(), token=TOKEN)
    load_all_checks()
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/retrieve", "POST"),
        ("/rerank", "POST"),
        ("/access", "POST"),
        ("/health", "GET"),
        ("/metrics", "GET"),
    ],
)
def test_the_description_is_true(described: Any, path: str, method: str, mode: schemathesis.GenerationMode) -> None:
    """All of schemathesis' checks: valid bodies are answered as described, invalid ones refused, never a 500."""
    if mode.is_negative and method == "GET":
        return  # nothing to send that could be wrong

    @seed(0)
    @settings(
        max_examples=40,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
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


def test_the_description_names_every_path_and_refusal(retriever: VectorRetriever) -> None:
    paths = create_app(retriever, 3, LIMITS).openapi()["paths"]
    assert set(paths) == {"/retrieve", "/rerank", "/access", "/health", "/metrics"}
    assert set(paths["/retrieve"]["post"]["responses"]) == {
        "200",
        "400",
        "403",
        "408",
        "413",
        "415",
        "422",
        "429",
        "503",
    }
    schema = paths["/retrieve"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["queries"]["items"] == {"type": "string", "maxLength": 40}
    assert schema["additionalProperties"] is False
