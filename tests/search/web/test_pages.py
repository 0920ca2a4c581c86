"""Pages for /access: in order, in turns that are fair, in time, and no longer than somebody waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlsys.search.web.extract import Page
from rlsys.search.web.web_search import FetchLimits, RankedSlots, WebPages, open_pages
from tests.search.gated import until
from tests.search.web.conftest import local
from tests.search.web.fake_web import FakeWeb, redirect_to


class Reader:
    """Reads a page whose URL starts with `fast` at once and no other ever, `count` at a time."""

    def __init__(self, count: int = 1000) -> None:
        self._slots = RankedSlots(count)
        self.reading: list[str] = []
        self.most = 0

    async def read(self, url: str, rank: int = 0) -> Page:
        async with self._slots.held(rank):
            self.reading.append(url)
            self.most = max(self.most, len(self.reading))
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


async def test_one_request_leaves_room_for_others() -> None:
    reader = Reader()
    pages = pages_of(reader)
    asking = asyncio.create_task(pages.fetch(slow(0)))
    await until(lambda: len(reader.reading) == 8)
    assert (await pages.fetch(["fast"])) == [{"url": "fast", "contents": '""\nfast'}]
    assert reader.most == 9
    asking.cancel()
    pages.close()


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
    go_on = asyncio.Event()

    async def work(name: str, rank: int) -> None:
        async with slots.held(rank):
            order.append(name)
            await go_on.wait()

    ranks = {"first": 9, "a": 2, "b": 0, "gone": 0, "c": 1, "d": 0, "e": 1}
    tasks = {name: asyncio.create_task(work(name, rank)) for name, rank in ranks.items()}
    await asyncio.sleep(0)
    tasks["gone"].cancel()
    go_on.set()
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
    bad = [f"{web.base}/page/missing", f"{web.base}/page/empty", web.base + redirect_to("http://10.0.0.1/"), "nonsense"]
    first, *others, again, last = await pages.fetch([text, *bad, good, good])
    assert first == {"url": text, "contents": '""\nPlain text[31m.\nMore.'}
    assert others == [None] * 4
    assert again == last is not None
    assert again["url"] == good
    assert again["contents"].startswith('"Old Towns"\nRivers carry water')
    assert web.fetched.count("html") == 1
    assert await pages.fetch([]) == []
    pages.close()
    guarded = open_pages()
    assert await guarded.fetch([good]) == [None]
    guarded.close()
