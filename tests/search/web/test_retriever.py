"""The whole: a provider, its pages, and a `Retriever` for the server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from rlsys.errors import UserError
from rlsys.search.server.asgi import create_app
from rlsys.search.web.providers import ProviderError, ProviderLimits
from rlsys.search.web.web_search import WebRetriever, open_web
from tests.search.conftest import serving
from tests.search.web.fake_web import ENVIRON, KEY, FakeWeb
from tests.search.web.test_fetch import local
from tests.support.ports import free_port


def opened(web: FakeWeb, name: str = "serper", **options: Any) -> WebRetriever:
    options.setdefault("limits", ProviderLimits(tries=1))
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
    ((score, document), *_) = found(retriever, ["what is it"], 2)[0]
    assert (score, document) == (1.0, {"id": "answer: what is it", "contents": '""\n42 It is 42.', "url": ""})
    retriever.close()


def test_an_outage_is_an_error_and_what_was_paid_for_is_kept(web: FakeWeb) -> None:
    retriever = opened(web)
    web.script = [lambda: Response("", 500)]
    queries = ["a", "b", "c"]
    with pytest.raises(ProviderError, match="status 500"):
        found(retriever, queries, 3)
    assert len(web.asked) == 3
    assert [len(hits) for hits in found(retriever, queries, 3)] == [3, 3, 3]
    assert len(web.asked) == 4
    assert found(retriever, ["a"], 3) == found(retriever, ["b"], 3)
    retriever.close()


def test_the_server_says_that_a_provider_is_down(web: FakeWeb) -> None:
    retriever = opened(web)
    asked = {"queries": ["who"], "topk": 1, "return_scores": True}
    with serving(create_app(retriever), free_port()) as url:
        web.script = [lambda: Response("", 500)]
        down = httpx.post(f"{url}/retrieve", json=asked)
        assert down.status_code == 503
        assert "web search by serper failed" in down.json()["detail"]
        title, page, snippet = web.item(0)
        document = {"id": page, "contents": f'"{title}"\n{snippet}', "url": page}
        up = httpx.post(f"{url}/retrieve", json=asked)
        assert up.json() == {"result": [[{"document": document, "score": 1.0}]]}
        health = httpx.get(f"{url}/health")
        assert health.json()["provider"] == "serper"
        assert KEY not in health.text + up.text + down.text
    retriever.close()


def test_threads_may_find_at_once(web: FakeWeb) -> None:
    retriever = opened(web)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda row: found(retriever, [f"q{row}"], 2), range(24)))
    assert all(answer == answers[0] for answer in answers)
    assert len(web.asked) == 24
    retriever.close()


@pytest.mark.parametrize(
    ("provider", "options", "message"),
    [
        ("yahoo", {}, "provider 'yahoo' is unknown: choose one of google, serpapi, serper, brave, bing"),
        ("serper", {"environ": {}}, "SERPER_API_KEY is not set"),
        (
            "serper",
            {"environ": ENVIRON, "endpoint": "localhost:80"},
            "endpoint 'localhost:80' is not an address",
        ),
        (
            "serper",
            {"environ": ENVIRON, "endpoint": "http://[::1"},
            r"endpoint 'http://\[::1' is not an address",
        ),
        ("serper", {"environ": ENVIRON, "passage_words": 0}, "passage_words=0"),
    ],
)
def test_mistakes_are_one_sentence(provider: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_web(provider, **options)
