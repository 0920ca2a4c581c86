"""Asks a teacher's server for the log-probs of the tokens that the policy sampled (on-policy distillation).

A request has one sequence, as token ids, and `algorithm.teacher.max_concurrent` requests are in flight: the server
batches them, and can reuse the prompt that the episodes of a group share. `rlsys.orchestrator.endpoint` says what is
retried; a server that does not answer ends the run.

    sglang    POST /generate with `return_logprob`; `logprob_start_len` is the token before the first trained one
    openai    POST /completions with `echo` and `logprobs`; one generated token is discarded

A response must have one finite log-prob for each trained token and, from SGLang, the ids that were sent. Before a run
starts, `require_teacher` compares the text of tokens: a server with another tokenizer would score another text.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import numpy as np

from rlsys.config.algorithm import TeacherApi, TeacherConfig
from rlsys.config.derived import asks_teacher
from rlsys.config.schema import RunConfig
from rlsys.data.trajectory import Floats, Sample
from rlsys.errors import UserError
from rlsys.observe import status
from rlsys.observe.metrics import Metric
from rlsys.orchestrator.endpoint import Endpoint, EndpointSettings, beginning
from rlsys.search.web.loop import LoopThread

TEACHER_METRICS = (
    Metric("distillation/requests", "count", "requests to the teacher's server in this step, retries included"),
    Metric(
        "distillation/request_s",
        "s",
        "mean time of a sequence at the teacher's server, without waits for a place there; retries included",
    ),
)
_KEY = "algorithm.teacher"
_HINTS = {
    401: f"check {_KEY}.token_env",
    403: f"check {_KEY}.token_env",
    404: f"check {_KEY}.model, which ends in /v1 with api=openai, {_KEY}.api and served_model",
}
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Largest response body; servers take less than 200 bytes for a token."""
_PROBED_TOKENS = 200
"""Tokens whose text is compared before a run; a request of as many tokens fits any model."""
_UNKNOWN_TEXT = "\ufffd"
"""Text of a token that is only a part of a character; servers write it in several ways."""


class TeacherServer:
    """Client of the server at `algorithm.teacher.model`, for one event loop; call `close` at the end.

    `transport` replaces the network in tests. Raises UserError if the variable named by `token_env` is not set.
    """

    def __init__(self, config: TeacherConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        settings = EndpointSettings(
            who="the teacher",
            group=_KEY,
            timeout_s=config.timeout_s,
            retries=config.retries,
            max_concurrent=config.max_concurrent,
            max_answer_bytes=_MAX_ANSWER_BYTES,
            remedy=f"Check that it runs and returns log-probs of its input, or raise {_KEY}.retries or timeout_s.",
            hints=_HINTS,
            token_env=config.token_env,
        )
        self._openai, self._served_model = config.api is TeacherApi.openai, config.served_model
        path = "completions" if self._openai else "generate"
        self._endpoint = Endpoint(f"{(config.model or '').rstrip('/')}/{path}", settings, transport)
        self.finished = 0
        """Sequences scored so far."""
        self._before = (0, 0, 0.0)
        """Requests, sequences and seconds at the last `metrics`."""

    async def compute(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the teacher's log-probs [seq] of each sample's trained tokens; 0 elsewhere.

        Raises an exception group with a RunError if the server does not answer or its answers cannot be used.
        """
        branches = [sample.by_branch() for sample in samples]
        status.show(f"scores {status.count(sum(map(len, branches)), 'sequence')}", "teacher")
        async with asyncio.TaskGroup() as tasks:
            running = [[tasks.create_task(self._score(branch)) for branch in each] for each in branches]
        status.show("waits for rollouts", "teacher")
        return [np.concatenate([one.result() for one in each]) for each in running]

    def metrics(self) -> dict[str, float]:
        """Return requests, and mean seconds of a sequence, since the last call."""
        now = (self._endpoint.tries, self.finished, self._endpoint.seconds)
        tries, finished, seconds = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        return {
            "distillation/requests": tries,
            **({"distillation/request_s": seconds / finished} if finished else {}),
        }

    async def check(self, text_of: Callable[[int], str], vocabulary: int) -> None:
        """Raise UserError if the server's tokens have another text than the policy's.

        `text_of` decodes one token of the policy, whose tokenizer has `vocabulary` tokens. Raises RunError if the server
        does not answer.
        """
        tokens = sorted({*np.linspace(0, vocabulary - 1, _PROBED_TOKENS).astype(int).tolist()})
        _, texts = await self._ask(tokens, 1, with_text=True)
        for token, theirs in zip(tokens[1:], texts, strict=True):
            ours = text_of(token)
            if theirs is not None and _UNKNOWN_TEXT not in ours and _UNKNOWN_TEXT not in theirs and ours != theirs:
                server = self._endpoint.url.rpartition("/")[0]
                raise UserError(
                    f"{_KEY}.model={server} reads token {token} as {theirs[:40]!r}, and the policy as {ours[:40]!r}: serve a "
                    "teacher with the policy's tokenizer.",
                    code="mismatch",
                    key=f"{_KEY}.model",
                )

    async def close(self) -> None:
        await self._endpoint.close()

    async def _score(self, branch: Sample) -> Floats:
        """Return the log-probs [seq] of one sequence."""
        mask, found = branch.trajectory.loss_mask, np.zeros(len(branch.trajectory.tokens), dtype=np.float32)
        trained = np.flatnonzero(mask)
        if not trained.size:
            return found
        first, last = int(trained[0]), int(trained[-1])
        found[first : last + 1], _ = await self._ask(branch.trajectory.tokens[: last + 1].tolist(), first)
        found[~mask] = 0.0
        self.finished += 1
        return found

    async def _ask(
        self, tokens: Sequence[int], first: int, with_text: bool = False
    ) -> tuple[list[float], list[str | None]]:
        """Return the log-probs of `tokens` from index `first` on, at least 1, and their texts, None where unknown."""
        if self._openai:
            more = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
            body = {"model": self._served_model, "prompt": tokens, **more}
            return await self._endpoint.post(body, partial(of_completion, tokens=tokens, first=first))
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": first - 1,
            "return_text_in_logprobs": with_text,
        }
        return await self._endpoint.post(body, partial(of_generate, tokens=tokens, first=first))


def of_generate(content: bytes, tokens: Sequence[int], first: int) -> tuple[list[float], list[str | None]]:
    """Read SGLang's answer for `tokens`: log-probs and texts from index `first` on. Raises ValueError.

    An entry is (log-prob, id, text or null); the entries end with the last token. SGLang writes the id 0 for the last id
    of a vocabulary.
    """
    try:
        entries = json.loads(content)["meta_info"]["input_token_logprobs"][first - len(tokens) :]
        found = [(entry[0], entry[1], entry[2] if len(entry) > 2 else None) for entry in entries]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"an answer without log-probs of the input ({beginning(content)})") from None
    ids = [number for _, number, _ in found]
    if len(ids) != len(tokens) - first or any(
        id_ not in (token, 0) for id_, token in zip(ids, tokens[first:], strict=True)
    ):
        raise ValueError(f"log-probs of other tokens than were sent ({ids[:4]} instead of {list(tokens[first:][:4])})")
    return _finite([logprob for logprob, _, _ in found]), [
        text if isinstance(text, str) else None for *_, text in found
    ]


def of_completion(content: bytes, tokens: Sequence[int], first: int) -> tuple[list[float], list[str | None]]:
    """Read an OpenAI-compatible answer for the prompt `tokens`, as `of_generate` does. Raises ValueError."""
    try:
        answer = json.loads(content)["choices"][0]["logprobs"]
        logprobs, texts = answer["token_logprobs"], answer.get("tokens") or [None] * len(answer["token_logprobs"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"an answer without log-probs of the prompt ({beginning(content)})") from None
    if not isinstance(logprobs, list) or not isinstance(texts, list) or len(logprobs) - len(tokens) not in (0, 1):
        raise ValueError(f"log-probs of another number of tokens than {len(tokens)}, with one more generated")
    ends = slice(first, len(tokens))
    return _finite(logprobs[ends]), [text if isinstance(text, str) else None for text in texts[ends]]


def _finite(logprobs: Sequence[Any]) -> list[float]:
    for place, one in enumerate(logprobs):
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise ValueError(f"a log-prob that is not a finite number ({str(one)[:40]} at trained token {place})")
    return [float(one) for one in logprobs]


def teacher_server(config: RunConfig) -> TeacherServer | None:
    """Return the client of the teacher's server; None unless the teacher is behind an address."""
    return TeacherServer(config.algorithm.teacher) if asks_teacher(config.algorithm) else None


def require_teacher(config: RunConfig, tokenizer: Callable[[], Any]) -> None:
    """Check with one request that the teacher's server answers and has the policy's tokens; no-op without a server.

    `tokenizer` loads the policy's. Synchronous, and safe inside a running event loop (a notebook). Raises UserError and
    RunError as `TeacherServer.check` does.
    """
    if not asks_teacher(config.algorithm):
        return
    ours, settings = tokenizer(), replace(config.algorithm.teacher, retries=min(config.algorithm.teacher.retries, 1))

    async def ask() -> None:
        server = TeacherServer(settings)
        try:
            await server.check(lambda token: str(ours.decode([token], clean_up_tokenization_spaces=False)), len(ours))
        finally:
            await server.close()

    loop = LoopThread("teacher-check")
    try:
        loop.run(ask())
    finally:
        loop.abandon()
