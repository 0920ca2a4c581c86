"""Serves a policy to any client of OpenAI's and Anthropic's APIs, with the server of the gateway.

All clients have one key. A request whose messages extend a recent conversation continues the tokens of it, as in
training; the memory for these conversations is limited, and older ones are rendered anew. Nothing else is recorded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from hmac import compare_digest
from pathlib import Path
from secrets import token_urlsafe
from tempfile import TemporaryDirectory

from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request

from rlsys.apps.evaluation.evaluation_inputs import Model, as_hf
from rlsys.apps.evaluation.execution import open_codec, open_generator
from rlsys.config.schema import RunConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.errors import UserError
from rlsys.rollout.agent.chat_formats import MODEL, SamplingRule
from rlsys.rollout.agent.chat_recorder import Asked, ChatRecorder, OnText, Refused, Reply
from rlsys.rollout.agent.chat_server import MOST_CONNECTIONS, ChatSession, chat_app
from rlsys.rollout.agent.conversation_tree import Message, Recent, RecentAnswers
from rlsys.rollout.agent.episode import EngineDied
from rlsys.rollout.agent.recorder import Generator, TurnSampling, evaluation_sampling
from rlsys.rollout.agent.tokens import Codec
from rlsys.search.address import bind, url_of
from rlsys.search.connections import GuestServer, LimitedConfig

MOST_AT_ONCE = 256
"""Maximum number of requests that are read or answered at the same time."""
RECENT_BYTES = 256 << 20
"""Memory for conversations that requests may continue, and the same again for answers that they may name by id."""
_NONE = Question(uid="serve", prompt="", answers=())
_log = logging.getLogger(__name__)


class Recorders:
    """Answers each request with a recorder of its own, which continues recent conversations of all of them."""

    def __init__(
        self, generator: Generator, codec: Codec, task: TaskConfig, sampling: TurnSampling, recent_bytes: int
    ) -> None:
        self.codec, self.sampling = codec, sampling
        self.counts: Counter[str] = Counter()
        self.recent = RecentAnswers(recent_bytes)
        self._generator, self._task = generator, task

    async def generate(self, asked: Asked, on_text: OnText | None = None) -> Reply:
        """Answer a request; see `ChatRecorder.generate`."""
        recorder = ChatRecorder(_NONE, 0, self._generator, self.codec, self._task, self.sampling, self.recent)
        return await recorder.generate(asked, on_text)

    def refused(self, reason: str) -> None:
        """Count a request without an answer."""
        self.counts[reason] += 1


class Service(ChatSession):
    """All clients of a server. It ends with the engine alone; any other fault is the end of one request."""

    def fail(self, error: BaseException) -> None:
        """End the service if the engine has died."""
        if isinstance(error, EngineDied):
            super().fail(error)
        else:
            _log.error("a request has failed", exc_info=error)


def open_service(
    generator: Generator, codec: Codec, task: TaskConfig, sampling: TurnSampling, recent_bytes: int = RECENT_BYTES
) -> Service:
    """Return a service that answers with `generator`. Requires a running event loop."""
    former: Recent[str, Sequence[Message]] = Recent(recent_bytes, lambda messages: 2000 + 8 * len(json.dumps(messages)))
    recorders = Recorders(generator, codec, task, sampling, recent_bytes)
    return Service(recorders, former, most_at_once=MOST_AT_ONCE, most_refused=None)


def service_app(service: Service, key: str) -> Starlette:
    """Return the application of a service for clients that have `key`."""

    def find(_: Request, given: str) -> Service:
        if not compare_digest(key.encode(), given.encode("latin-1", "replace")):
            raise Refused("The api_key is wrong.", status=401, code="invalid_api_key")
        return service

    return chat_app(find, SamplingRule.asked)


async def serve(model: Model, config: RunConfig, engine: str, host: str, port: int, key: str | None) -> None:
    """Serve `model` until cancelled; port 0 takes a free one, and without a key one is made and printed.

    Raises UserError for a model, settings or an address that cannot be served, and RunError if the engine dies.
    """
    own_key = token_urlsafe(24) if key is None else _sound(key)
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bind(host, port))
        work = Path(stack.enter_context(TemporaryDirectory(prefix="rlsys-serve-")))
        with Console(stderr=True).status(f"loading the model and starting {engine}"):
            folder = stack.enter_context(as_hf(model, work, config.model.family))
            config = replace(config, model=replace(config.model, path=str(folder)))
            codec = open_codec(folder, str(model.folder))
            generator = await stack.enter_async_context(open_generator(config, engine))
        sampling = evaluation_sampling(config.rollout.sampling, config.eval.temperature, as_rollouts=False)
        service = open_service(generator, codec, config.task, sampling)
        options = {"log_level": "error", "lifespan": "off", "timeout_graceful_shutdown": 2}
        limited = LimitedConfig(service_app(service, own_key), MOST_CONNECTIONS, **options)
        address, number = sock.getsockname()[:2]
        if not ipaddress.ip_address(address).is_loopback:
            print("The key and all texts go over the network unencrypted.", file=sys.stderr)
        url, made = url_of(host, number), f", api_key {own_key}" if key is None else ""
        async with GuestServer(limited).serving(sock) as server:
            print(f"base_url {url}/v1 (Anthropic's SDK: {url}), model {MODEL}{made} (Ctrl-C ends it).", flush=True)
            try:
                await asyncio.wait({server, service.failed}, return_when=asyncio.FIRST_COMPLETED)
                if service.failed.done():
                    service.failed.result()
            finally:
                service.end()


def _sound(key: str) -> str:
    """Return a key that a header can carry. Raises UserError for any other."""
    if not key or not all("!" <= character <= "~" for character in key):
        sentence = "--key is empty or has a space or a character that a header cannot carry: use letters and digits."
        raise UserError(sentence, code="malformed" if key else "empty", key="--key")
    return key
