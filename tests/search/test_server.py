"""The HTTP contract as upstream clients use it, over a real server process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import requests

from rlsys.search.server_process import SearchServer


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
        return post(server, queries=[fresh[row]], topk=1 + row % 2 * 2, return_scores=True).json()["result"][0]

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
        (b'{"queries": ["a"], "topk": NaN}', 422, "topk"),
        (b'{"queries": ["a"], "topk": 9' + b"9" * 400 + b"}", 422, "topk"),
        (b'{"queries": ["a"], "rerank": true}', 422, "rerank: this server has no reranker"),
        (json.dumps({"queries": ["a", "b" * 8193]}).encode(), 422, "queries.1: 8193 characters are too many"),
        (json.dumps({"queries": ["a" * (1 << 20)]}).encode(), 422, "queries.0: 1048576 characters are too"),
        (
            b'{"queries": [' + b'"a",' * 1500 + b'"a"], "topk": 100}',
            422,
            "1501 with topk 100 are too many pass",
        ),
        (json.dumps({"queries": ["a"] * 4097}).encode(), 422, "queries: 4097 are too many"),
    ],
)
def test_bad_input_gets_a_clear_4xx(server: SearchServer, body: bytes, status: int, reason: str) -> None:
    for headers in ({}, {"Content-Type": "application/json; charset=utf-8"}):
        response = requests.post(f"{server.url}/retrieve", data=body, headers=headers, timeout=30)
        assert response.status_code == status
    detail = response.json()["detail"]
    assert isinstance(detail, str)
    assert reason in detail


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/retrieve", 405),
        ("HEAD", "/retrieve", 405),
        ("OPTIONS", "/retrieve", 405),
        ("PUT", "/access", 405),
        ("POST", "/health", 405),
        ("GET", "/nothing", 404),
        ("GET", "/%00", 404),
    ],
)
def test_other_paths_and_methods_are_4xx(server: SearchServer, method: str, path: str, status: int) -> None:
    answer = requests.request(method, server.url + path, timeout=30, allow_redirects=False)
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"Content-Type": "text/plain"}, "Content-Type 'text/plain' is not JSON; send application/json"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "is not JSON"),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "'gzip' is not supported"),
    ],
)
def test_a_body_of_another_kind_is_415(server: SearchServer, headers: dict[str, str], reason: str) -> None:
    body = json.dumps({"queries": ["a"]}).encode()
    answer = requests.post(f"{server.url}/retrieve", data=body, headers=headers, timeout=30)
    assert answer.status_code == 415
    assert reason in answer.json()["detail"]


def test_what_is_not_loaded_says_how_to_load_it(server: SearchServer) -> None:
    answer = requests.post(f"{server.url}/access", json={"urls": ["https://a.example/"]}, timeout=30)
    assert (answer.status_code, "--pages" in answer.json()["detail"]) == (404, True)
    body = {"queries": ["a"], "documents": [["b"]]}
    answer = requests.post(f"{server.url}/rerank", json=body, timeout=30)
    assert (answer.status_code, "--reranker" in answer.json()["detail"]) == (404, True)
