"""The whole: a retriever of the web's hits for the server, and pages for /access in turns that are fair and in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import Response

from rlsys.search.web.extract import Page
from rlsys.search.web.providers import ProviderLimits
from rlsys.search.web.web_search import FetchLimits, RankedSlots, WebPages, WebRetriever, open_pages, open_web
from tests.search.gated import in_process, until
from tests.search.web.conftest import local
from tests.search.web.fake_web import ENVIRON, FakeWeb, redirect_to
from tests.support.refusals import refused


def opened(web: FakeWeb, name: str = "serper", **options: Any) -> WebRetriever:
    options.setdefault("limits", ProviderLimits(tries=1, try_timeout_s=60.0, timeout_s=60.0))
    options.setdefault("fetch_limits", FetchLimits(timeout_s=60.0))
    return open_web(name, endpoint=f"{web.base}/search", environ=ENVIRON, policy=local(web), **options)


def found(retriever: WebRetriever, queries: list[str], topk: int) -> list[list[tuple[float, dict[str, Any]]]]:
    hits = retriever.find(retriever.prepare(queries), topk)
    return [[(hit.score, dict(hit.document)) for hit in line] for line in hits]


def test_hits_are_snippets_by_rank(web: FakeWeb) -> None:
    retriever = opened(web)
    expected = [
        (1 / rank, {"id": url, "contents": f'"{title}"\n{snippet}', "url": url})
        for rank, (title, url, snippet) in enumerate(map(web.item, range(2)), start=1)
    ]
    assert found(retriever, ["first query", "second query", " "], 2) == [expected, expected, []]
    assert {asked["q"] for asked in web.asked} == {"first query", "second query"}
    assert retriever.describe() == {"kind": "web", "provider": "serper", "fetch_pages": False}
    retriever.close()


def test_pages_give_their_best_passage_and_lost_ones_their_snippet(web: FakeWeb) -> None:
    retriever = opened(web, fetch_pages=True, passage_words=60)
    lighthouse, unrelated = (
        [document["contents"].split("\n", 1)[1] for _, document in hits]
        for hits in found(retriever, ["who built the lighthouse", "zebra"], 3)
    )
    assert lighthouse[0].startswith("The lighthouse of Kalmar was built in 1852")
    assert lighthouse[1:] == ["Snippet 1 & more.", lighthouse[0]]
    assert unrelated == [f"Snippet {row} & more." for row in range(3)]
    assert sorted(web.fetched) == ["r0", "r1", "r2"]
    retriever.close()


async def test_an_outage_is_503_and_what_was_paid_for_is_kept(web: FakeWeb) -> None:
    retriever = opened(web)
    web.script = [lambda: Response("", 500)]
    asked = {"queries": ["a", "b", "c"], "topk": 3}
    async with in_process(retriever) as client:
        refused_once = await client.post("/retrieve", json=asked)
        assert refused_once.status_code == 503
        assert "status 500" in refused_once.json()["detail"]
        assert len(web.asked) == 3
        answered = await client.post("/retrieve", json=asked)
        assert [len(line) for line in answered.json()["result"]] == [3, 3, 3]
        assert len(web.asked) == 4


def test_settings_that_cannot_be_used_are_refused() -> None:
    with refused("unknown", "provider"):
        open_web("yahoo")
    with refused("missing", "SERPER_API_KEY"):
        open_web("serper", environ={})
    with refused("malformed", "endpoint"):
        open_web("serper", environ=ENVIRON, endpoint="http://[::1")
    with refused("out_of_range", "passage_words"):
        open_web("serper", environ=ENVIRON, passage_words=0)


class Reader:
    """Reads a page whose URL starts with `fast` at once and no other ever, `count` at a time."""

    def __init__(self, count: int = 1000) -> None:
        self._slots = RankedSlots(count)
        self.reading: list[str] = []

    async def read(self, url: str, rank: int = 0) -> Page:
        async with self._slots.held(rank):
            self.reading.append(url)
            try:
                if not url.startswith("fast"):
                    await asyncio.Event().wait()
                return Page("", url)
            finally:
                self.reading.remove(url)

    async def close(self) -> None:
        """Nothing to give back."""


def pages_of(reader: Any) -> WebPages:
    return WebPages(reader, timeout_s=300.0)


def slow(request: int, count: int = 50) -> list[str]:
    return [f"slow {request}/{number}" for number in range(count)]


async def test_a_page_that_is_late_is_none_and_the_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = asyncio.wait

    async def time_is_up(tasks: Any, *, timeout: float, return_when: str) -> Any:
        """As soon as one page is there."""
        del timeout
        await until(lambda: any(task.done() for task in tasks))
        return await wait(tasks, timeout=0, return_when=return_when)

    monkeypatch.setattr(asyncio, "wait", time_is_up)
    reader = Reader()
    pages = pages_of(reader)
    found = await pages.fetch([*slow(0, 3), "fast 1", *slow(1, 20), "fast 2"])
    assert [page is not None for page in found[:5]] == [False, False, False, True, False]
    assert found[-1] is None, "its turn had not come"
    assert reader.reading == []
    pages.close()


async def test_what_nobody_waits_for_is_not_read_any_more() -> None:
    reader = Reader(count=4)
    pages = pages_of(reader)
    asking = [asyncio.create_task(pages.fetch(slow(request))) for request in range(3)]
    await until(lambda: len(reader.reading) == 4)
    for task in asking:
        task.cancel()
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
    await until(lambda: reader.reading == [])
    assert [page is not None for page in await pages.fetch([f"fast {row}" for row in range(20)])] == [True] * 20
    pages.close()


async def test_a_free_slot_goes_to_the_lowest_rank_and_then_to_who_came_first() -> None:
    slots, order = RankedSlots(1), []

    async def work(name: str, rank: int) -> None:
        async with slots.held(rank):
            order.append(name)
            await asyncio.sleep(0)

    ranks = {"first": 9, "a": 2, "b": 0, "gone": 0, "c": 1, "d": 0, "e": 1}
    tasks = {name: asyncio.create_task(work(name, rank)) for name, rank in ranks.items()}
    await asyncio.sleep(0)
    tasks["gone"].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["first", "b", "d", "c", "e", "a"]


@pytest.mark.parametrize("before", [True, False])
async def test_a_slot_that_is_given_while_its_caller_is_cancelled_is_not_lost(before: bool) -> None:
    slots = RankedSlots(1)

    async def work() -> None:
        async with slots.held():
            await asyncio.sleep(0)

    holding = slots.held()
    await holding.__aenter__()
    waiting = asyncio.create_task(work())
    await asyncio.sleep(0)
    if before:
        waiting.cancel()
    await holding.__aexit__(None, None, None)
    if not before:
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(work(), 60)


async def test_web_pages_gives_contents_or_none_in_order(web: FakeWeb) -> None:
    pages = open_pages(FetchLimits(timeout_s=300.0), local(web))
    pages.timeout_s = 300.0
    good, text = f"{web.base}/page/html", f"{web.base}/page/text"
    bad = [f"{web.base}/page/empty", web.base + redirect_to("http://10.0.0.1/"), "nonsense"]
    first, *others, again, last = await pages.fetch([text, *bad, good, good])
    assert first == {"url": text, "contents": '""\nPlain text[31m.\nMore.'}
    assert others == [None] * 3
    assert again == last is not None
    assert again["contents"].startswith('"Old Towns"\nRivers carry water')
    assert web.fetched.count("html") == 1
    assert await pages.fetch([]) == []
    pages.close()
    guarded = open_pages()
    assert await guarded.fetch([good]) == [None]
    guarded.close()
