"""The whole: a provider, its pages, and a `Retriever` for the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from rlsys.errors import Code
from rlsys.search.web.providers import ProviderLimits
from rlsys.search.web.web_search import FetchLimits, WebRetriever, open_web
from tests.search.gated import in_process
from tests.search.web.conftest import local
from tests.search.web.fake_web import ENVIRON, KEY, FakeWeb
from tests.support.refusals import refused


def opened(web: FakeWeb, name: str = "serper", **options: Any) -> WebRetriever:
    options.setdefault("limits", ProviderLimits(tries=1, try_timeout_s=60.0, timeout_s=60.0))
    options.setdefault("fetch_limits", FetchLimits(timeout_s=60.0))
    return open_web(name, endpoint=f"{web.base}/{name}", environ=ENVIRON, policy=local(web), **options)


def found(retriever: WebRetriever, queries: list[str], topk: int) -> list[list[tuple[float, dict[str, Any]]]]:
    hits = retriever.find(retriever.prepare(queries), topk)
    return [[(hit.score, dict(hit.document)) for hit in line] for line in hits]


def test_hits_are_snippets_by_rank(web: FakeWeb) -> None:
    retriever = opened(web)
    one, two, blank = found(retriever, ["first query", "second query", " "], 2)
    expected = [
        (1 / rank, {"id": url, "contents": f'"{title}"\n{snippet}', "url": url})
        for rank, (title, url, snippet) in enumerate(map(web.item, range(2)), start=1)
    ]
    assert one == two == expected
    assert blank == []
    assert {asked["q"] for asked in web.asked} == {"first query", "second query"}
    described = json.dumps(retriever.describe())
    assert json.loads(described) == {"kind": "web", "provider": "serper", "fetch_pages": False}
    assert KEY not in described
    assert retriever.parallel == ProviderLimits().max_concurrent
    retriever.close()


def test_pages_give_their_best_passage_and_lost_ones_their_snippet(web: FakeWeb) -> None:
    retriever = opened(web, fetch_pages=True, passage_words=60)
    (lighthouse, unrelated) = found(retriever, ["who built the lighthouse", "zebra"], 3)
    texts = [document["contents"].split("\n", 1)[1] for _, document in lighthouse]
    assert texts[0].startswith("The lighthouse of Kalmar was built in 1852")
    assert texts[1] == "Snippet 1 & more."
    assert texts[2] == texts[0]
    assert [document["contents"].split("\n", 1)[1] for _, document in unrelated] == [
        f"Snippet {row} & more." for row in range(3)
    ]
    assert sorted(web.fetched) == ["r0", "r1", "r2"]
    retriever.close()


def test_an_answer_without_a_page_is_a_document_of_the_query(web: FakeWeb) -> None:
    retriever = opened(web, "serpapi", fetch_pages=True)
    body = {"search_metadata": {"status": "Success"}, "answer_box": {"answer": "42", "snippet": "It is 42."}}
    web.script = [lambda: JSONResponse(body)]
    assert found(retriever, ["what is it"], 2) == [
        [(1.0, {"id": "answer: what is it", "contents": '""\n42 It is 42.', "url": ""})]
    ]
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


@pytest.mark.parametrize(
    ("provider", "options", "code", "key"),
    [
        ("yahoo", {}, "unknown", "provider"),
        ("serper", {"environ": {}}, "missing", "SERPER_API_KEY"),
        ("serper", {"endpoint": "http://[::1"}, "malformed", "endpoint"),
        ("serper", {"passage_words": 0}, "out_of_range", "passage_words"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(provider: str, options: dict[str, Any], code: Code, key: str) -> None:
    with refused(code, key):
        open_web(provider, **{"environ": ENVIRON} | options)
