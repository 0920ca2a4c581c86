"""An OpenAI-compatible chat endpoint as a judge needs it: one prompt in, one reply out, within limits.

Contract: `ask` returns what the model said, or raises RunError with one sentence once all tries have failed; it
never makes an answer up. No answer in time, 408, 409, 425, 429, 5xx and answers that are no chat completion, that
are compressed or that are larger than 4 MiB are tried again, after pauses that grow, are jittered and are no shorter than a Retry-After (of a minute at most).
Other statuses are not: they would come again. A cancelled `ask` ends its request and frees its place.

So one `ask` is over after `(retries + 1) * timeout_s + retries * 60` seconds at most, waits for a place and for
`requests_per_minute` not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential_jitter

from rlsys.config.schema import JudgeConfig
from rlsys.errors import RunError, UserError
from rlsys.search.body import BodyError, Encoding, read_body

_BUSY = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may be answered."""
_HINTS = {
    401: "check reward.judge.token_env",
    403: "check reward.judge.token_env",
    404: "check reward.judge.url, which ends in /v1, and reward.judge.model",
}
_MOST_ASKED_S = 60.0
"""Of a Retry-After that is heeded."""
_KEPT_ALIVE_S = 2.0
"""Of an idle connection: less than the 5 s after which uvicorn ends it, maybe under a request."""
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Largest answer: some hundred thousand tokens. httpx limits its headers to 100 KB."""
_QUOTED_CHARS = 200
_PAUSE = wait_exponential_jitter(max=30.0, jitter=0.5)


class ChatEndpoint:
    """A client for one event loop; `close` it at the end. `transport` takes the place of the network.

    Raises UserError where the variable of `token_env` is not set.
    """

    def __init__(self, config: JudgeConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = f"{(config.url or '').rstrip('/')}/chat/completions"
        self._model = config.model
        self._timeout_s = config.timeout_s
        self._tries = config.retries + 1
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._timetable = Timetable(config.requests_per_minute)
        self._http = httpx.AsyncClient(
            transport=transport,
            headers={"Accept-Encoding": Encoding.identity} | _authorization(config.token_env),
            timeout=None,  # that of httpx is for each read; `_try` bounds the whole
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_ALIVE_S),
            trust_env=False,
        )

    async def ask(self, prompt: str) -> str:
        """What the model replies to `prompt` at temperature 0; empty where it refused to say anything."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
        }
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._tries),
            wait=_pause_s,
            retry=retry_if_exception_type(_Again),
            sleep=asyncio.sleep,
            reraise=True,
        )
        async with self._places:
            try:
                return await retrying(self._try, body)
            except _Again as error:
                raise RunError(
                    f"the judge at {self._url} gave no answer in {self._tries} tries, the last time because of "
                    f"{error}: see that it runs, raise reward.judge.retries, or take judge out of reward.terms."
                ) from error

    async def close(self) -> None:
        """End the connections."""
        await self._http.aclose()

    async def _try(self, body: dict[str, Any]) -> str:
        await self._timetable.turn()
        request = self._http.build_request("POST", self._url, json=body)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.send(request, stream=True)
                try:
                    content = await read_body(response.headers, response.aiter_raw(), _MAX_ANSWER_BYTES)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise _Again(f"no answer within {self._timeout_s:g} s") from None
        except httpx.RequestError as error:
            raise _Again(f"{type(error).__name__} {error}".strip()) from error
        except BodyError as error:
            raise _Again(f"status {response.status_code} with an answer that is refused: {error}") from None
        status = response.status_code
        said = f"status {status} ({_one_line(content)})"
        if status in _BUSY or response.is_server_error:
            raise _Again(said, _retry_after_s(response))
        if not response.is_success:
            hint = _HINTS.get(status, "check the settings under reward.judge")
            raise RunError(f"the judge at {self._url} refuses to answer with {said}: {hint}.")
        return _reply(content)


class Timetable:
    """Spreads requests evenly: each takes the next free moment, so that no minute has more than `per_minute`."""

    def __init__(self, per_minute: int | None) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Wait for the caller's moment by the clock of the running loop."""
        now = asyncio.get_running_loop().time()
        moment = max(now, self._next)
        self._next = moment + self._gap_s
        await asyncio.sleep(moment - now)


class _Again(Exception):
    """A try that failed where the next one may not."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


def _authorization(token_env: str | None) -> dict[str, str]:
    if token_env is None:
        return {}
    token = os.environ.get(token_env, "").strip()
    if not (token and token.isascii() and token.isprintable()):
        raise UserError(
            f"reward.judge.token_env={token_env} is not set to plain text in the environment: export the endpoint's "
            f"key as {token_env}, or set reward.judge.token_env to null."
        )
    return {"Authorization": f"Bearer {token}"}


def _reply(content: bytes) -> str:
    """The text of a chat completion; null, which filters of content give, is an empty one."""
    try:
        said = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise _Again(f"an answer that is no chat completion ({_one_line(content)})") from None
    if said is not None and not isinstance(said, str):
        raise _Again(f"an answer whose content is {type(said).__name__}, not text")
    return said or ""


def _pause_s(state: RetryCallState) -> float:
    """The back-off before the next try, and no less than the endpoint asked for."""
    error = state.outcome.exception() if state.outcome else None
    asked_s = error.after_s if isinstance(error, _Again) else 0.0
    return max(_PAUSE(state), asked_s)


def _retry_after_s(response: httpx.Response) -> float:
    """Retry-After in seconds; 0 where there is none, or a date."""
    value = response.headers.get("retry-after", "").strip()
    return min(_MOST_ASKED_S, float(value)) if value.isdecimal() else 0.0


def _one_line(content: bytes) -> str:
    """The beginning of an answer."""
    text = content[: 8 * _QUOTED_CHARS].decode("utf-8", "replace")
    return " ".join(text.split())[:_QUOTED_CHARS] or "empty"
