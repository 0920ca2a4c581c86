"""The term `judge`: a language model says whether an answer means the same as an accepted one.

`Judge.grade` gives 1.0 or 0.0. No answer, or an empty one, is 0 and an exact match is 1; neither is asked. A
reply that is neither yes nor no is a refusal: 0, counted, and not kept. The same prompt is asked once, also by
episodes that ask at the same time. An endpoint that does not answer ends the run (RunError): a run must not train
on made-up zeros.

The answer is untrusted: the policy earns by what it makes the judge say. What is filled into the prompt is one
line of JSON in which quotes, line ends and `<` are escaped, so that it can neither end its quotation nor forge a
special token of the judge's chat template (`<|im_end|>`). That it may talk the judge round stays possible.
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
from rlsys.errors import RunError, UserError
from rlsys.files import parse_json
from rlsys.search.wire import BodyError, Encoding, read_body

_PLACEHOLDER = re.compile("|".join(map(re.escape, JUDGE_PLACEHOLDERS)))
_THOUGHT_END = "</think>"
"""What reasoning models put between their reasoning and their reply."""
_MARKER = "Question:"
"""What the question stands behind in the templates of Search-R1, RLinf and this project."""
_BUSY = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may be answered."""
_HINTS = {
    401: "check reward.judge.token_env",
    403: "check reward.judge.token_env",
    404: "check reward.judge.url, which ends in /v1, and reward.judge.model",
}
_MAX_RETRY_AFTER_S = 60.0
_KEPT_ALIVE_S = 2.0
"""Of an idle connection: less than the 5 s after which uvicorn ends it, maybe under a request."""
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Largest answer: some hundred thousand tokens. httpx limits its headers to 100 KB."""
_QUOTED_CHARS = 200
_PAUSE = wait_exponential_jitter(max=30.0, jitter=0.5)


class Judge:
    """A judge for one event loop; `close` it at the end. `transport` takes the place of the network.

    Raises UserError for a token or a file of verdicts that cannot be used.
    """

    def __init__(self, config: JudgeConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._config = config
        self._endpoint = ChatEndpoint(config, transport)
        self._verdicts = Verdicts(config.cache_path)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._counts: Counter[str] = Counter()
        """Questions asked, cached, refused and answered with yes since the last metrics."""
        self._seconds = 0.0

    async def grade(self, question: Question, answer: str | None) -> float:
        """1.0 for an answer that means the same as an accepted one. Raises RunError, see the module."""
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
        """Since the last call: counts, the share of yes among verdicts, and seconds of a question, if there were any."""
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
        """End the connections and close the file of verdicts."""
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
    """`prompt` with its placeholders filled in, each once: what is filled in is not looked through again."""
    values = {
        "{question}": question.prompt.rpartition(_MARKER)[2].strip(),
        "{answers}": list(question.answers),
        "{answer}": answer,
    }
    return _PLACEHOLDER.sub(lambda found: _quoted(values[found.group()]), prompt)


def verdict_of(reply: str) -> bool | None:
    """The verdict of a reply that begins with yes or no, and does not go on to say the other one; None of others."""
    words = re.findall(r"[a-z]+", reply.lower().rpartition(_THOUGHT_END)[2])
    said = {"yes", "no"} & set(words)
    return words[0] == "yes" if words[:1] and said == {words[0]} else None


def _quoted(value: Any) -> str:
    """`value` as one line of JSON without any `<`; what UTF-8 cannot say becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
    return text.encode("utf-8", "replace").decode("utf-8")


def key_of(model: str, prompt: str) -> str:
    """What a verdict is kept by: SHA-256 of the model's name and all that it was asked, in hex."""
    return hashlib.sha256(json.dumps([model, prompt]).encode()).hexdigest()


class Verdicts:
    """Verdicts by key, in memory and, where a path is given, in a file that is kept over runs. `close` it at the end.

    The file is jsonl, one `{"key": HEX, "yes": BOOL}` a line, and is only ever appended to, each line by one write:
    several runs may share it on a local disk. A line that cannot be read (a writer was killed, a disk was full) is
    left out and costs one question; where two lines contradict each other the later one holds. Raises UserError for a
    file that cannot be used.
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
            self._append(b"\n")  # or the next verdict would join the line that was cut off

    def get(self, key: str) -> bool | None:
        """The verdict, or None where there is none."""
        return self._known.get(key)

    def put(self, key: str, verdict: bool) -> None:
        """Keep a verdict. Raises RunError where the file cannot take it."""
        self._known[key] = verdict
        self._append(json.dumps({"key": key, "yes": verdict}).encode() + b"\n")

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            whole = os.write(self._file, line) == len(line)
        except OSError as error:
            raise RunError(f"reward.judge.cache_path={self._path} cannot be written: {error.strerror}.") from error
        if not whole:
            raise RunError(f"reward.judge.cache_path={self._path} cannot be written: its disk is full.")


class ChatEndpoint:
    """A client of an OpenAI-compatible chat endpoint, for one event loop; `close` it at the end.

    `ask` returns what the model said, or raises RunError with one sentence once all tries have failed; it never makes
    an answer up. No answer in time, 408, 409, 425, 429, 5xx and answers that are no chat completion, that are
    compressed or that are larger than 4 MiB are tried again, after pauses that grow, are jittered and are no shorter
    than a Retry-After (of a minute at most). Other statuses are not: they would come again. A cancelled `ask` ends its
    request and frees its place. So one `ask` is over after `(retries + 1) * timeout_s + retries * 60` seconds at most,
    waits for a place and for `requests_per_minute` not counted.

    `transport` takes the place of the network. Raises UserError where the variable of `token_env` is not set.
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
            timeout=None,  # that of httpx is for each read; `_try` bounds the whole
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_ALIVE_S),
            trust_env=False,
        )

    async def ask(self, prompt: str) -> str:
        """The model's reply to `prompt` at temperature 0; empty where it refused to say anything."""
        body = {"model": self._model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
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

    async def _wait_for_turn(self) -> None:
        """Take the next free moment, so that no minute has more than `requests_per_minute`, by the loop's clock."""
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
            raise _Again(f"no answer within {self._timeout_s:g} s") from None
        except httpx.RequestError as error:
            raise _Again(f"{type(error).__name__} {error}".strip()) from error
        except BodyError as error:
            raise _Again(f"status {response.status_code} with an answer that is refused: {error}") from None
        status = response.status_code
        said = f"status {status} ({_beginning(content)})"
        if status in _BUSY or response.is_server_error:
            retry_after = response.headers.get("retry-after", "").strip()  # In seconds; a date is not heeded.
            raise _Again(said, min(_MAX_RETRY_AFTER_S, float(retry_after)) if retry_after.isdecimal() else 0.0)
        if not response.is_success:
            hint = _HINTS.get(status, "check the settings under reward.judge")
            raise RunError(f"the judge at {self._url} refuses to answer with {said}: {hint}.")
        return _reply(content)


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
            f"key as {token_env}, or set reward.judge.token_env to null.",
            code="malformed" if token else "missing",
            key="reward.judge.token_env",
        )
    return {"Authorization": f"Bearer {token}"}


def _reply(content: bytes) -> str:
    """The text of a chat completion; null, which filters of content give, is an empty one."""
    try:
        said = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise _Again(f"an answer that is no chat completion ({_beginning(content)})") from None
    if said is not None and not isinstance(said, str):
        raise _Again(f"an answer whose content is {type(said).__name__}, not text")
    return said or ""


def _pause_s(state: RetryCallState) -> float:
    """The back-off before the next try, and no less than the endpoint asked for."""
    error = state.outcome.exception() if state.outcome else None
    return max(_PAUSE(state), error.after_s if isinstance(error, _Again) else 0.0)


def _beginning(content: bytes) -> str:
    """The beginning of an answer, on one line."""
    text = content[: 8 * _QUOTED_CHARS].decode("utf-8", "replace")
    return " ".join(text.split())[:_QUOTED_CHARS] or "empty"
