"""Prometheus' numbers are those of what was asked."""

from __future__ import annotations

import asyncio

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rlsys.search.server.contract import ServerLimits

from .gated import Gated, Lengths, Pages, in_process

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(client: httpx.AsyncClient) -> Samples:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name.removeprefix("rlsys_search_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name.startswith("rlsys_search_")
    }


def of(path: str, status: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    return "requests_total", (("path", path), ("status", str(status)))


async def test_every_request_query_batch_and_stage_is_counted() -> None:
    async with in_process(Gated(), ServerLimits(), reranker=Lengths(), pages=Pages()) as client:
        for queries in (["a", "b", "c"], ["a"], ["a", "a"], ["d"]):
            assert (await client.post("/retrieve", json={"queries": queries})).status_code == 200
        assert (await client.post("/retrieve", json={"queries": []})).status_code == 422
        assert (await client.post("/retrieve", json={"queries": ["poison"]})).status_code == 503
        assert (await client.post("/access", json={"urls": ["https://a.example/"]})).status_code == 200
        body = {"queries": ["q", "r"], "documents": [["x", "y"], ["z"]]}
        assert (await client.post("/rerank", json=body)).status_code == 200
        assert (await client.get("/made/up/path")).status_code == 404
        samples = await scrape(client)
    assert {key: value for key, value in samples.items() if key[0] == "requests_total"} == {
        of("/retrieve", 200): 4,
        of("/retrieve", 422): 1,
        of("/retrieve", 503): 1,
        of("/access", 200): 1,
        of("/rerank", 200): 1,
        of("other", 404): 1,
    }
    assert samples["request_seconds_count", (("path", "/retrieve"),)] == 6
    numbers = {name: value for (name, labels), value in samples.items() if not labels}
    assert (
        numbers.items()
        >= {
            "queries_total": 8,
            "cached_total": 3,  # of ["a"] and ["a", "a"]
            "batches_total": 3,
            "pairs_total": 3,
            "pending": 0,
            "pending_pairs": 0,
            "batch_queries_count": 3,
            "batch_queries_sum": 5,
        }.items()
    )
    stages = {
        stage: samples["stage_seconds_count", (("stage", stage),)] for stage in ("prepare", "find", "rerank", "pages")
    }
    assert stages == {"prepare": 3, "find": 2, "rerank": 1, "pages": 1}


async def test_refusals_and_waiting_queries_are_counted() -> None:
    gated = Gated(prepare_open=False)
    limits = ServerLimits(max_pending=1, max_batch=1)
    async with in_process(gated, limits) as client:
        tasks = []
        for number in range(2):
            tasks.append(asyncio.create_task(client.post("/retrieve", json={"queries": [f"q{number}"]})))
            async with asyncio.timeout(20):
                while (await scrape(client))["pending", ()] < number or not gated.seen:
                    await asyncio.sleep(0.001)
        assert (await client.post("/retrieve", json={"queries": ["more"]})).status_code == 429
        assert (await scrape(client))[of("/retrieve", 429)] == 1
        gated.may_prepare.set()
        await asyncio.gather(*tasks)
        assert (await scrape(client))["queries_total", ()] == 2


async def test_two_applications_do_not_mix() -> None:
    async with in_process(Gated()) as one, in_process(Gated()) as other:
        await one.post("/retrieve", json={"queries": ["a"]})
        assert (await scrape(one))["queries_total", ()] == 1
        assert (await scrape(other))["queries_total", ()] == 0
