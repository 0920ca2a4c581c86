"""Reward term `judge`: a language model decides if an answer means the same as an accepted answer.

    no answer, or an empty answer    0.0 without a request.
    exact match                      1.0 without a request.
    reply "yes" / "no"               1.0 / 0.0, and cached.
    any other reply (a refusal)      0.0, counted, not cached.
    no response after all retries    RunError: the run must not train on invented zeros.

Concurrent episodes with the same prompt share one request.

The answer is untrusted, because the policy earns reward by influencing the judge. Values are inserted into the prompt
as one line of JSON with quotes, line ends and `<` escaped. They therefore cannot end their quotation or forge a special
token of the judge's chat template (`<|im_end|>`). An answer can still persuade the judge.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential_jitter

from rlsys.config.schema import JUDGE_PLACEHOLDERS, JudgeConfig
from rlsys.data.answers import exact_match
from rlsys.data.question import Question
from rlsys.errors import RunError, UserError, disk_error
from rlsys.files import parse_json
from rlsys.observe.metrics import Metric
from rlsys.search.wire import BodyError, Encoding, read_body

JUDGE_METRICS = (
    Metric("judge/asked", "count", "answers that the judge graded in this step"),
    Metric("judge/cached", "count", "answers with a cached verdict"),
    Metric("judge/refused", "count", "answers without a verdict, which count as wrong"),
    Metric("judge/yes_share", "share", "verdicts that are yes"),
    Metric("judge/seconds", "s", "mean time of a verdict"),
)
_PLACEHOLDER = re.compile("|".join(map(re.escape, JUDGE_PLACEHOLDERS)))
_THOUGHT_END = "</think>"
"""Separator between reasoning and reply of reasoning models."""
_MARKER = "Question:"
"""Text before the question in the prompt templates of Search-R1, RLinf and this project."""
_BUSY = (408, 409, 425, 429)
"""HTTP statuses below 500 that are retried."""
_HINTS = {
    401: "check reward.judge.token_env",
    403: "check reward.judge.token_env",
    404: "check reward.judge.url, which ends in /v1, and reward.judge.model",
}
_MAX_RETRY_AFTER_S = 60.0
_KEPT_ALIVE_S = 2.0
"""Idle time after which a connection is closed. It is below the idle limit of servers (uvicorn: 5 s), because a server
that closes a connection may cut off a request."""
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Largest response body, enough for some hundred thousand tokens. httpx limits headers to 100 KB."""
_QUOTED_CHARS = 200
_PAUSE = wait_exponential_jitter(max=30.0, jitter=0.5)


class Judge:
    """Grades answers on one event loop; call `close` at the end. `transport` replaces the network in tests.

    Raises UserError if the token or the verdict file cannot be used.
    """

    def __init__(self, config: JudgeConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._config = config
        self._endpoint = ChatEndpoint(config, transport)
        self._verdicts = Verdicts(config.cache_path)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._counts: Counter[str] = Counter()
        """Verdicts since the last `metrics`: asked, cached, refused and yes."""
        self._seconds = 0.0

    async def grade(self, question: Question, answer: str | None) -> float:
        """Return 1.0 if `answer` means the same as an accepted one, else 0.0. Raises RunError if no response comes."""
        if answer is None:
            return 0.0
        if exact_match(answer, question.answers):
            return 1.0
        if not answer:
            return 0.0
        prompt = fill(self._config.prompt, question, answer)
        key = key_of(self._config.model, prompt)
        async with self._asking.setdefault(key, asyncio.Lock()):
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._counts["cached"] += 1
            else:
                verdict = await self._ask(key, prompt)
        self._counts["yes"] += bool(verdict)
        return float(bool(verdict))

    def metrics(self) -> dict[str, float]:
        """Return counts, the share of yes verdicts, and mean seconds per request, since the last call."""
        counts, seconds = self._counts, self._seconds
        self._counts, self._seconds = Counter(), 0.0
        verdicts = counts["asked"] + counts["cached"] - counts["refused"]
        return {
            "judge/asked": counts["asked"],
            "judge/cached": counts["cached"],
            "judge/refused": counts["refused"],
            **({"judge/yes_share": counts["yes"] / verdicts} if verdicts else {}),
            **({"judge/seconds": seconds / counts["asked"]} if counts["asked"] else {}),
        }

    async def close(self) -> None:
        """Close the connections and the verdict file."""
        await self._endpoint.close()
        self._verdicts.close()

    async def _ask(self, key: str, prompt: str) -> bool | None:
        clock = asyncio.get_running_loop()
        started = clock.time()
        verdict = verdict_of(await self._endpoint.ask(prompt))
        self._seconds += clock.time() - started
        self._counts["asked"] += 1
        if verdict is None:
            self._counts["refused"] += 1
        else:
            self._verdicts.put(key, verdict)
        return verdict


def fill(prompt: str, question: Question, answer: str) -> str:
    """Return `prompt` with its placeholders replaced in one pass: placeholders within inserted values stay."""
    values = {
        "{question}": question.prompt.rpartition(_MARKER)[2].strip(),
        "{answers}": list(question.answers),
        "{answer}": answer,
    }
    return _PLACEHOLDER.sub(lambda found: _quoted(values[found.group()]), prompt)


def verdict_of(reply: str) -> bool | None:
    """Return the verdict of a reply that starts with yes or no and does not contain the other word, else None."""
    words = re.findall(r"[a-z]+", reply.lower().rpartition(_THOUGHT_END)[2])
    said = {"yes", "no"} & set(words)
    return words[0] == "yes" if words[:1] and said == {words[0]} else None


def _quoted(value: Any) -> str:
    """Return `value` as a line of JSON with `<` escaped; characters that UTF-8 cannot encode become question marks."""
    text = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
    return text.encode("utf-8", "replace").decode("utf-8")


def key_of(model: str, prompt: str) -> str:
    """Return the cache key of a verdict: SHA-256 of the model name and the prompt, in hex."""
    return hashlib.sha256(json.dumps([model, prompt]).encode()).hexdigest()


class Verdicts:
    """Caches verdicts in memory and, given a path, in a file that outlives the run. Call `close` at the end.

    The file is append-only JSON lines (`{"key": HEX, "yes": BOOL}`). Each line is a single write, so several runs may
    share the file on a local disk. Unreadable lines (killed writer, full disk) are skipped and cost one request each.
    For a repeated key the last line counts. Raises UserError if the file cannot be used.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._known: dict[str, bool] = {}
        self._file: int | None = None
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(
                f"reward.judge.cache_path={path} cannot be used ({error.strerror}): give a file in a folder that can "
                "be written, or null.",
                code="not_found" if isinstance(error, FileNotFoundError) else "denied",
                key="reward.judge.cache_path",
            ) from error
        for line in content.splitlines():
            try:
                match parse_json(line):
                    case {"key": str(key), "yes": bool(verdict)}:
                        self._known[key] = verdict
            except ValueError:
                continue
        if content and not content.endswith(b"\n"):
            self._append(b"\n")  # End a truncated line before the next verdict.

    def get(self, key: str) -> bool | None:
        """Return the verdict, None if unknown."""
        return self._known.get(key)

    def put(self, key: str, verdict: bool) -> None:
        """Store a verdict. Raises RunError if it cannot be written to the file."""
        self._known[key] = verdict
        self._append(json.dumps({"key": key, "yes": verdict}).encode() + b"\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            whole = os.write(self._file, line) == len(line)
        except OSError as error:
            raise disk_error(error, f"reward.judge.cache_path={self._path}") from error
        if not whole:
            raise RunError(
                f"reward.judge.cache_path={self._path} cannot be written: free some space on its disk.", code="no_room"
            )


class ChatEndpoint:
    """Client of an OpenAI-compatible chat endpoint, for one event loop; call `close` at the end.

        retried      time-out, connection error, 408, 409, 425, 429, 5xx, and a body that is not a chat completion, is
                     compressed or exceeds 4 MiB
        not retried  other statuses: RunError at once

    Retries pause with exponential back-off and jitter, but at least as long as the Retry-After header demands (capped
    at 60 s). A cancelled `ask` ends its request and frees its slot. One `ask` lasts at most
    `(retries + 1) * timeout_s + retries * 60` seconds, plus the waits for a slot and for `requests_per_minute`.

    `transport` replaces the network in tests. Raises UserError if the variable named by `token_env` is not set.
    """

    def __init__(self, config: JudgeConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = f"{(config.url or '').rstrip('/')}/chat/completions"
        self._model = config.model
        self._timeout_s = config.timeout_s
        self._tries = config.retries + 1
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._gap_s = 60.0 / config.requests_per_minute if config.requests_per_minute else 0.0
        self._next_turn = 0.0
        self._http = httpx.AsyncClient(
            transport=transport,
            headers={"Accept-Encoding": Encoding.identity} | _authorization(config.token_env),
            timeout=None,  # httpx would limit only each read; `_try` limits the whole request.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_ALIVE_S),
            trust_env=False,
        )

    async def ask(self, prompt: str) -> str:
        """Return the reply to `prompt` at temperature 0; empty if the content is null.

        Raises RunError once all tries have failed, or on a status that is not retried.
        """
        body = {"model": self._model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._tries),
            wait=_pause_s,
            retry=retry_if_exception_type(_RetryableError),
            sleep=asyncio.sleep,
            reraise=True,
        )
        async with self._places:
            try:
                return await retrying(self._try, body)
            except _RetryableError as error:
                raise RunError(
                    f"the judge at {self._url} gave no usable answer in {self._tries} attempts; the last failure was: "
                    f"{error}. Check that it runs, raise reward.judge.retries, or remove judge from reward.terms."
                ) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _wait_for_turn(self) -> None:
        """Block until the next free slot of the rate limit `requests_per_minute`."""
        now = asyncio.get_running_loop().time()
        moment = max(now, self._next_turn)
        self._next_turn = moment + self._gap_s
        await asyncio.sleep(moment - now)

    async def _try(self, body: dict[str, Any]) -> str:
        await self._wait_for_turn()
        request = self._http.build_request("POST", self._url, json=body)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.send(request, stream=True)
                try:
                    content = await read_body(response.headers, response.aiter_raw(), _MAX_ANSWER_BYTES)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise _RetryableError(f"no answer within {self._timeout_s:g} s") from None
        except httpx.RequestError as error:
            raise _RetryableError(f"{type(error).__name__} {error}".strip()) from error
        except BodyError as error:
            raise _RetryableError(f"status {response.status_code} with an unusable response: {error}") from None
        status = response.status_code
        said = f"status {status} ({_beginning(content)})"
        if status in _BUSY or response.is_server_error:
            retry_after = response.headers.get("retry-after", "").strip()  # In seconds; dates are ignored.
            raise _RetryableError(said, min(_MAX_RETRY_AFTER_S, float(retry_after)) if retry_after.isdecimal() else 0.0)
        if not response.is_success:
            hint = _HINTS.get(status, "check the settings under reward.judge")
            raise RunError(f"the judge at {self._url} responded with {said}: {hint}.")
        return _reply(content)


class _RetryableError(Exception):
    """Raised for a failed attempt that may succeed when repeated."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


def _authorization(token_env: str | None) -> dict[str, str]:
    if token_env is None:
        return {}
    token = os.environ.get(token_env, "").strip()
    if not (token and token.isascii() and token.isprintable()):
        fault = "has characters that are not printable ASCII" if token else "is not set"
        raise UserError(
            f"reward.judge.token_env={token_env} names an environment variable that {fault}: export the endpoint's "
            f"key as {token_env}, or set reward.judge.token_env to null.",
            code="malformed" if token else "missing",
            key="reward.judge.token_env",
        )
    return {"Authorization": f"Bearer {token}"}


def _reply(content: bytes) -> str:
    """Return the text of a chat completion; empty for null, which content filters return."""
    try:
        said = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise _RetryableError(f"an answer that is not a chat completion ({_beginning(content)})") from None
    if said is not None and not isinstance(said, str):
        raise _RetryableError(f"an answer whose content is {type(said).__name__}, not text")
    return said or ""


def _pause_s(state: RetryCallState) -> float:
    """Return the pause before the next try: the back-off, but at least the time in Retry-After."""
    error = state.outcome.exception() if state.outcome else None
    return max(_PAUSE(state), error.after_s if isinstance(error, _RetryableError) else 0.0)


def _beginning(content: bytes) -> str:
    """Return the beginning of a response body, on one line."""
    text = content[: 8 * _QUOTED_CHARS].decode("utf-8", "replace")
    return " ".join(text.split())[:_QUOTED_CHARS] or "empty"
