"""Tests of the server under concurrent requests in one event loop: batches, limits, faults, cache and reranking."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from rlsys.search.retrieval import Hit
from rlsys.search.server.asgi import create_app
from rlsys.search.server.contract import SMALL_BODY_BYTES, ServerLimits
from rlsys.search.server.service import HitCache
from tests.support.serving import serving
from tests.support.waiting import HANG_S, until

from .gated import Gated, Lengths, Pages, in_process


def ask(client: httpx.AsyncClient, *queries: str, **body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/retrieve", json={"queries": list(queries), **body}))


def ids(answer: httpx.Response) -> list[list[str]]:
    assert answer.status_code == 200, answer.text
    return [[hit["id"] for hit in line] for line in answer.json()["result"]]


async def pending(client: httpx.AsyncClient, queries: int) -> None:
    await says(client, "/health", f'"pending":{queries},')


async def says(client: httpx.AsyncClient, path: str, text: str) -> None:
    """Wait until the answer to GET `path` holds `text`."""
    async with asyncio.timeout(HANG_S):
        while text not in (await client.get(path)).text:
            await asyncio.sleep(0.001)


async def test_one_batch_is_prepared_while_another_is_searched() -> None:
    gated = Gated(find_open=False)
    async with in_process(gated, ServerLimits(max_batch=4, cache_entries=0)) as client:
        tasks = [ask(client, "a")]
        await until(lambda: len(gated.found) == 1)
        tasks.append(ask(client, "b"))
        await until(lambda: len(gated.seen) == 2)
        tasks += [ask(client, query) for query in "cdef"]
        await pending(client, 4)
        assert gated.seen == [["a"], ["b"]], "one is searched, one is prepared, the rest is not batched yet"
        gated.may_find.set()
        assert [ids(answer)[0][0] for answer in await asyncio.gather(*tasks)] == [f"{query}/0" for query in "abcdef"]
    assert gated.seen == [["a"], ["b"], ["c", "d", "e", "f"]]
    assert gated.threads == {"prepare_0", "find_0"}, "the event loop computes nothing"


async def test_as_many_searches_run_at_once_as_the_retriever_allows() -> None:
    gated = Gated(parallel=3, find_open=False)
    async with in_process(gated, ServerLimits(max_batch=1)) as client:
        tasks = [ask(client, query) for query in "abcdef"]
        await until(lambda: len(gated.found) == 3)
        await until(lambda: len(gated.seen) == 4)
        await pending(client, 2)
        assert (len(gated.found), len(gated.seen)) == (3, 4)
        gated.may_find.set()
        assert [ids(answer)[0][0] for answer in await asyncio.gather(*tasks)] == [f"{q}/0" for q in "abcdef"]


async def test_requests_during_a_search_share_the_next_one() -> None:
    gated = Gated(prepare_open=False)
    async with in_process(gated, ServerLimits()) as client:
        first = ask(client, "first")
        await until(lambda: gated.seen == [["first"]])
        wanted = [(f"q{row % 20}", 1 + row % 4) for row in range(40)]
        asked = [ask(client, query, topk=topk) for query, topk in wanted]
        await pending(client, 40)
        gated.may_prepare.set()
        assert ids(await first) == [["first/0", "first/1", "first/2"]]
        for (query, topk), answer in zip(wanted, await asyncio.gather(*asked), strict=True):
            assert ids(answer) == [[f"{query}/{rank}" for rank in range(topk)]]
        health = (await client.get("/health")).json()
    assert (health["batches"], health["queries"], health["cached"]) == (2, 41, 0)
    # There is one search per topk, which has each of its queries once.
    assert gated.found[1:] == [([f"q{row}" for row in range(20) if row % 4 == topk - 1], topk) for topk in (1, 2, 3, 4)]


async def test_a_full_queue_answers_429_and_recovers() -> None:
    gated = Gated(prepare_open=False)
    async with in_process(gated, ServerLimits(max_pending=2, max_batch=1)) as client:
        tasks = [ask(client, "a")]
        await until(lambda: len(gated.seen) == 1)
        tasks += [ask(client, "b"), ask(client, "c")]
        await pending(client, 2)
        refused = await ask(client, "d")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        never = await ask(client, "e", "f", "g")
        assert never.status_code == 422, "a request that never fits is not told to retry"
        gated.may_prepare.set()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
        assert (await ask(client, "d")).status_code == 200


async def test_too_many_requests_get_429_before_they_are_read() -> None:
    gated = Gated(prepare_open=False)
    async with in_process(gated, ServerLimits(max_requests=1)) as client:
        first = ask(client, "a")
        await until(lambda: len(gated.seen) == 1)
        refused = await client.post("/retrieve", content=b"never parsed")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await client.get("/health")).json()["status"] == "ok"
        gated.may_prepare.set()
        assert (await first).status_code == 200


async def test_large_bodies_share_a_memory_limit_and_small_ones_are_exempt() -> None:
    large = "x" * 2 * SMALL_BODY_BYTES
    limits = ServerLimits(max_body_bytes=3 * SMALL_BODY_BYTES, max_query_chars=1 + len(large), max_batch=1)
    gated = Gated(prepare_open=False)
    async with in_process(gated, limits) as client:
        tasks = [ask(client, large), ask(client, large + "2")]
        await until(lambda: len(gated.seen) == 1)
        await pending(client, 1)
        refused = await ask(client, large)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        tasks.append(ask(client, "small"))
        await pending(client, 2)
        gated.may_prepare.set()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
        for _ in range(5):
            assert (await ask(client, large)).status_code == 200
            assert (await client.post("/retrieve", content=b"[" * len(large))).status_code == 400
            too_large = await client.post("/retrieve", content=b" " * 4 * SMALL_BODY_BYTES)
            assert too_large.status_code == 413


@pytest.mark.parametrize(("values", "status"), [(10, 200), (11, 422)])
async def test_the_values_of_a_body_are_limited(values: int, status: int) -> None:
    """An object, its field, a list and its texts count as values; JSON syntax within a text does not."""
    texts = [*map(str, range(values - 4)), '", [{1, 2}], \\"']
    async with in_process(Gated(), ServerLimits(max_values=10)) as client:
        assert (await ask(client, *texts)).status_code == status


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/access", {}, 404),
        ("/rerank", {}, 404),
        ("/retrieve", {}, 200),
        ("/retrieve", {"Content-Type": "application/json; charset=utf-8"}, 200),
        ("/retrieve", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("/retrieve", {"Content-Encoding": "identity"}, 200),
        ("/retrieve", {"Content-Encoding": "gzip"}, 415),
    ],
)
async def test_what_is_not_loaded_gets_404_and_what_is_not_plain_json_415(
    path: str, headers: dict[str, str], status: int
) -> None:
    async with in_process(Gated()) as client:
        answer = await client.post(path, content=b'{"queries": ["a"]}', headers=headers)
    assert answer.status_code == status


async def test_a_request_that_takes_too_long_gets_503_and_is_not_searched() -> None:
    gated = Gated(prepare_open=False)
    async with in_process(gated, ServerLimits(request_timeout_s=0.05, max_batch=1)) as client:
        late = []
        async with asyncio.timeout(600):
            while not gated.seen:  # A busy machine may be late to prepare even the first request.
                late.append(await ask(client, "running"))
        late.append(await ask(client, "waiting"))
        assert {(answer.status_code, answer.headers["retry-after"]) for answer in late} == {(503, "1")}
        gated.may_prepare.set()
    assert gated.seen == [["running"]]


async def test_a_body_that_does_not_arrive_in_time_gets_408() -> None:
    async def stalls() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with in_process(Gated(), ServerLimits(body_timeout_s=0.05)) as client:
        late = await asyncio.wait_for(client.post("/retrieve", content=stalls()), 600)
    assert (late.status_code, late.headers["connection"]) == (408, "close")


async def test_a_retriever_fault_gives_503_and_the_next_request_works(monkeypatch: pytest.MonkeyPatch) -> None:
    gated, find = Gated(), Gated.find

    def lose_a_line(prepared: list[str], topk: int) -> list[list[Hit]]:
        return find(gated, prepared, topk)[: len(prepared) - ("b" in prepared)]

    monkeypatch.setattr(gated, "find", lose_a_line)
    async with in_process(gated, ServerLimits()) as client:
        for queries in (["poison"], ["a", "b"]):
            failed = await ask(client, *queries)
            assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
        assert ids(await ask(client, "fine")) == [["fine/0", "fine/1", "fine/2"]]


@pytest.mark.parametrize(
    ("value", "status"), [("\ud800", 200), (1 << 80, 200), (b"bytes", 503), ({1: float("nan"), 2: 1 << 80}, 503)]
)
async def test_document_values_that_json_cannot_hold_give_503(
    monkeypatch: pytest.MonkeyPatch, value: Any, status: int
) -> None:
    gated = Gated()
    monkeypatch.setattr(gated, "find", lambda prepared, _: [[Hit(1.0, {"contents": value})]] * len(prepared))
    async with in_process(gated) as client:
        answer = await ask(client, "a")
    assert answer.status_code == status
    assert status == 503 or answer.json()["result"] == [[{"contents": value}]]


async def test_a_request_of_a_disconnected_client_is_not_searched() -> None:
    class Slow(Pages):
        async def fetch(self, _: Sequence[str]) -> list[Mapping[str, Any] | None]:
            began.set()
            try:
                return await asyncio.Future()
            finally:
                left.set()

    gated, began, left = Gated(prepare_open=False), threading.Event(), threading.Event()
    with serving(create_app(gated, limits=ServerLimits(max_batch=1), pages=Slow())) as url:
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            stays = ask(client, "stays")
            await until(lambda: gated.seen == [["stays"]])
            leaves = ask(client, "leaves")
            await pending(client, 1)
            leaves.cancel()
            await says(client, "/metrics", 'path="/retrieve",status="499"')
            reads = asyncio.create_task(client.post("/access", json={"urls": ["https://a.example/"]}))
            await until(began.is_set)
            reads.cancel()
            await until(left.is_set)
            gated.may_prepare.set()
            for answer in (await stays, await ask(client, "last")):
                assert answer.status_code == 200
    assert gated.seen == [["stays"], ["last"]]


@pytest.mark.parametrize(("entries", "searched"), [(16, 2), (0, 3)])
async def test_the_cache_is_by_query_and_topk_and_can_be_off(entries: int, searched: int) -> None:
    gated = Gated()
    async with in_process(gated, ServerLimits(cache_entries=entries)) as client:
        for topk in (1, 2, 1):
            assert ids(await ask(client, "a", topk=topk)) == [[f"a/{rank}" for rank in range(topk)]]
    assert len(gated.found) == searched


def test_the_cache_evicts_the_least_recent_entry_and_bounds_passages() -> None:
    cache = HitCache(2)
    hit = Hit(1.0, {})
    for query in "ab":
        cache.put((query, 1), [hit])
    assert cache.get(("a", 1)) == [hit]
    cache.put(("c", 1), [hit])
    assert (cache.get(("b", 1)), cache.get(("a", 1))) == (None, [hit])
    cache.put(("d", 16), [hit] * 16)
    assert (cache.get(("a", 1)), cache.get(("d", 16))) == (None, [hit] * 16)
    cache.put(("e", 17), [hit] * 17)
    assert (cache.get(("d", 16)), cache.get(("e", 17))) == (None, None)


async def test_rerank_gives_each_query_its_own_documents_in_order() -> None:
    """Longer documents score higher; documents of equal length keep their order."""
    hit = {"document": {"contents": "cccc", "id": 2}, "score": 0.1}
    documents = [["bb", {"contents": "a", "id": 1}, hit], [], ["xx", "yy", "z"]]
    body = {"queries": ["q", "r", "s"], "documents": documents, "return_scores": True}
    reranker = Lengths()
    async with in_process(Gated(), reranker=reranker) as client:
        scored = (await client.post("/rerank", json=body)).json()["result"]
        plain = (await client.post("/rerank", json=body | {"return_scores": False, "rerank_topk": 1})).json()["result"]
        for wrong in ({"queries": ["q"]}, {"documents": [["a"], [], [{"id": 1}]]}):
            assert (await client.post("/rerank", json=body | wrong)).status_code == 422
    assert [[(line["document"], line["score"]) for line in lines] for lines in scored] == [
        [(hit["document"], 4.0), ("bb", 2.0), ({"contents": "a", "id": 1}, 1.0)],
        [],
        [("xx", 2.0), ("yy", 2.0), ("z", 1.0)],
    ]
    assert plain == [[hit["document"]], [], ["xx"]]
    assert reranker.pairs == [("q", "bb"), ("q", "a"), ("q", "cccc"), ("s", "xx"), ("s", "yy"), ("s", "z")] * 2


async def test_retrieve_with_rerank_orders_the_candidates() -> None:
    class ReversingReranker(Lengths):
        def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
            return [float(row) for row, _ in enumerate(pairs)]

    gated, limits = Gated(), ServerLimits(rerank_candidates=10, max_pending_pairs=40)
    async with in_process(gated, limits, reranker=ReversingReranker()) as client:
        few = await ask(client, "a", topk=2, rerank=True, return_scores=True)
        more = await ask(client, "b", topk=12, rerank=True)
        assert (await ask(client, *"abcde", rerank=True)).status_code == 422
    hits = few.json()["result"][0]
    assert [(hit["document"]["id"], hit["score"]) for hit in hits] == [("a/9", 9.0), ("a/8", 8.0)]
    assert ids(more) == [[f"b/{rank}" for rank in reversed(range(12))]]
    assert [topk for _, topk in gated.found] == [10, 12]


@pytest.mark.parametrize("header", [None, "Bearer", "Basic s3cret", "s3cret", "Bearer s3cret2", "Bearer s3cre"])
async def test_without_the_token_only_a_short_health_is_answered(header: str | None) -> None:
    gated = Gated()
    async with in_process(gated, token="s3cret", pages=Pages()) as client:
        client.headers.update({} if header is None else {"Authorization": header})
        assert (await client.get("/health")).json() == {"status": "ok"}
        for answer in (await ask(client, "a"), await client.get("/metrics"), await client.get("/nothing")):
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert gated.seen == []
        client.headers["Authorization"] = "bearer s3cret"
        assert (await ask(client, "a")).status_code == 200
        assert (await client.get("/health")).json()["passages"] == 7
        assert (await client.get("/metrics")).status_code == 200
