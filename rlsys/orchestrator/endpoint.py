"""Client of a JSON endpoint over HTTP, such as a judge's or a teacher's: limits, retries, and what is an error.

    retried      time-out, connection error, 408, 409, 425, 429, 5xx, and a body that cannot be used: it is compressed,
                 is too long, or is not what was asked for
    not retried  other statuses: RunError at once

Retries pause with exponential back-off and jitter, but at least as long as the Retry-After header demands (capped at
60 s). A cancelled request frees its slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential_jitter

from rlsys.config.problems import token_of
from rlsys.errors import RunError
from rlsys.search.wire import BodyError, Encoding, read_body

T = TypeVar("T")
MAX_RETRY_AFTER_S = 60.0
_BUSY = (408, 409, 425, 429)
"""HTTP statuses below 500 that are retried."""
_KEPT_ALIVE_S = 2.0
"""Idle time after which a connection is closed. It is below the idle limit of servers (uvicorn: 5 s), because a server
that closes a connection may cut off a request."""
_QUOTED_CHARS = 200
_PAUSE = wait_exponential_jitter(max=30.0, jitter=0.5)


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Limits of an endpoint, and its names in messages."""

    who: str
    """Name in messages, such as "the judge"."""
    group: str
    """Group of configuration keys, such as "reward.judge"."""
    timeout_s: float
    retries: int
    max_concurrent: int
    max_answer_bytes: int
    """Largest response body. httpx limits headers to 100 KB."""
    remedy: str
    """Advice if all tries fail, as the end of a sentence."""
    hints: Mapping[int, str]
    """HTTP status -> remedy."""
    token_env: str | None = None
    """Environment variable with the API key; None sends none."""
    requests_per_minute: int | None = None


def longest_s(timeout_s: float, retries: int) -> float:
    """Return the longest time of one request with its retries, without waits for a slot or a rate limit."""
    return (retries + 1) * timeout_s + retries * MAX_RETRY_AFTER_S


class Endpoint:
    """Sends JSON to one URL, for one event loop; call `close` at the end.

    `transport` replaces the network in tests. Raises UserError if the variable named by `token_env` is not set.
    """

    def __init__(self, url: str, settings: EndpointSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url, self._settings = url, settings
        self.tries = 0
        """Requests sent so far, retries included."""
        self.seconds = 0.0
        """Time of these requests, without waits for a place, for the rate limit, and before a retry."""
        self._places = asyncio.Semaphore(settings.max_concurrent)
        self._gap_s = 60.0 / settings.requests_per_minute if settings.requests_per_minute else 0.0
        self._next_turn = 0.0
        token = token_of(f"{settings.group}.token_env", settings.token_env)
        self._http = httpx.AsyncClient(
            transport=transport,
            headers={"Accept-Encoding": Encoding.identity, **({"Authorization": f"Bearer {token}"} if token else {})},
            timeout=None,  # httpx would limit only each read; `_try` limits the whole request.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_ALIVE_S),
            trust_env=False,
        )

    async def post(self, body: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        """Send `body` and return what `read` makes of the response, in which it raises ValueError if it cannot.

        Raises RunError once all tries have failed, or on a status that is not retried.
        """
        tries = self._settings.retries + 1
        retrying = AsyncRetrying(
            stop=stop_after_attempt(tries),
            wait=_pause_s,
            retry=retry_if_exception_type(_RetryableError),
            sleep=asyncio.sleep,
            reraise=True,
        )
        async with self._places:
            try:
                return await retrying(self._try, body, read)
            except _RetryableError as error:
                raise RunError(
                    f"{self._settings.who} at {self.url} gave no usable answer in {tries} attempts; the last failure was: "
                    f"{error}. {self._settings.remedy}",
                    code="unreachable",
                ) from error

    async def close(self) -> None:
        await self._http.aclose()

    async def _wait_for_turn(self) -> None:
        """Block until the next free slot of the rate limit `requests_per_minute`."""
        now = asyncio.get_running_loop().time()
        moment = max(now, self._next_turn)
        self._next_turn = moment + self._gap_s
        await asyncio.sleep(moment - now)

    async def _try(self, body: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        await self._wait_for_turn()
        self.tries += 1
        settings, request = self._settings, self._http.build_request("POST", self.url, json=body)
        clock = asyncio.get_running_loop()
        started = clock.time()
        try:
            async with asyncio.timeout(settings.timeout_s):
                response = await self._http.send(request, stream=True)
                try:
                    content = await read_body(response.headers, response.aiter_raw(), settings.max_answer_bytes)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise _RetryableError(f"no answer within {settings.timeout_s:g} s") from None
        except httpx.RequestError as error:
            raise _RetryableError(f"{type(error).__name__} {error}".strip()) from error
        except BodyError as error:
            raise _RetryableError(f"status {response.status_code} with an unusable response: {error}") from None
        finally:
            self.seconds += clock.time() - started
        status = response.status_code
        said = f"status {status} ({beginning(content)})"
        if status in _BUSY or response.is_server_error:
            retry_after = response.headers.get("retry-after", "").strip()  # In seconds; dates are ignored.
            raise _RetryableError(said, min(MAX_RETRY_AFTER_S, float(retry_after)) if retry_after.isdecimal() else 0.0)
        if not response.is_success:
            hint = settings.hints.get(status, f"check the settings under {settings.group}")
            raise RunError(f"{settings.who} at {self.url} responded with {said}: {hint}.")
        try:
            return read(content)
        except ValueError as error:
            raise _RetryableError(str(error)) from error


class _RetryableError(Exception):
    """Raised for a failed attempt that may succeed when repeated."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


def _pause_s(state: RetryCallState) -> float:
    """Return the pause before the next try: the back-off, but at least the time in Retry-After."""
    error = state.outcome.exception() if state.outcome else None
    return max(_PAUSE(state), error.after_s if isinstance(error, _RetryableError) else 0.0)


def beginning(content: bytes) -> str:
    """Return the beginning of a response body, on one line."""
    text = content[: 8 * _QUOTED_CHARS].decode("utf-8", "replace")
    return " ".join(text.split())[:_QUOTED_CHARS] or "empty"
