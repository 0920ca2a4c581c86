"""Tests of the HTTP contract: upstream clients, the OpenAPI description, and invalid requests."""

import json
from collections.abc import Iterator
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

from .gated import Gated, Lengths, Pages, in_process

TOKEN = "s3cret"
LIMITS = ServerLimits(max_queries=5, max_query_chars=40, max_topk=9, max_document_chars=30, cache_entries=0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(Gated(), 3, reranker=Lengths(), pages=Pages())) as address:
        yield address


# ---- upstream clients


def test_requests_of_search_r1_are_answered(url: str) -> None:
    asked = {"queries": ["Who wrote Faust?", "Mali"], "topk": 3, "return_scores": True}
    found = requests.post(f"{url}/retrieve", json=asked, timeout=600).json()["result"]
    assert [len(line) for line in found] == [3, 3]
    for query, line in zip(asked["queries"], found, strict=True):  # type: ignore[call-overload]
        for hit in line:
            assert hit["document"]["contents"].partition("\n")[0] == query
            assert isinstance(hit["score"], float)
    body = {"queries": asked["queries"], "documents": found, "rerank_topk": 2, "return_scores": True}
    ranked = requests.post(f"{url}/rerank", json=body, timeout=600).json()["result"]
    assert [[hit["document"]["contents"] for hit in line] for line in ranked] == [
        ["Who wrote Faust?"] * 2,
        ["Mali"] * 2,
    ]


async def test_requests_of_asearcher_and_rlinf_are_answered(url: str) -> None:
    asked = {"queries": ["Mali"], "topk": 5, "return_scores": False}
    wanted = {"urls": ["https://b.example/", "https://gone.example/", "https://a.example/"]}
    async with aiohttp.ClientSession(url, raise_for_status=True) as session:
        async with session.post("/retrieve", json=asked) as response:
            (found,) = (await response.json())["result"]
        async with session.post("/access", json=wanted) as response:
            pages = (await response.json())["result"]
    assert [(hit["contents"], hit["url"]) for hit in found] == [("Mali", f"https://a/{row}") for row in range(5)]
    texts = [page and page["contents"] for page in pages]
    assert texts == ["page of https://b.example/", None, "page of https://a.example/"]


# ---- the OpenAPI description


@pytest.fixture(scope="module")
def described() -> Any:
    app = create_app(Gated(), 3, LIMITS, reranker=Lengths(), pages=Pages(), token=TOKEN)
    load_all_checks()
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize("path", ["/retrieve", "/rerank", "/access", "/health", "/metrics"])
def test_answers_match_the_openapi_description(described: Any, path: str, mode: schemathesis.GenerationMode) -> None:
    """All checks of schemathesis run: valid bodies are answered as described, invalid ones refused, none gets a 500."""
    method = "GET" if path in ("/health", "/metrics") else "POST"
    if mode.is_negative and method == "GET":
        return  # A GET without parameters cannot be invalid.

    @seed(0)
    @settings(max_examples=25, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        body: Any = case.body
        if path == "/rerank" and mode.is_positive:
            # JSON schema cannot express that queries and lists are equally many.
            lists = body["documents"]
            body["documents"] = [lists[row % len(lists)] for row in range(len(body["queries"]))]
        case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})

    check()


# ---- invalid requests


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, ""),
        (b'{"queries": ["\\ud800"]}', 400, ""),
        (b'{"queries": ' + b"[" * 100_000, 400, ""),
        (b"{}", 422, "queries"),
        (b'{"queries": ["a", null]}', 422, "queries.1"),
        (b'{"queries": ["a"], "topk": 9' + b"9" * 400 + b"}", 422, "topk"),
        (b'{"queries": ["a"], "top_k": 3}', 422, "top_k"),
        (b'{"queries": ["a"], "rerank": true}', 422, "rerank"),
        (json.dumps({"queries": ["a", "b" * 8193]}).encode(), 422, "queries.1"),
        (b'{"queries": [' + b'"a",' * 1500 + b'"a"], "topk": 100}', 422, "queries"),
        (json.dumps({"queries": ["a"] * 4097}).encode(), 422, "queries"),
    ],
)
async def test_an_invalid_body_gets_a_4xx_that_names_its_field(body: bytes, status: int, field: str) -> None:
    async with in_process(Gated()) as client:
        answer = await client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(field)


@pytest.mark.parametrize(("count", "status"), [(64, 200), (65, 422)])
async def test_a_request_opens_64_pages_at_most(count: int, status: int) -> None:
    async with in_process(Gated(), pages=Pages()) as client:
        answer = await client.post("/access", json={"urls": ["https://a.example/"] * count})
    assert answer.status_code == status
