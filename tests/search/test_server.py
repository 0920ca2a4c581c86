"""The HTTP contract as upstream clients use it, over a real server process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import requests

from rlsys.search.index.dense import DenseRetriever
from rlsys.search.launch import SearchServer
from rlsys.search.retriever import Hit
from rlsys.search.server.app import create_app
from rlsys.search.server.service import ServerLimits


def post(server: SearchServer, **body: Any) -> requests.Response:
    return requests.post(f"{server.url}/retrieve", json=body, timeout=30)


def test_with_scores_as_search_r1_asks(
    server: SearchServer, passages: list[dict[str, Any]], queries: list[str], brute_force: tuple[Any, Any]
) -> None:
    scores, order = brute_force
    lines = post(server, queries=queries, topk=5, return_scores=True).json()["result"]
    assert len(lines) == len(queries)
    for row, line in enumerate(lines):
        assert [set(hit) for hit in line] == [{"document", "score"}] * 5
        np.testing.assert_allclose([hit["score"] for hit in line], scores[row, order[row, :5]], atol=1e-5)
        assert line[0]["document"] == passages[order[row, 0]]


def test_without_scores_topk_null_and_topk_left_out(
    server: SearchServer, passages: list[dict[str, Any]], queries: list[str], brute_force: tuple[Any, Any]
) -> None:
    best = passages[brute_force[1][0, 0]]
    for body in ({"topk": None, "return_scores": False}, {"topk": None}, {}):
        (line,) = post(server, queries=queries[:1], **body).json()["result"]
        assert len(line) == 3
        assert line[0] == best


def test_many_clients_at_once_keep_their_own_answers(server: SearchServer, queries: list[str]) -> None:
    fresh = [f"{query} ({row})" for row, query in enumerate(queries)]
    together = post(server, queries=fresh, topk=2, return_scores=True).json()["result"]

    def ask(row: int) -> Any:
        # Another topk than above, so that no answer is in the cache.
        return post(server, queries=[fresh[row]], topk=1 + row % 2 * 2, return_scores=True).json()["result"][
            0
        ]

    with ThreadPoolExecutor(32) as pool:
        alone = list(pool.map(ask, range(len(fresh))))
    for row, (line, expected) in enumerate(zip(alone, together, strict=True)):
        assert len(line) == 1 + row % 2 * 2
        assert line[0]["document"] == expected[0]["document"]
        assert line[0]["score"] == pytest.approx(expected[0]["score"], abs=1e-5)


def test_repeated_queries_come_from_the_cache(server: SearchServer) -> None:
    before = requests.get(f"{server.url}/health", timeout=30).json()
    first = post(server, queries=["asked again and again"] * 3).json()
    assert post(server, queries=["asked again and again"]).json()["result"][0] == first["result"][0]
    after = requests.get(f"{server.url}/health", timeout=30).json()
    assert (after["cached"] - before["cached"], after["batches"] - before["batches"]) == (3, 1)


def test_health_says_what_is_served(server: SearchServer) -> None:
    health = requests.get(f"{server.url}/health", timeout=30).json()
    assert health.items() >= {"status": "ok", "passages": 200, "encoder": "minilm", "dimension": 384}.items()


def test_strange_but_valid_queries_are_answered(server: SearchServer) -> None:
    strange = ["", " ", "\x00\n", "🗼" * 2000, "a" * 8192, "</search> {{7*7}} ' OR 1=1 --", "ÿ\u202e"]
    assert [len(line) for line in post(server, queries=strange).json()["result"]] == [3] * len(strange)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"queries=Paris", 400, "not JSON"),
        (b'{"queries": ["\xff"]}', 400, "not JSON"),
        (b'{"queries": ["\\ud800"]}', 400, "not JSON"),
        (b'{"queries": ' + b"[" * 100_000, 400, "not JSON"),
        (b"[]", 422, "the body"),
        (b"null", 422, "the body"),
        (b"{}", 422, "queries: Field required"),
        (b'{"queries": "Paris"}', 422, "queries: Input should be a valid"),
        (b'{"queries": []}', 422, "queries: the list is empty"),
        (b'{"queries": [1]}', 422, "queries.0: Input should be a valid string"),
        (b'{"queries": ["a", null]}', 422, "queries.1: Input should be a valid string"),
        (b'{"queries": ["a"], "topk": 0}', 422, "topk: 0 is out of range; send 1 to 100"),
        (b'{"queries": ["a"], "topk": -1}', 422, "topk: -1 is out of range"),
        (b'{"queries": ["a"], "topk": 1000000}', 422, "topk: 1000000 is out of range"),
        (b'{"queries": ["a"], "topk": 1e999}', 422, "topk"),
        (b'{"queries": ["a"], "topk": 2.5}', 422, "topk: Input should be a valid integer"),
        (b'{"queries": ["a"], "topk": true}', 422, "topk: Input should be a valid integer"),
        (b'{"queries": ["a"], "topk": "3"}', 422, "topk: Input should be a valid integer"),
        (
            b'{"queries": ["a"], "return_scores": "yes"}',
            422,
            "return_scores: Input should be a valid boolean",
        ),
        (b'{"queries": ["a"], "top_k": 3}', 422, "top_k: Extra inputs are not permitted"),
        (json.dumps({"queries": ["a", "b" * 8193]}).encode(), 422, "queries.1: 8193 characters are too many"),
        (json.dumps({"queries": ["a"] * 4097}).encode(), 422, "queries: 4097 are too many"),
    ],
)
def test_bad_input_gets_a_clear_4xx(server: SearchServer, body: bytes, status: int, reason: str) -> None:
    response = requests.post(f"{server.url}/retrieve", data=body, timeout=30)
    assert response.status_code == status
    detail = response.json()["detail"]
    assert isinstance(detail, str)
    assert reason in detail


def test_other_paths_and_methods_are_4xx(server: SearchServer) -> None:
    assert requests.get(f"{server.url}/retrieve", timeout=30).status_code == 405
    assert requests.get(f"{server.url}/nothing", timeout=30).status_code == 404


class Gated:
    """A real retriever that waits for a gate before each search."""

    def __init__(self, inner: DenseRetriever) -> None:
        self._inner = inner
        self.gate = threading.Event()
        self.seen: list[str] = []

    parallel = 1

    def prepare(self, queries: Sequence[str]) -> Any:
        self.gate.wait(30)
        self.seen += queries
        if "poison" in queries:
            raise RuntimeError("broken")
        return self._inner.prepare(queries)

    def find(self, prepared: Any, topk: int) -> list[list[Hit]]:
        return self._inner.find(prepared, topk)

    def close(self) -> None:
        self._inner.close()

    def describe(self) -> Mapping[str, Any]:
        return self._inner.describe()


@asynccontextmanager
async def in_process(retriever: Gated, limits: ServerLimits) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(retriever, 3, limits)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


async def test_requests_that_come_during_a_search_share_the_next_one(retriever: DenseRetriever) -> None:
    gated = Gated(retriever)
    async with in_process(gated, ServerLimits()) as client:
        first = asyncio.create_task(client.post("/retrieve", json={"queries": ["first"]}))
        await asyncio.sleep(0.1)
        bodies = [{"queries": [f"q{row % 20}"], "topk": 1 + row % 4} for row in range(40)]
        asked = [asyncio.create_task(client.post("/retrieve", json=body)) for body in bodies]
        await asyncio.sleep(0.1)
        gated.gate.set()
        assert (await first).status_code == 200
        lengths = [len((await task).json()["result"][0]) for task in asked]
        assert (await client.get("/health")).json()["batches"] == 2
    assert lengths == [body["topk"] for body in bodies]
    assert gated.seen == ["first", *(f"q{row}" for row in range(20))]


async def test_a_full_queue_turns_away_and_recovers(retriever: DenseRetriever) -> None:
    gated = Gated(retriever)
    async with in_process(gated, ServerLimits(max_pending=2, max_batch=1)) as client:
        asked = [
            asyncio.create_task(client.post("/retrieve", json={"queries": [f"q{row}"]})) for row in range(3)
        ]
        await asyncio.sleep(0.05)
        refused = await client.post("/retrieve", json={"queries": ["one more"]})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "2 queries wait already" in refused.json()["detail"]
        assert (await client.get("/health")).json()["pending"] == 2
        gated.gate.set()
        assert [(await task).status_code for task in asked] == [200] * 3
        assert (await client.post("/retrieve", json={"queries": ["one more"]})).status_code == 200


async def test_a_request_that_takes_too_long_is_given_up_and_not_searched(retriever: DenseRetriever) -> None:
    gated = Gated(retriever)
    async with in_process(gated, ServerLimits(request_timeout_s=0.1, max_batch=1)) as client:
        late = await asyncio.gather(
            *(client.post("/retrieve", json={"queries": [query]}) for query in ("running", "waiting"))
        )
        assert [response.status_code for response in late] == [503, 503]
        assert "no answer within 0.1 s" in late[0].json()["detail"]
        gated.gate.set()
    assert gated.seen == ["running"]


async def test_a_fault_of_the_retriever_is_503_and_the_next_request_works(retriever: DenseRetriever) -> None:
    gated = Gated(retriever)
    gated.gate.set()
    async with in_process(gated, ServerLimits()) as client:
        failed = await client.post("/retrieve", json={"queries": ["poison"]})
        assert failed.status_code == 503
        assert "the search failed (RuntimeError)" in failed.json()["detail"]
        assert (await client.post("/retrieve", json={"queries": ["fine"]})).status_code == 200


async def test_a_body_beyond_the_limit_is_refused(retriever: DenseRetriever) -> None:
    async with in_process(Gated(retriever), ServerLimits(max_body_bytes=1000)) as client:
        assert (await client.post("/retrieve", content=b" " * 1001)).status_code == 413
