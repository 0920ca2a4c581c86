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
from tests.search.web.fake_web import BOMB_BYTES, CSE_ID, ENVIRON, KEY, FakeWeb, gzipped, never_ending
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


@pytest.mark.parametrize(
    ("name", "count"), [("google", 25), ("serper", 1), ("serper", 10), ("brave", 60), ("bing", 60)]
)
async def test_results_come_in_order_over_as_few_pages_as_there_must_be(
    web: FakeWeb, clock: Clock, name: str, count: int
) -> None:
    found = await search(client_of(web, name, clock), count=count)
    assert found == [web.item(row)[1] for row in range(count)]
    size = {"google": 10, "serper": 10, "brave": 20, "bing": 50}[name]
    assert len(web.asked) == -(-count // size)


async def test_serpapi_gives_its_answer_first_and_related_questions_last(web: FakeWeb, clock: Clock) -> None:
    web.results = 12
    found = await search(client_of(web, "serpapi", clock), count=20)
    assert found == ["42 It is 42.", *(web.item(row)[1] for row in range(12)), "http://why/"]


async def test_the_requests_are_those_of_the_references(web: FakeWeb, clock: Clock) -> None:
    for name in PROVIDERS:
        await search(client_of(web, name, clock))
    assert web.asked == [
        {"q": "a query", "num": "3", "start": "1"},
        {"engine": "google", "q": "a query", "start": "0"},
        {"q": "a query", "num": 3},
        {"q": "a query", "count": "3", "offset": "0", "text_decorations": "false", "result_filter": "web"},
        {"q": "a query", "count": "3", "offset": "0", "responseFilter": "Webpages"},
    ]


async def test_queries_are_cut_to_what_providers_take_and_blank_ones_are_not_sent(web: FakeWeb, clock: Clock) -> None:
    for query in ["", " \n\t", "\ud800"]:
        assert await search(client_of(web, "brave", clock), query) == []
    assert web.asked == []
    await search(client_of(web, "brave", clock), " who\nis \ud800  it ")
    await search(client_of(web, "brave", clock), "word " * 80)
    await search(client_of(web, "brave", clock), "x" * 5000)
    assert [asked["q"] for asked in web.asked] == ["who is it", " ".join(["word"] * 50), "x" * 400]


@pytest.mark.parametrize("variable", ENVIRON)
def test_a_missing_or_impossible_key_is_named_by_its_variable_and_not_repeated(variable: str) -> None:
    provider = PROVIDERS[variable.split("_")[0].lower()]
    values: dict[str, Code] = {"  ": "missing", "kéy": "malformed", "two\nlines": "malformed"}
    for value, code in values.items():
        with refused(code, variable) as caught:
            Keys.of(provider, ENVIRON | {variable: value})
        assert not value.strip() or value not in str(caught.value)
    with refused("missing", variable):
        Keys.of(provider, {name: value for name, value in ENVIRON.items() if name != variable})


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


async def test_a_redirect_is_not_followed_as_the_key_would_travel(web: FakeWeb, clock: Clock) -> None:
    web.script = [lambda: RedirectResponse(f"{web.base}/serper", 307)]
    with pytest.raises(ProviderError, match="status 307"):
        await search(client_of(web, "serper", clock))
    assert len(web.asked) == 1


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


async def test_a_wait_beyond_the_limit_is_not_waited_for(web: FakeWeb, clock: Clock) -> None:
    web.script = [
        lambda: JSONResponse({"error": "Your account has run out of searches."}, 429, {"Retry-After": "3600"})
    ]
    with pytest.raises(ProviderError, match="run out of searches"):
        await search(client_of(web, "serpapi", clock))
    assert clock.slept == []


async def test_a_refused_key_is_named_and_not_tried_again(web: FakeWeb, clock: Clock) -> None:
    web.script = [lambda: JSONResponse({"error": {"message": "Daily limit exceeded"}}, 403)]
    with pytest.raises(ProviderError, match=r"403: Daily limit exceeded.*GOOGLE_API_KEY"):
        await search(client_of(web, "google", clock))
    assert clock.slept == []


@pytest.mark.parametrize(
    "answer",
    [
        lambda: Response("<html>Welcome to our portal</html>", media_type="text/html"),
        lambda: JSONResponse({"message": "ok"}),
        lambda: JSONResponse({"organic": "many"}),
        lambda: Response(gzipped(BOMB_BYTES), headers={"Content-Encoding": "gzip"}),
        lambda: Response(bytes(9 << 20)),
        lambda: Response(b"{}", headers={"Content-Encoding": "zstd"}),
    ],
    ids=["HTML", "other keys", "no list", "bomb", "large", "zstd"],
)
async def test_what_is_no_answer_is_an_error_at_once(
    web: FakeWeb, clock: Clock, answer: Callable[[], Response]
) -> None:
    web.script = [answer]
    with pytest.raises(ProviderError, match="serper"):
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


@pytest.mark.parametrize("limit", ["max_concurrent", "tries", "timeout_s", "requests_per_second"])
def test_limits_that_cannot_work_are_refused(limit: str) -> None:
    with refused("out_of_range", limit):
        ProviderLimits(**{limit: 0})
