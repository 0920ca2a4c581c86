"""Web search providers: describes their APIs as data, and sends queries with retries.

Field names follow the public API references:
  google:   Custom Search JSON API   items[].{title, link, snippet}; closed to new customers, and announced to
                                     end in January 2027
  serpapi:  Google by SerpApi        answer_box, organic_results[], related_questions[].{question, snippet, link}
  serper:   Google by serper.dev     answerBox, knowledgeGraph, organic[], peopleAlsoAsk[]
  brave:    Brave Search API         web.results[].{title, url, description}
  bing:     Bing Web Search v7       webPages.value[].{name, url, snippet}; Microsoft retired the public API in
                                     August 2025, so `bing` is for compatible endpoints

Invariants:
  - An outage never looks like an empty result: `ProviderClient.search` returns results or raises ProviderError, even
    for a malformed response.
  - Keys come from the environment and are sent only to the provider. They are added by the transport, because httpx's
    client logs URLs at INFO and keeps requests in its errors. Redirects are not followed and proxies not used.
  - 429, 5xx and lost connections are retried, no earlier than Retry-After; any other 4xx is never retried.
"""

from __future__ import annotations

import asyncio
import html
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple

import httpx
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from rlsys.errors import RunError, UserError
from rlsys.search.wire import BodyError, Encoding, read_body

MAX_QUERY_CHARS = 400
MAX_QUERY_WORDS = 50
"""Maximum length of a query to any provider: Brave's limits, which are the strictest. Longer queries are cut, because
engines ignore the rest of a query."""
_MAX_ANSWER_BYTES = 8 * 1024 * 1024
_MAX_REASON_CHARS = 400

Json = Mapping[str, Any]
Sleep = Callable[[float], Awaitable[None]]


class Result(NamedTuple):
    title: str
    url: str  # empty for a direct answer that has no page
    snippet: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One page of a provider's results; each kind is sorted best first."""

    organic: tuple[Result, ...]
    direct: tuple[Result, ...] = ()  # direct answers, shown above the results
    related: tuple[Result, ...] = ()  # answers to related questions, shown below the results
    more: bool = False  # True if a further page exists


class MalformedAnswer(ValueError):
    """The response does not have the provider's format; the text says where."""


class Credential(NamedTuple):
    """An environment variable with a secret, and the request header or parameter that carries the secret."""

    variable: str
    place: Literal["header", "parameter"]
    name: str


class ResultFields(NamedTuple):
    """Location of results in a response: path to an object or list of objects, and the keys of their fields."""

    path: str  # keys joined by dots
    title: str
    url: str
    snippet: tuple[str, ...] = ("snippet",)  # keys whose texts are joined


@dataclass(frozen=True, slots=True)
class Provider:
    """Description of one provider's API."""

    name: str
    endpoint: str
    credentials: tuple[Credential, ...]
    request: Callable[[str, int, int], dict[str, str | int]]
    """(query, results per page, page number from 0) -> URL parameters or JSON body"""
    signs: frozenset[str]  # top-level keys; every valid response has at least one of them
    organic: ResultFields
    direct: tuple[ResultFields, ...] = ()
    related: tuple[ResultFields, ...] = ()
    more: Callable[[Json, tuple[Result, ...]], bool] = lambda _, organic: bool(organic)
    """(response, its organic results) -> True if a further page exists"""
    method: Literal["GET", "POST"] = "GET"  # GET sends the request as URL parameters, POST as JSON
    page_size: int = 10  # maximum number of results per request
    max_results: int = 100  # maximum number of results per query, over all pages

    def parse(self, body: object) -> Answer:
        """Return the results in a decoded JSON body. Raises MalformedAnswer."""
        if not isinstance(body, dict):
            raise MalformedAnswer(f"the answer is a {type(body).__name__}, not an object")
        if not self.signs & body.keys():
            raise MalformedAnswer(f"the answer has none of {', '.join(sorted(self.signs))}")
        # An empty SerpApi search has an `error` too, but with status Success.
        if self.name == "serpapi" and "error" in body and _object(body, "search_metadata").get("status") != "Success":
            raise MalformedAnswer(f"the provider says: {_text(body['error'])}")
        organic = _results(_objects(body, self.organic.path), self.organic)
        direct = [result for box in self.direct for result in _results([_object(body, box.path)], box)]
        related = [result for box in self.related for result in _results(_objects(body, box.path), box)]
        return Answer(organic, tuple(direct), tuple(related), self.more(body, organic))


def _object(body: Json, path: str) -> Json:
    """Return the object at `path`; empty if missing."""
    for key in path.split(".") if path else ():
        value = body.get(key)
        if value is not None and not isinstance(value, dict):
            raise MalformedAnswer(f"`{key}` is a {type(value).__name__}, not an object")
        body = value or {}
    return body


def _objects(body: Json, path: str) -> list[Json]:
    """Return the list of objects at `path`; empty if missing."""
    above, _, key = path.rpartition(".")
    value = _object(body, above).get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise MalformedAnswer(f"`{key}` is not a list of objects")
    return value


def _text(value: object) -> str:
    """Return text or a number as one line without HTML entities; empty for any other value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return " ".join(html.unescape(value).split()) if isinstance(value, str) else ""


def _results(entries: Iterable[Json], fields: ResultFields) -> tuple[Result, ...]:
    """Return the results of `entries` that have a snippet, or title and URL."""
    found = []
    for entry in entries:
        parts = dict.fromkeys(_text(entry.get(key)) for key in fields.snippet)
        result = Result(_text(entry.get(fields.title)), _text(entry.get(fields.url)), " ".join(filter(None, parts)))
        if result.snippet or (result.title and result.url):
            found.append(result)
    return tuple(found)


_PROVIDERS = (
    Provider(
        "google",
        "https://www.googleapis.com/customsearch/v1",
        (Credential("GOOGLE_API_KEY", "parameter", "key"), Credential("GOOGLE_CSE_ID", "parameter", "cx")),
        request=lambda query, count, page: {"q": query, "num": count, "start": 1 + page * count},
        signs=frozenset({"kind", "queries", "searchInformation", "items"}),
        organic=ResultFields("items", "title", "link"),
        more=lambda body, _: bool(_objects(body, "queries.nextPage")),
    ),
    Provider(
        "serpapi",
        "https://serpapi.com/search.json",
        (Credential("SERPAPI_API_KEY", "parameter", "api_key"),),
        # Google returns ten results per page, whatever `num` is.
        request=lambda query, _, page: {"engine": "google", "q": query, "start": page * 10},
        signs=frozenset({"search_metadata", "organic_results", "error"}),
        organic=ResultFields("organic_results", "title", "link"),
        direct=(ResultFields("answer_box", "title", "link", ("answer", "result", "snippet")),),
        related=(ResultFields("related_questions", "question", "link"),),
        more=lambda body, _: "next" in _object(body, "serpapi_pagination"),
    ),
    Provider(
        "serper",
        "https://google.serper.dev/search",
        (Credential("SERPER_API_KEY", "header", "X-API-KEY"),),
        method="POST",
        request=lambda query, count, page: {"q": query, "num": count, **({"page": page + 1} if page else {})},
        signs=frozenset({"searchParameters", "organic"}),
        organic=ResultFields("organic", "title", "link"),
        direct=(
            ResultFields("answerBox", "title", "link", ("answer", "snippet")),
            ResultFields("knowledgeGraph", "title", "descriptionLink", ("description",)),
        ),
        related=(ResultFields("peopleAlsoAsk", "question", "link"),),
    ),
    Provider(
        "brave",
        "https://api.search.brave.com/res/v1/web/search",
        (Credential("BRAVE_API_KEY", "header", "X-Subscription-Token"),),
        page_size=20,
        max_results=200,
        request=lambda query, count, page: {
            "q": query,
            "count": count,
            "offset": page,
            "result_filter": "web",
            "text_decorations": "false",
        },
        signs=frozenset({"type", "query", "web"}),
        organic=ResultFields("web.results", "title", "url", ("description",)),
        more=lambda body, _: _object(body, "query").get("more_results_available") is True,
    ),
    Provider(
        "bing",
        "https://api.bing.microsoft.com/v7.0/search",
        (Credential("BING_API_KEY", "header", "Ocp-Apim-Subscription-Key"),),
        page_size=50,
        max_results=1000,
        request=lambda query, count, page: {
            "q": query,
            "count": count,
            "offset": page * count,
            "responseFilter": "Webpages",
        },
        signs=frozenset({"_type", "queryContext", "webPages"}),
        organic=ResultFields("webPages.value", "name", "url"),
    ),
)
PROVIDERS: Mapping[str, Provider] = {provider.name: provider for provider in _PROVIDERS}
"""All providers, by name."""


class ProviderError(RunError):
    """A failed request to a provider; the message is one sentence without keys."""


@dataclass(frozen=True, slots=True)
class ProviderLimits:
    """Limits of rate, concurrency and time for requests to a provider."""

    max_concurrent: int = 16  # requests in flight
    requests_per_second: float | None = None  # rate limit of the subscription; None for unlimited
    tries: int = 4
    try_timeout_s: float = 10.0
    timeout_s: float = 30.0  # for one request with all tries and pauses, not counting the wait for its first slot

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "tries", "try_timeout_s", "timeout_s", "requests_per_second"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name} {value:g} is out of range: give more than 0.", code="out_of_range", key=name)


@dataclass(frozen=True, slots=True)
class Keys:
    """Secrets of one provider as request headers and parameters."""

    headers: Mapping[str, str] = field(repr=False)
    parameters: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, provider: Provider, environ: Mapping[str, str]) -> Keys:
        """Read the keys from `environ`. Raises UserError for a missing or malformed variable."""
        found: dict[str, dict[str, str]] = {"header": {}, "parameter": {}}
        for credential in provider.credentials:
            value = environ.get(credential.variable, "").strip()
            name = credential.variable
            if not value:
                raise UserError(
                    f"{name} is not set: web search by {provider.name} needs it in the environment.",
                    code="missing",
                    key=name,
                )
            if not (value.isascii() and value.isprintable()):
                raise UserError(
                    f"{name} contains characters that no key can have: set it to the key and nothing else.",
                    code="malformed",
                    key=name,
                )
            found[credential.place][credential.name] = value
        return cls(found["header"], found["parameter"])

    def hidden_in(self, text: str) -> str:
        """Return `text` with every secret replaced by `***`."""
        for secret in (*self.headers.values(), *self.parameters.values()):
            text = text.replace(secret, "***")
        return text


class ProviderClient:
    """Client of one provider, for one event loop.

    `endpoint` replaces the provider's endpoint; `sleep` and `now` replace the clock.
    """

    def __init__(
        self,
        provider: Provider,
        keys: Keys,
        *,
        endpoint: str | None = None,
        limits: ProviderLimits | None = None,
        sleep: Sleep = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = _endpoint_url(endpoint or provider.endpoint)
        self._provider, self._keys, self._limits = provider, keys, limits or ProviderLimits()
        self._sleep, self._now = sleep, now
        self._next_turn = 0.0
        self._slots = asyncio.Semaphore(self._limits.max_concurrent)
        connections = httpx.Limits(max_keepalive_connections=self._limits.max_concurrent)
        self._http = httpx.AsyncClient(
            transport=_KeyedTransport(keys, connections),
            timeout=self._limits.try_timeout_s,
            headers={"Accept": "application/json", "Accept-Encoding": Encoding.gzip},
            trust_env=False,
        )

    async def search(self, query: str, count: int) -> list[Result]:
        """Return up to `count` distinct results: direct answers, then organic results, then related questions.

        Sends one request per `page_size` results. A blank query returns no results without a request. Raises
        ProviderError for a failed request or a malformed response.
        """
        # One line, without characters that UTF-8 cannot encode.
        words = query.encode("utf-8", "ignore").decode("utf-8").split()[:MAX_QUERY_WORDS]
        if not (query := " ".join(words)[:MAX_QUERY_CHARS].rstrip()):
            return []
        size = min(count, self._provider.page_size)
        first = answer = await self._ask(query, size, 0)
        found = _distinct(first.direct + first.organic)
        pages = min(math.ceil(count / size), self._provider.max_results // size)
        for page in range(1, pages):
            if len(found) >= count or not answer.more or not answer.organic:
                break
            answer = await self._ask(query, size, page)
            found = _distinct([*found, *answer.organic])
        return _distinct([*found, *first.related])[:count]

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, query: str, count: int, page: int) -> Answer:
        """Return one page of results, with retries. Raises ProviderError."""
        limits = self._limits
        failed: list[str] = []
        retrying = AsyncRetrying(
            stop=stop_after_attempt(limits.tries),
            wait=_wait_s,
            retry=retry_if_exception(lambda error: isinstance(error, _Failed) and error.after_s < limits.timeout_s),
            before_sleep=lambda state: failed.append(str(state.outcome and state.outcome.exception())),
            sleep=self._pause,
            reraise=True,
        )
        async with self._slots:
            await self._take_turn()
            try:
                async with asyncio.timeout(limits.timeout_s):
                    return await retrying(self._try, self._provider.request(query, count, page))
            except TimeoutError:
                reason = "; ".join([f"no answer within {limits.timeout_s:g} s", *failed[-1:]])
            except (_Failed, MalformedAnswer) as error:
                reason = str(error)
        problem = f"web search by {self._provider.name} failed"
        raise ProviderError(f"{problem}: {self._keys.hidden_in(reason)[:_MAX_REASON_CHARS]}")

    async def _pause(self, seconds: float) -> None:
        """Wait `seconds`, and then for a slot of the rate limit, which a retry needs as much as the first try."""
        await self._sleep(seconds)
        await self._take_turn()

    async def _take_turn(self) -> None:
        """Wait for the next slot of the rate limit, which spaces requests evenly."""
        if per_second := self._limits.requests_per_second:
            now = self._now()
            mine = max(now, self._next_turn)
            self._next_turn = mine + 1 / per_second
            if mine > now:
                await self._sleep(mine - now)

    async def _try(self, asked: dict[str, str | int]) -> Answer:
        if self._provider.method == "POST":
            request = self._http.build_request("POST", self._endpoint, json=asked)
        else:
            request = self._http.build_request("GET", self._endpoint.copy_merge_params(asked))
        try:
            async with asyncio.timeout(self._limits.try_timeout_s):
                response = await self._http.send(request, stream=True)
                try:
                    body = await read_body(response.headers, response.aiter_raw(), _MAX_ANSWER_BYTES, Encoding.gzip)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise _Failed(f"no answer within {self._limits.try_timeout_s:g} s", 0) from None
        except httpx.TransportError as error:
            raise _Failed(f"{type(error).__name__} {error}".strip(), 0) from None
        except BodyError as error:
            raise _Failed(f"its answer is refused: {error}") from None
        return self._read(response, body)

    def _read(self, response: httpx.Response, body: bytes) -> Answer:
        status = response.status_code
        said = f"status {status}{_detail(body)}"
        if status == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
            raise _Failed(said, _retry_after_s(response))
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            names = " and ".join(credential.variable for credential in self._provider.credentials)
            raise _Failed(f"{said}; check the key and the quota of {names}")
        if not response.is_success:
            raise _Failed(f"{said}; check the endpoint and the keys")
        try:
            return self._provider.parse(orjson.loads(body))
        except orjson.JSONDecodeError as error:
            raise _Failed(f"its answer is not JSON ({error})") from None


class _Failed(Exception):
    """A failed try. A retry may succeed after at least `after_s` seconds; infinity means that no retry can."""

    def __init__(self, reason: str, after_s: float = math.inf) -> None:
        super().__init__(reason)
        self.after_s = after_s


class _KeyedTransport(httpx.AsyncHTTPTransport):
    """Sends a copy of each request with the keys added, so that logs and errors of httpx's client contain no keys."""

    def __init__(self, keys: Keys, limits: httpx.Limits) -> None:
        super().__init__(limits=limits, trust_env=False)
        self._keys = keys

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url.copy_merge_params(dict(self._keys.parameters))
        headers = request.headers.copy()
        headers.update(self._keys.headers)
        stream, extensions = request.stream, request.extensions
        keyed = httpx.Request(request.method, url, headers=headers, stream=stream, extensions=extensions)
        return await super().handle_async_request(keyed)


def _distinct(results: Sequence[Result]) -> list[Result]:
    """Return `results` without repeated pages."""
    found: dict[str, Result] = {}
    for result in results:
        found.setdefault(result.url or result.snippet, result)
    return list(found.values())


def _endpoint_url(endpoint: str) -> httpx.URL:
    try:
        url = httpx.URL(endpoint)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise UserError(
            f"endpoint {endpoint!r} is not an address: write it like https://host/search.",
            code="malformed",
            key="endpoint",
        )
    return url


def _wait_s(state: RetryCallState) -> float:
    """Return the wait before the next try: the back-off, but at least the provider's Retry-After."""
    backoff_s = wait_exponential_jitter(multiplier=0.5, max=8.0, jitter=0.5)(state)
    error = state.outcome.exception() if state.outcome else None
    return max(backoff_s, error.after_s) if isinstance(error, _Failed) else backoff_s


def _retry_after_s(response: httpx.Response) -> float:
    """Return Retry-After in seconds, from a number or a date; 0 if missing."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        wait = parsedate_to_datetime(value) - datetime.now(UTC)
    except (ValueError, TypeError):
        return 0.0
    return max(0.0, wait.total_seconds())


def _detail(body: bytes) -> str:
    """Return the provider's error message as `: message`, or an empty string."""
    try:
        error = orjson.loads(body)
        error = error.get("error", error)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError):
        return ""
    return f": {' '.join(text.split())}" if isinstance(text, str) else ""
