"""Tests of search providers: their requests and answers, retries, the rate limit, and keys that stay secret."""

import asyncio
import logging
from typing import Any

import pytest
from starlette.responses import JSONResponse, RedirectResponse, Response

from rlsys.apps.planner.virtual_time import now
from rlsys.errors import Code
from rlsys.search.web.providers import (
    PROVIDERS,
    Answer,
    Keys,
    MalformedAnswer,
    ProviderClient,
    ProviderError,
    ProviderLimits,
    Result,
)
from tests.search.web.conftest import Clock
from tests.search.web.fake_web import BOMB_BYTES, CSE_ID, ENVIRON, KEY, FakeWeb, gzipped
from tests.support.refusals import refused
from tests.support.virtual_time import virtually

GOOGLE = {
    "queries": {"request": [{"startIndex": 1}], "nextPage": [{"startIndex": 11}]},
    "items": [
        {"title": "Paris", "htmlTitle": "<b>Paris</b>", "link": "https://a/", "snippet": "Capital\nof\u00a0France."}
    ],
}
SERPAPI = {
    "search_metadata": {"id": "1", "status": "Success"},
    "answer_box": {"title": "Coffee", "answer": "1554", "snippet": "It opened in 1554.", "link": "https://a/"},
    "organic_results": [
        {"position": 1, "title": "Coffee", "link": "https://b/", "snippet": "A drink."},
        {"position": 2, "title": "Only a title", "link": "https://c/"},
    ],
    "related_questions": [
        {"question": "Who?", "snippet": "Hakam.", "title": "Page", "link": "https://d/"},
        {"question": "Not loaded yet?", "next_page_token": "x"},
    ],
    "serpapi_pagination": {"current": 1, "next": "https://serpapi.com/search.json?start=10"},
}
SERPER = {
    "answerBox": {"title": "Founders", "answer": "Steve Jobs", "snippet": "Jobs", "link": "https://a/"},
    "knowledgeGraph": {"title": "Apple", "description": "A company.", "descriptionLink": "https://wiki/"},
    "organic": [{"title": "Apple", "link": "https://b/", "snippet": "Discover.", "position": 1}],
    "peopleAlsoAsk": [{"question": "What?", "snippet": "Fruit.", "title": "T", "link": "https://c/"}],
}
BRAVE = {
    "query": {"original": "q", "more_results_available": False},
    "web": {"results": [{"title": "T", "url": "https://a/", "description": "It&#x27;s &amp; is."}]},
}
BING = {"webPages": {"value": [{"id": "#0", "name": "N", "url": "https://b/", "snippet": "S"}]}}
NOTHING_FOUND = {
    "search_metadata": {"status": "Success"},
    "error": "Google hasn't returned any results for this query.",
}


@pytest.mark.parametrize(
    ("name", "body", "answer"),
    [
        ("google", GOOGLE, Answer((Result("Paris", "https://a/", "Capital of France."),), more=True)),
        (
            "serpapi",
            SERPAPI,
            Answer(
                organic=(Result("Coffee", "https://b/", "A drink."), Result("Only a title", "https://c/", "")),
                direct=(Result("Coffee", "https://a/", "1554 It opened in 1554."),),
                related=(Result("Who?", "https://d/", "Hakam."),),
                more=True,
            ),
        ),
        ("serpapi", NOTHING_FOUND, Answer(())),
        (
            "serper",
            SERPER,
            Answer(
                organic=(Result("Apple", "https://b/", "Discover."),),
                direct=(
                    Result("Founders", "https://a/", "Steve Jobs Jobs"),
                    Result("Apple", "https://wiki/", "A company."),
                ),
                related=(Result("What?", "https://c/", "Fruit."),),
                more=True,
            ),
        ),
        ("brave", BRAVE, Answer((Result("T", "https://a/", "It's & is."),))),
        ("bing", BING, Answer((Result("N", "https://b/", "S"),), more=True)),
    ],
)
def test_answers_are_parsed_as_each_api_reference_describes(name: str, body: Any, answer: Answer) -> None:
    assert PROVIDERS[name].parse(body) == answer


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_malformed_answer_is_not_taken_for_an_empty_one(name: str) -> None:
    failed = {"search_metadata": {"status": "Error"}, "error": "We couldn't get valid results."}
    for body in (None, [], {}, {"message": "Bad gateway"}, failed):
        with pytest.raises(MalformedAnswer):
            PROVIDERS[name].parse(body)


def client_of(web: FakeWeb, clock: Clock, name: str = "serper", env: Any = ENVIRON, **limits: Any) -> ProviderClient:
    return ProviderClient(
        PROVIDERS[name],
        Keys.of(PROVIDERS[name], env),
        endpoint=f"{web.base}/search",
        limits=ProviderLimits(**{"try_timeout_s": 300.0, "timeout_s": 900.0} | limits),
        sleep=clock.sleep,
        now=clock.now,
    )


async def search(client: ProviderClient, query: str = "a query", count: int = 3) -> list[str]:
    """Return the URL of each result, or its snippet if it has no URL."""
    try:
        return [result.url or result.snippet for result in await client.search(query, count)]
    finally:
        await client.close()


@pytest.mark.parametrize(("count", "pages"), [(1, 1), (10, 1), (25, 3), (300, 10)])
async def test_results_come_in_order_over_the_fewest_pages(web: FakeWeb, clock: Clock, count: int, pages: int) -> None:
    found = await search(client_of(web, clock), f"a\n\ud800{' b' * 60}", count)
    assert found == [web.item(row)[1] for row in range(min(count, 100))]
    assert [asked["q"] for asked in web.asked] == ["a" + " b" * 49] * pages


async def test_requests_are_those_of_the_api_references(web: FakeWeb, clock: Clock) -> None:
    for name in PROVIDERS:
        web.script = [lambda: JSONResponse(BING | GOOGLE | SERPAPI | SERPER | BRAVE)]
        await search(client_of(web, clock, name), count=1)
    brave = {"result_filter": "web", "text_decorations": "false"}
    assert web.asked == [
        {"q": "a query", "num": "1", "start": "1", "key": KEY, "cx": CSE_ID},
        {"engine": "google", "q": "a query", "start": "0", "api_key": KEY},
        {"q": "a query", "num": 1, "x-api-key": KEY},
        {"q": "a query", "count": "1", "offset": "0", **brave, "x-subscription-token": KEY},
        {"q": "a query", "count": "1", "offset": "0", "responseFilter": "Webpages", "ocp-apim-subscription-key": KEY},
    ]
    assert [provider.request("q", provider.page_size, 2) for provider in PROVIDERS.values()] == [
        {"q": "q", "num": 10, "start": 21},
        {"engine": "google", "q": "q", "start": 20},
        {"q": "q", "num": 10, "page": 3},
        {"q": "q", "count": 20, "offset": 2, **brave},
        {"q": "q", "count": 50, "offset": 100, "responseFilter": "Webpages"},
    ]


async def test_direct_answers_come_first_related_questions_last_and_each_page_once(web: FakeWeb, clock: Clock) -> None:
    repeated: Any = SERPAPI["organic_results"]
    second = {"organic_results": [repeated[1], {"title": "More", "link": "https://e/"}]}
    web.script = [lambda: JSONResponse(SERPAPI), lambda: JSONResponse(second)]
    found = await search(client_of(web, clock, "serpapi"), count=20)
    assert found == ["https://a/", "https://b/", "https://c/", "https://e/", "https://d/"]


@virtually
async def test_as_many_requests_are_in_flight_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def takes_a_second(*_: object) -> Answer:
        await asyncio.sleep(1)
        return Answer(())

    monkeypatch.setattr(ProviderClient, "_try", takes_a_second)
    serper, limits = PROVIDERS["serper"], ProviderLimits(max_concurrent=2)
    client = ProviderClient(serper, Keys.of(serper, ENVIRON), limits=limits)
    await asyncio.gather(*(client.search(f"q{row}", 3) for row in range(5)))
    await client.close()
    assert now() == 3.0


@pytest.mark.parametrize(("value", "code"), [("  ", "missing"), ("kéy", "malformed"), ("two\nlines", "malformed")])
def test_a_missing_or_invalid_key_is_refused_without_repeating_it(value: str, code: Code) -> None:
    for variable in ("GOOGLE_API_KEY", "GOOGLE_CSE_ID", "BRAVE_API_KEY"):
        with refused(code, variable) as caught:
            Keys.of(PROVIDERS[variable.split("_")[0].lower()], ENVIRON | {variable: value})
        assert code == "missing" or value not in str(caught.value)


@pytest.mark.parametrize("name", ["google", "serper"])
async def test_keys_appear_in_no_log_error_or_repr(web: FakeWeb, clock: Clock, name: str, caplog: Any) -> None:
    """One provider takes its key as a URL parameter, the other as a header."""
    # Other libraries may have raised the log level of httpx in this process.
    caplog.set_level(logging.DEBUG, "httpx")
    caplog.set_level(logging.DEBUG)
    web.script = [lambda: JSONResponse(GOOGLE | SERPER)]
    await search(client_of(web, clock, name), count=1)
    wrong = {variable: f"wrong-{value}" for variable, value in ENVIRON.items()}
    web.script = [lambda: JSONResponse({"error": f"{'bad ' * 92}key wrong-{KEY} wrong-{CSE_ID}"}, 401)]
    with pytest.raises(ProviderError) as denied:
        await search(client_of(web, clock, name, wrong))
    keys = Keys.of(PROVIDERS[name], ENVIRON)
    dead = ProviderClient(PROVIDERS[name], keys, endpoint="http://127.0.0.1:1/", sleep=clock.sleep)
    with pytest.raises(ProviderError) as unreachable:
        await search(dead)
    assert "HTTP Request" in caplog.text
    seen = caplog.text + str(denied.value) + str(unreachable.value) + repr(denied.value.__cause__) + repr(keys)
    assert KEY[:8] not in seen
    assert CSE_ID[:8] not in seen or name != "google"


@pytest.mark.parametrize(
    "answer",
    [
        lambda: JSONResponse({"error": "No searches left."}, 429, {"Retry-After": "3600"}),
        lambda: JSONResponse({"error": "Come back."}, 503, {"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"}),
        lambda: JSONResponse({"error": {"message": "Daily limit"}}, 403),
        lambda: RedirectResponse("/search", 307),  # Following it would send the key along.
        lambda: Response("<html>Welcome to our portal</html>", media_type="text/html"),
        lambda: JSONResponse({"organic": "many"}),
        lambda: Response(gzipped(BOMB_BYTES), headers={"Content-Encoding": "gzip"}),
    ],
    ids=["long wait", "far date", "refused key", "redirect", "HTML", "no list", "bomb"],
)
async def test_permanent_failures_are_not_retried(web: FakeWeb, clock: Clock, answer: Any) -> None:
    web.script = [answer]
    with pytest.raises(ProviderError):
        await search(client_of(web, clock))
    assert len(web.asked) == 1
    assert clock.slept == []


async def test_other_failures_are_retried_a_few_times_and_not_before_the_provider_allows(
    web: FakeWeb, clock: Clock
) -> None:
    busy = [lambda: Response("", 429, {"Retry-After": "20"}), lambda: Response("", 500)]
    web.script = list(busy)
    assert len(await search(client_of(web, clock, tries=3))) == 3
    first, second = clock.slept
    assert (first, 0.5 <= second <= 8.5) == (20.0, True)
    web.script = [*busy, *busy]
    with pytest.raises(ProviderError):
        await search(client_of(web, clock, tries=3))
    assert (len(web.asked), len(web.script)) == (6, 1)


async def test_requests_and_retries_keep_to_the_rate_limit(web: FakeWeb, clock: Clock) -> None:
    start = clock.now()
    client = client_of(web, clock, requests_per_second=1 / 16)
    web.script = [lambda: Response("", 503)]
    for row in range(8):
        await client.search(f"q{row}", 3)
    await client.close()
    assert clock.now() - start == pytest.approx(8 * 16), "after 8 of 9 requests"
    with refused("out_of_range", "requests_per_second"):
        ProviderLimits(requests_per_second=0)
