"""Tests of web search as a whole: hits for the server, pages for /access, and hostile pages."""

import asyncio
import resource
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import Response

from rlsys.apps.planner.virtual_time import now
from rlsys.search.web.extract import MAX_TEXT_CHARS, Page, clean, decode, extract
from rlsys.search.web.providers import ProviderLimits
from rlsys.search.web.web_search import (
    Fetched,
    FetchLimits,
    RankedSlots,
    WebPages,
    WebRetriever,
    Workers,
    best_passage,
    open_reader,
    open_web,
    passages,
)
from tests.search.conftest import children_of
from tests.search.gated import in_process
from tests.search.web.conftest import local
from tests.search.web.fake_web import ENVIRON, HTML, FakeWeb, redirect_to
from tests.support.refusals import refused
from tests.support.virtual_time import virtually
from tests.support.waiting import until


def opened(web: FakeWeb, **options: Any) -> WebRetriever:
    once, patient = ProviderLimits(tries=1, try_timeout_s=300.0, timeout_s=300.0), FetchLimits(timeout_s=300.0)
    options |= {"limits": once, "fetch_limits": patient, "policy": local(web), "environ": ENVIRON}
    return open_web("serper", endpoint=f"{web.base}/search", **options)


def found(retriever: WebRetriever, queries: list[str], topk: int) -> list[list[tuple[float, dict[str, Any]]]]:
    hits = retriever.find(retriever.prepare(queries), topk)
    return [[(hit.score, dict(hit.document)) for hit in line] for line in hits]


def test_hits_are_snippets_in_order_of_rank(web: FakeWeb) -> None:
    retriever = opened(web)
    expected = [
        (1 / rank, {"id": url, "contents": f'"{title}"\n{snippet}', "url": url})
        for rank, (title, url, snippet) in enumerate(map(web.item, range(2)), start=1)
    ]
    assert found(retriever, ["first query", "second query", " "], 2) == [expected, expected, []]
    assert {asked["q"] for asked in web.asked} == {"first query", "second query"}
    assert retriever.describe() == {"kind": "web", "provider": "serper", "fetch_pages": False}
    retriever.close()


def test_hits_are_the_best_passages_of_pages_or_snippets_of_lost_pages(web: FakeWeb) -> None:
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


@pytest.mark.parametrize("text", ["N/A", "the the", "你", ""])
def test_a_page_without_words_has_no_best_passage(text: str) -> None:
    assert best_passage(text, "who built the lighthouse", 60) is None


async def test_an_outage_gives_503_and_answers_already_received_are_kept(web: FakeWeb) -> None:
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


async def test_pages_give_contents_or_none_in_the_requested_order(web: FakeWeb) -> None:
    pages = WebPages(open_reader(FetchLimits(timeout_s=300.0), local(web)))
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
    guarded = WebPages(open_reader())
    assert await guarded.fetch([good]) == [None]
    guarded.close()


def test_wrong_settings_are_refused() -> None:
    with refused("unknown", "provider"):
        open_web("yahoo", environ=ENVIRON)
    with refused("missing", "SERPER_API_KEY"):
        open_web("serper", environ={})
    for endpoint in ("http://[::1", "file:///etc/passwd", "http://"):
        with refused("malformed", "endpoint"):
            open_web("serper", environ=ENVIRON, endpoint=endpoint)
    with refused("out_of_range", "passage_words"):
        open_web("serper", environ=ENVIRON, passage_words=0)


# ---- turns and time


class Reader:
    """Reader that reads pages whose URL starts with `fast` at once, and never finishes any other page."""

    def __init__(self) -> None:
        self.reading: list[str] = []

    async def read(self, url: str, rank: int = 0) -> Page:
        del rank
        self.reading.append(url)
        try:
            if not url.startswith("fast"):
                await asyncio.Event().wait()
            return Page("", url)
        finally:
            self.reading.remove(url)

    async def close(self) -> None:
        """Do nothing, as there is nothing to release."""


async def test_a_request_takes_few_places_and_leaves_them_when_its_caller_is_cancelled() -> None:
    reader: Any = Reader()
    pages = WebPages(reader, timeout_s=3000.0)
    asking = asyncio.create_task(pages.fetch([f"slow {row}" for row in range(50)]))
    await until(lambda: len(reader.reading) >= 8)
    assert await pages.fetch(["fast"]) == [{"url": "fast", "contents": '""\nfast'}]
    assert len(reader.reading) == 8
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: reader.reading == [])
    pages.close()


@virtually
async def test_late_pages_are_none_and_the_others_are_returned() -> None:
    reader: Any = Reader()
    pages = WebPages(reader)
    found = await pages._fetch(["slow", "fast 1", *(f"slow {row}" for row in range(20)), "fast 2"])
    assert [page and page["url"] for page in found] == [None, "fast 1", *[None] * 21], "the last one has no turn"
    assert (now(), reader.reading) == (30.0, [])
    pages.close()


@pytest.mark.parametrize("granted", [False, True])
@virtually
async def test_a_slot_is_not_lost_when_its_caller_is_cancelled(granted: bool) -> None:
    slots = RankedSlots(1)

    async def work() -> None:
        async with slots.held():
            pass

    async with slots.held():
        gone, after = asyncio.create_task(work()), asyncio.create_task(work())
        await asyncio.sleep(0)
        if not granted:
            gone.cancel()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    async with asyncio.timeout(1):
        await after
        await work()


@virtually
async def test_a_free_slot_goes_to_the_lowest_rank_and_then_to_the_earliest_caller() -> None:
    slots, order = RankedSlots(1), []

    async def work(name: str, rank: int) -> None:
        async with slots.held(rank):
            order.append(name)
            await asyncio.sleep(1)

    ranks = {"first": 9, "a": 2, "b": 0, "gone": 0, "c": 1, "d": 0, "e": 1}
    tasks = {name: asyncio.create_task(work(name, rank)) for name, rank in ranks.items()}
    await asyncio.sleep(0.5)
    tasks["gone"].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["first", "b", "d", "c", "e", "a"]


# ---- the text of pages

ENDLESS = "<html><body><p " + " ".join(f"a{row}=1" for row in range(100_000)) + ">text</p></body></html>"
"""A page whose attributes libxml2 compares in pairs, which takes minutes."""


def read(html: str) -> Page:
    page = extract(html.encode(), "text/html", "utf-8")
    assert page is not None
    return page


def test_a_page_is_read_as_title_and_paragraphs_without_scripts_and_menus() -> None:
    page = read(HTML)
    assert page.title == "Old Towns"
    paragraphs = page.text.split("\n")
    assert len(paragraphs) == 3
    assert paragraphs[1].startswith("The lighthouse of Kalmar was built in 1852")
    assert page.contents == f'"Old Towns"\n{page.text}'
    menu = "<nav><a href='/'>Home</a></nav><script>alert('x')</script><article>"
    assert read(HTML.replace("<article>", menu)).text == page.text


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("größer".encode("latin-1"), None, "größer"),
        ("“x”".encode("cp1252"), "iso-8859-1", "“x”"),
        ("東京".encode("shift_jis"), "Shift_JIS", "東京"),
        (b'<meta charset="shift_jis">' + "東京".encode("shift_jis"), None, '<meta charset="shift_jis">東京'),
        ("東京".encode(), "no-such-charset", "東京"),
        (b"abc", "hex", "abc"),
        (b"\xef\xbb\xbf" + "東京".encode(), "shift_jis", "東京"),
        ("\ufeff東京".encode("utf-16-le"), None, "東京"),
        (b"a\xffc", "utf-8", "a\ufffdc"),
    ],
)
def test_pages_are_decoded_by_their_charset(body: bytes, charset: str | None, text: str) -> None:
    assert decode(body, charset) == text


def test_clean_text_has_no_controls_no_surrogates_and_no_empty_lines() -> None:
    directions = "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    for bad in f"\x00\x08\x0b\x1b\x7f\x85\x9f\ud800\udfff{directions}":
        assert clean(f"a{bad}b") == "ab", ascii(bad)
    assert clean(" \n\t a\tb \r\n\r\n c\rd\u200d \n") == "a b\nc\nd\u200d"


def test_the_text_of_a_page_is_bounded() -> None:
    for body, media_type in (("a" * 300_000, "text/plain"), (HTML.replace("Rivers", "a" * 300_000), "text/html")):
        page = extract(body.encode(), media_type, None)
        assert page is not None
        assert len(page.text) == MAX_TEXT_CHARS


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=30).map(" ".join), max_size=8), st.integers(1, 20))
def test_passages_keep_every_word_in_order_within_the_length_limit(paragraphs: list[str], words: int) -> None:
    text = "\n".join(paragraphs)
    found = passages(text, words)
    assert " ".join(found).split() == text.split()
    assert all(1 <= len(passage.split()) <= words for passage in found)


async def test_a_worker_ends_on_a_hostile_page_and_the_next_page_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "hidden-from-workers")
    workers = Workers(1, job_timeout_s=0.3, hidden={"SERPER_API_KEY"})
    good, endless = Fetched(HTML.encode(), "text/html", "utf-8"), Fetched(ENDLESS.encode(), "text/html", None)
    try:
        assert await workers.read(endless) is None
        workers._job_timeout_s = 300.0  # applies to workers that start after this
        assert await workers.read(good) == extract(HTML.encode(), "text/html", "utf-8")
        (worker,) = children_of("rlsys.search.web.extract")
        assert "PATH" in worker.environ()
        assert "SERPER_API_KEY" not in worker.environ()
        assert worker.rlimit(resource.RLIMIT_AS) == (2 * 1024**3, 2 * 1024**3)
        assert worker.rlimit(resource.RLIMIT_CORE) == (0, 0)
        await workers.read(Fetched(b"<html><body>" + b"<div>" * 100_000 + b"text", "text/html", None))
        reading = asyncio.create_task(workers.read(endless))
        await asyncio.sleep(0)  # the worker has its page
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not worker.is_running()
        assert await workers.read(good) is not None
    finally:
        await workers.close()
