"""Tests of a real index in a real server process, against brute force and over a cassette."""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from numpy.typing import NDArray

from rlsys.config.schema import CassetteConfig, CassetteMode, SearchConfig
from rlsys.rollout.tools.search_tool import open_tool, search_metrics
from rlsys.search.client import SearchClient
from rlsys.search.retrieval import served
from rlsys.search.server_process import SearchServer
from tests.support.jsonl import read_rows

TOLERANCE = 1e-5
"""Largest difference of two scores of at most 1, which two libraries sum from 384 products in float32."""


@pytest.fixture(scope="module")
def server(index_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchServer]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with SearchServer(index_dir, log, topk=3, threads=1) as running:
        running.wait_healthy(300)
        yield running


def post(server: SearchServer, **body: Any) -> list[list[Any]]:
    answer = requests.post(f"{server.url}/retrieve", json=body, timeout=120)
    assert answer.status_code == 200
    return answer.json()["result"]  # type: ignore[no-any-return]


def require_best(documents: list[Any], passages: list[dict[str, Any]], scores: Any, topk: int) -> None:
    """Check that `documents` are the best of all passages, in any order among equal scores."""
    places = [int(document["id"][1:]) for document in documents]
    assert documents == [passages[place] for place in places]
    np.testing.assert_allclose(scores[places], np.sort(scores)[::-1][:topk], atol=TOLERANCE)


def test_passages_and_scores_equal_brute_force(
    server: SearchServer, passages: list[dict[str, Any]], queries: list[str], brute_force: NDArray[np.float32]
) -> None:
    lines = post(server, queries=queries, topk=5, return_scores=True)
    for line, scores in zip(lines, brute_force, strict=True):
        require_best([hit["document"] for hit in line], passages, scores, 5)
        np.testing.assert_allclose([hit["score"] for hit in line], np.sort(scores)[::-1][:5], atol=TOLERANCE)
    (plain,) = post(server, queries=queries[:1], topk=None, return_scores=False)
    require_best(plain, passages, brute_force[0], 3)  # the topk that the server was started with


def test_a_health_check_loads_no_certificates(server: SearchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ssl, "create_default_context")  # takes 30 ms of CPU, and a run checks every second
    assert server.is_healthy(30)


async def test_recorded_searches_are_replayed_without_the_server(
    server: SearchServer, queries: list[str], tmp_path: Path
) -> None:
    path, asked = tmp_path / "new" / "tape.jsonl", queries[:20] * 2
    search = SearchConfig(url=server.url, topk=2, cassette=CassetteConfig(str(path), CassetteMode.record))
    async with open_tool(search) as recorder:
        live = await asyncio.gather(*map(recorder.search, asked))
    async with SearchClient(server.url) as client:
        health = await client.health()
    search = SearchConfig(topk=2, cassette=CassetteConfig(str(path), CassetteMode.replay, latency_scale=0))
    async with open_tool(search) as player:
        assert await asyncio.gather(*map(player.search, asked)) == live
        assert search_metrics(player) == {"search_hits": 40, "search_misses": 0, "search_recorded": 0}
    header, *calls = read_rows(path)
    assert header == {"rlsys_cassette": 1, "topk": 2, "server": served(health)}
    assert {"kind", "passages", "corpus_sha256", "encoder", "faiss_type"} <= header["server"].keys() <= health.keys()
    assert len(calls) == 40
    assert sum("passages" in call for call in calls) == 20, "passages are stored once for each query"
