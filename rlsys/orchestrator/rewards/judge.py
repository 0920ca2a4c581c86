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

from rlsys.config.schema import JUDGE_PLACEHOLDERS, JudgeConfig
from rlsys.data.answers import exact_match
from rlsys.data.question import Question
from rlsys.errors import RunError, UserError, disk_error
from rlsys.files import parse_json
from rlsys.observe.metrics import Metric
from rlsys.orchestrator.endpoint import Endpoint, EndpointSettings, beginning

JUDGE_METRICS = (
    Metric("judge/asked", "count", "answers that the judge graded in this step"),
    Metric("judge/cached", "count", "answers with a cached verdict"),
    Metric("judge/refused", "count", "answers without a verdict, which count as wrong"),
    Metric("judge/yes_share", "share", "verdicts that are yes"),
    Metric(
        "judge/seconds", "s", "mean time of a verdict at the judge, without waits for a place there; retries included"
    ),
)
_PLACEHOLDER = re.compile("|".join(map(re.escape, JUDGE_PLACEHOLDERS)))
_THOUGHT_END = "</think>"
"""Separator between reasoning and reply of reasoning models."""
_MARKER = "Question:"
"""Text before the question in the prompt templates of Search-R1, RLinf and this project."""
_HINTS = {
    401: "check reward.judge.token_env",
    403: "check reward.judge.token_env",
    404: "check reward.judge.url, which ends in /v1, and reward.judge.model",
}
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Largest response body, enough for some hundred thousand tokens."""


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
        """Seconds of the requests until the last `metrics`."""

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
        """Return counts, the share of yes verdicts, and mean seconds per verdict, since the last call."""
        counts, seconds = self._counts, self._endpoint.seconds - self._seconds
        self._counts, self._seconds = Counter(), self._endpoint.seconds
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
        verdict = verdict_of(await self._endpoint.ask(prompt))
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

    `rlsys.orchestrator.endpoint` says what is retried. `transport` replaces the network in tests. Raises UserError if the
    variable named by `token_env` is not set.
    """

    def __init__(self, config: JudgeConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._model = config.model
        settings = EndpointSettings(
            who="the judge",
            group="reward.judge",
            timeout_s=config.timeout_s,
            retries=config.retries,
            max_concurrent=config.max_concurrent,
            max_answer_bytes=_MAX_ANSWER_BYTES,
            remedy="Check that it runs, raise reward.judge.retries, or remove judge from reward.terms.",
            hints=_HINTS,
            token_env=config.token_env,
            requests_per_minute=config.requests_per_minute,
        )
        self._endpoint = Endpoint(f"{(config.url or '').rstrip('/')}/chat/completions", settings, transport)

    @property
    def seconds(self) -> float:
        """Time of all requests, as `Endpoint.seconds`."""
        return self._endpoint.seconds

    async def ask(self, prompt: str) -> str:
        """Return the reply to `prompt` at temperature 0; empty if the content is null.

        Raises RunError once all tries have failed, or on a status that is not retried.
        """
        body = {"model": self._model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        return await self._endpoint.post(body, _reply)

    async def close(self) -> None:
        await self._endpoint.close()


def _reply(content: bytes) -> str:
    """Return the text of a chat completion; empty for null, which content filters return. Raises ValueError."""
    try:
        said = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise ValueError(f"an answer that is not a chat completion ({beginning(content)})") from None
    if said is not None and not isinstance(said, str):
        raise ValueError(f"an answer whose content is {type(said).__name__}, not text")
    return said or ""
