"""Asking a provider: keys, limits, pages of results, and what to do when it does not answer.

Invariants:
  - an outage never looks like an empty answer: `search` gives results or raises ProviderError;
  - keys come from the environment and leave it in requests to the provider only. They are added below
    httpx's client, which logs URLs at INFO and keeps requests in its errors, and redirects are not followed;
  - a busy provider (429, 5xx) or a lost connection is asked again, no earlier than it wants; a refusal
    (401, 403 and other 4xx) is not.
Proxies of the environment are not used, as everywhere in rlsys.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
import orjson
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential_jitter,
)

from rlsys.errors import RunError, UserError
from rlsys.search.body import BodyError, Encoding, read_body
from rlsys.search.web.providers import Answer, MalformedAnswer, Provider, Result

MAX_QUERY_CHARS = 400
MAX_QUERY_WORDS = 50
"""What every provider takes (Brave takes no more); longer queries are cut, as engines ignore the rest."""
_MAX_ANSWER_BYTES = 8 * 1024 * 1024
_MAX_REASON_CHARS = 400

Sleep = Callable[[float], Awaitable[None]]


class ProviderError(RunError):
    """A provider that gave no answer: one sentence, without keys."""


@dataclass(frozen=True, slots=True)
class ProviderLimits:
    """How much is asked of a provider, and for how long."""

    max_concurrent: int = 16
    """Requests in flight."""
    requests_per_second: float | None = None
    """Of the subscription; None where it has no such limit."""
    tries: int = 4
    try_timeout_s: float = 10.0
    timeout_s: float = 30.0
    """Of one request with all its tries and waits, without the wait for its turn."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "tries", "try_timeout_s", "timeout_s", "requests_per_second"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name} {value:g} is out of range: give more than 0")


@dataclass(frozen=True, slots=True)
class Keys:
    """The secrets of one provider, ready to be sent."""

    headers: Mapping[str, str] = field(repr=False)
    parameters: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, provider: Provider, environ: Mapping[str, str]) -> Keys:
        """Raises UserError that names the variable which is missing or cannot be a key."""
        found: dict[str, dict[str, str]] = {"header": {}, "parameter": {}}
        for credential in provider.credentials:
            value = environ.get(credential.variable, "").strip()
            if not value:
                raise UserError(
                    f"{credential.variable} is not set: web search by {provider.name} needs it in the environment"
                )
            if not (value.isascii() and value.isprintable()):
                raise UserError(f"{credential.variable} holds characters that no key has: set it to the key alone")
            found[credential.place][credential.name] = value
        return cls(found["header"], found["parameter"])

    def hidden_in(self, text: str) -> str:
        """`text` with every secret blotted out."""
        for secret in (*self.headers.values(), *self.parameters.values()):
            text = text.replace(secret, "***")
        return text


class ProviderClient:
    """A client of one provider, for one event loop.

    Args:
        endpoint: URL to ask in place of the provider's own: a compatible service, a test.
        sleep, now: the clock that waits are made by.
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
        self._endpoint = _address(endpoint or provider.endpoint)
        self._provider = provider
        self._keys = keys
        self._limits = limits or ProviderLimits()
        self._sleep = sleep
        self._turns = _Turns(self._limits.requests_per_second, sleep, now)
        self._slots = asyncio.Semaphore(self._limits.max_concurrent)
        connections = httpx.Limits(max_keepalive_connections=self._limits.max_concurrent)
        self._http = httpx.AsyncClient(
            transport=_KeyedTransport(keys, httpx.AsyncHTTPTransport(limits=connections, trust_env=False)),
            timeout=self._limits.try_timeout_s,
            headers={"Accept": "application/json", "Accept-Encoding": Encoding.gzip},
            trust_env=False,
        )

    async def search(self, query: str, count: int) -> list[Result]:
        """At most `count` distinct results: direct answers, then pages of results, then related questions.

        Costs a request for every `page_size` results that are wanted. A blank query is not sent. Raises
        ProviderError when the provider does not answer as it should.
        """
        query = _as_sent(query)
        if not query:
            return []
        size = min(count, self._provider.page_size)
        first = answer = await self._ask(query, size, 0)
        found: dict[str, Result] = {}
        _add(found, first.direct + first.organic)
        pages = min(math.ceil(count / size), self._provider.max_results // size)
        for page in range(1, pages):
            if len(found) >= count or not answer.more or not answer.organic:
                break
            answer = await self._ask(query, size, page)
            _add(found, answer.organic)
        _add(found, first.related)
        return list(found.values())[:count]

    async def close(self) -> None:
        """Give the connections back."""
        await self._http.aclose()

    async def _ask(self, query: str, count: int, page: int) -> Answer:
        """One page of results, with retries."""
        limits = self._limits
        failed: list[str] = []
        retrying = AsyncRetrying(
            stop=stop_after_attempt(limits.tries),
            wait=_wait_s,
            retry=retry_if_exception(lambda error: isinstance(error, _Again) and error.after_s < limits.timeout_s),
            before_sleep=lambda state: failed.append(str(state.outcome and state.outcome.exception())),
            sleep=self._pause,
            reraise=True,
        )
        async with self._slots:
            await self._turns.take()
            try:
                async with asyncio.timeout(limits.timeout_s):
                    return await retrying(self._try, self._provider.request(query, count, page))
            except TimeoutError:
                reason = "; ".join([f"no answer within {limits.timeout_s:g} s", *failed[-1:]])
            except (_Again, _RefusedByProvider) as error:
                reason = str(error)
        raise ProviderError(
            f"web search by {self._provider.name} failed: {self._keys.hidden_in(reason)[:_MAX_REASON_CHARS]}"
        )

    async def _pause(self, seconds: float) -> None:
        """The wait before a further try, which needs its turn as the first one did."""
        await self._sleep(seconds)
        await self._turns.take()

    async def _try(self, asked: dict[str, str | int]) -> Answer:
        as_json = self._provider.method == "POST"
        request = self._http.build_request(
            self._provider.method,
            self._endpoint if as_json else self._endpoint.copy_merge_params(asked),
            json=asked if as_json else None,
        )
        try:
            async with asyncio.timeout(self._limits.try_timeout_s):
                response = await self._http.send(request, stream=True)
                try:
                    body = await read_body(response.headers, response.aiter_raw(), _MAX_ANSWER_BYTES, Encoding.gzip)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise _Again(f"no answer within {self._limits.try_timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise _Again(f"{type(error).__name__} {error}".strip()) from None
        except BodyError as error:
            raise _RefusedByProvider(f"its answer is refused: {error}") from None
        return self._read(response, body)

    def _read(self, response: httpx.Response, body: bytes) -> Answer:
        status = response.status_code
        said = f"status {status}{_detail(body)}"
        if status == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
            raise _Again(said, _retry_after_s(response))
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            names = " and ".join(credential.variable for credential in self._provider.credentials)
            raise _RefusedByProvider(f"{said}; check the key and the quota of {names}")
        if not response.is_success:
            raise _RefusedByProvider(f"{said}; check the endpoint and the keys")
        try:
            return self._provider.parse(orjson.loads(body))
        except orjson.JSONDecodeError as error:
            raise _RefusedByProvider(f"its answer is not JSON ({error})") from None
        except MalformedAnswer as error:
            raise _RefusedByProvider(str(error)) from None


class _Again(Exception):
    """A try that failed where the next one may not."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class _RefusedByProvider(Exception):
    """A try that would fail again."""


class _KeyedTransport(httpx.AsyncBaseTransport):
    """Adds the keys where httpx's own log and errors do not see them."""

    def __init__(self, keys: Keys, inner: httpx.AsyncBaseTransport) -> None:
        self._keys = keys
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        headers = request.headers.copy()
        headers.update(self._keys.headers)
        keyed = httpx.Request(
            request.method,
            request.url.copy_merge_params(dict(self._keys.parameters)),
            headers=headers,
            stream=request.stream,
            extensions=request.extensions,
        )
        return await self._inner.handle_async_request(keyed)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Turns:
    """Spreads requests evenly: each takes the next free moment of a timetable."""

    def __init__(self, per_second: float | None, sleep: Sleep, now: Callable[[], float]) -> None:
        self._gap_s = 1 / per_second if per_second else 0.0
        self._sleep = sleep
        self._now = now
        self._next = 0.0

    async def take(self) -> None:
        if not self._gap_s:
            return
        now = self._now()
        mine = max(now, self._next)
        self._next = mine + self._gap_s
        if mine > now:
            await self._sleep(mine - now)


def _address(endpoint: str) -> httpx.URL:
    try:
        url = httpx.URL(endpoint)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise UserError(f"endpoint {endpoint!r} is not an address: write it like https://host/search")
    return url


def _add(found: dict[str, Result], results: Iterable[Result]) -> None:
    """Append those of `results` whose page is not among `found` yet."""
    for result in results:
        found.setdefault(result.url or result.snippet, result)


def _as_sent(query: str) -> str:
    """`query` in one line, without what UTF-8 cannot say, cut to what every provider takes."""
    words = query.encode("utf-8", "ignore").decode("utf-8").split()[:MAX_QUERY_WORDS]
    return " ".join(words)[:MAX_QUERY_CHARS].rstrip()


def _wait_s(state: RetryCallState) -> float:
    """The back-off before the next try, and no less than the provider asked for."""
    backoff_s = wait_exponential_jitter(multiplier=0.5, max=8.0, jitter=0.5)(state)
    error = state.outcome.exception() if state.outcome else None
    return max(backoff_s, error.after_s) if isinstance(error, _Again) else backoff_s


def _retry_after_s(response: httpx.Response) -> float:
    """Retry-After in seconds, from a number or a date; 0 where there is none."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        wait = parsedate_to_datetime(value) - datetime.now(UTC)
    except (ValueError, TypeError):
        return 0.0
    return max(0.0, wait.total_seconds())


def _detail(body: bytes) -> str:
    """The provider's own words about an error, where it gives them: `: ...`."""
    try:
        said = orjson.loads(body)
        error = said.get("error", said)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError):
        return ""
    return f": {' '.join(text.split())}" if isinstance(text, str) else ""
