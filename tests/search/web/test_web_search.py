"""Tests of web search as a whole: hits for the server, pages for /access, and hostile pages."""

import asyncio
import resource
from typing import Any

import pytest
from starlette.responses import Response

from rlsys.search.web.extract import Page, extract
from rlsys.search.web.providers import ProviderLimits
from rlsys.search.web.web_search import (
    Fetched,
    FetchLimits,
    WebPages,
    WebRetriever,
    Workers,
    best_passage,
    open_reader,
    open_web,
)
from tests.search.conftest import children_of
from tests.search.gated import in_process
from tests.search.web.conftest import local
from tests.search.web.fake_web import ENVIRON, HTML, FakeWeb, redirect_to


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
