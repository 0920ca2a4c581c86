"""Asking providers over a real socket: pages, retries, limits, and keys that stay secret."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse, RedirectResponse, Response

from rlsys.errors import Code
from rlsys.search.web.providers import PROVIDERS, Keys, ProviderClient, ProviderError, ProviderLimits
from tests.search.web.conftest import Clock
from tests.search.web.fake_web import BOMB_BYTES, CSE_ID, ENVIRON, FORMATS, KEY, FakeWeb, gzipped, never_ending
from tests.support.refusals import refused


def client_of(web: FakeWeb, name: str, clock: Clock, environ: Any = ENVIRON, **limits: Any) -> ProviderClient:
    return ProviderClient(
        PROVIDERS[name],
        Keys.of(PROVIDERS[name], environ),
        endpoint=f"{web.base}/{name}",
        limits=ProviderLimits(**{"try_timeout_s": 60.0, "timeout_s": 120.0} | limits),
        sleep=clock.sleep,
        now=clock.now,
    )


async def search(client: ProviderClient, query: str = "a query", count: int = 3) -> list[str]:
    """URLs, or titles of what has none."""
    try:
        return [result.url or result.snippet for result in await client.search(query, count)]
    finally:
        await client.close()


@pytest.mark.parametrize("name", FORMATS)
async def test_results_come_in_order_over_as_few_pages_as_there_must_be(web: FakeWeb, clock: Clock, name: str) -> None:
    most = FORMATS[name].most
    for count, requests in ((1, 1), (most, 1), (2 * most + 5, 3)):
        web.asked.clear()
        found = await search(client_of(web, name, clock), count=count)
        assert found == [web.item(row)[1] for row in range(count)]
        assert len(web.asked) == requests


async def test_direct_answers_come_first_and_related_questions_last(web: FakeWeb, clock: Clock) -> None:
    first = {
        "organic_results": [{"title": "T", "link": f"http://{row}/", "snippet": "S"} for row in range(10)],
        "answer_box": {"answer": "42", "snippet": "It is 42."},
        "related_questions": [{"question": "Why?", "snippet": "Because.", "link": "http://why/"}],
        "serpapi_pagination": {"next": "https://serpapi.com/search.json?start=10"},
    }
    second = {"organic_results": [{"title": "T", "link": f"http://{row}/", "snippet": "S"} for row in (9, 10)]}
    web.script = [lambda: JSONResponse(first), lambda: JSONResponse(second)]
    found = await search(client_of(web, "serpapi", clock), count=20)
    assert found == ["42 It is 42.", *(f"http://{row}/" for row in range(11)), "http://why/"]


async def test_the_requests_are_those_of_the_references(web: FakeWeb, clock: Clock) -> None:
    for name in PROVIDERS:
        await search(client_of(web, name, clock))
    brave = {"count": "3", "offset": "0", "text_decorations": "false", "result_filter": "web"}
    assert web.asked == [
        {"q": "a query", "num": "3", "start": "1", "key": KEY, "cx": CSE_ID},
        {"engine": "google", "q": "a query", "start": "0", "api_key": KEY},
        {"q": "a query", "num": 3, "x-api-key": KEY},
        {"q": "a query", **brave, "x-subscription-token": KEY},
        {"q": "a query", "count": "3", "offset": "0", "responseFilter": "Webpages", "ocp-apim-subscription-key": KEY},
    ]


async def test_queries_are_cut_to_what_providers_take_and_blank_ones_are_not_sent(web: FakeWeb, clock: Clock) -> None:
    for query in (" \n\t", "\ud800"):
        assert await search(client_of(web, "brave", clock), query) == []
    assert web.asked == []
    for query in (" who\nis \ud800  it ", "word " * 80, "x" * 5000):
        await search(client_of(web, "brave", clock), query)
    assert [asked["q"] for asked in web.asked] == ["who is it", " ".join(["word"] * 50), "x" * 400]


@pytest.mark.parametrize(
    ("value", "code"), [(None, "missing"), ("  ", "missing"), ("kéy", "malformed"), ("two\nlines", "malformed")]
)
def test_a_missing_or_impossible_key_is_named_by_its_variable_and_not_repeated(value: str | None, code: Code) -> None:
    for variable in ("GOOGLE_API_KEY", "GOOGLE_CSE_ID", "BRAVE_API_KEY"):
        given = {name: key for name, key in ENVIRON.items() if name != variable}
        with refused(code, variable) as caught:
            Keys.of(PROVIDERS[variable.split("_")[0].lower()], given if value is None else {**given, variable: value})
        assert code == "missing" or str(value) not in str(caught.value)


@pytest.mark.parametrize("name", PROVIDERS)
async def test_keys_are_in_no_log_no_error_and_no_repr(
    web: FakeWeb, clock: Clock, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Other libraries quieten httpx in this process; a server does not.
    caplog.set_level(logging.DEBUG, "httpx")
    caplog.set_level(logging.DEBUG)
    await search(client_of(web, name, clock))
    wrong = {variable: f"wrong-{value}" for variable, value in ENVIRON.items()}
    web.script = [lambda: JSONResponse({"error": f"{'bad ' * 92}key wrong-{KEY} wrong-{CSE_ID}"}, 401)]
    with pytest.raises(ProviderError) as denied:
        await search(client_of(web, name, clock, wrong))
    dead = ProviderClient(
        PROVIDERS[name], Keys.of(PROVIDERS[name], ENVIRON), endpoint="http://127.0.0.1:1/", sleep=clock.sleep
    )
    with pytest.raises(ProviderError) as unreachable:
        await search(dead)
    assert "HTTP Request" in caplog.text
    seen = caplog.text + str(denied.value) + str(unreachable.value) + repr(denied.value.__cause__)
    seen += repr(Keys.of(PROVIDERS[name], ENVIRON))
    assert KEY[:8] not in seen
    assert CSE_ID[:8] not in seen or name != "google"


async def test_a_busy_provider_is_asked_again_when_it_wants(web: FakeWeb, clock: Clock) -> None:
    web.script = [
        lambda: Response("slow down", 429, {"Retry-After": "7"}),
        lambda: Response("", 503),
        lambda: Response("", 502),
    ]
    assert len(await search(client_of(web, "serper", clock))) == 3
    assert len(web.asked) == 4
    first, second, third = clock.slept
    assert first == 7
    assert 0.5 <= second <= 2
    assert second < third <= 4


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: JSONResponse({"error": "No searches left."}, 429, {"Retry-After": "3600"}), "No searches left"),
        (lambda: JSONResponse({"error": {"message": "Daily limit"}}, 403), "403: Daily limit.*SERPER_API_KEY"),
        (lambda: RedirectResponse("/serper", 307), "status 307"),  # the key would travel with it
        (lambda: Response("<html>Welcome to our portal</html>", media_type="text/html"), "serper"),
        (lambda: JSONResponse({"message": "ok"}), "serper"),
        (lambda: JSONResponse({"organic": "many"}), "serper"),
        (lambda: Response(gzipped(BOMB_BYTES), headers={"Content-Encoding": "gzip"}), "serper"),
        (lambda: Response(bytes(9 << 20)), "serper"),
    ],
    ids=["long wait", "refused key", "redirect", "HTML", "other keys", "no list", "bomb", "large"],
)
async def test_what_no_further_try_would_mend_is_an_error_at_once(
    web: FakeWeb, clock: Clock, answer: Callable[[], Response], reason: str
) -> None:
    web.script = [answer]
    with pytest.raises(ProviderError, match=reason):
        await search(client_of(web, "serper", clock))
    assert len(web.asked) == 1
    assert clock.slept == []


async def test_a_body_that_never_ends_is_given_up(web: FakeWeb, clock: Clock) -> None:
    web.script = [never_ending] * 20
    with pytest.raises(ProviderError, match="serper"):
        await search(client_of(web, "serper", clock, try_timeout_s=0.3, timeout_s=0.5))


async def test_requests_keep_to_the_rate(web: FakeWeb, clock: Clock) -> None:
    start = clock.now()
    client = client_of(web, "serper", clock, max_concurrent=1, requests_per_second=4)
    for row in range(9):
        await client.search(f"q{row}", 3)
    await client.close()
    assert clock.now() - start == pytest.approx(8 / 4)


def test_limits_that_cannot_work_are_refused() -> None:
    with refused("out_of_range", "requests_per_second"):
        ProviderLimits(requests_per_second=0)
