"""Answers the requests of chat clients over HTTP, whole or as server-sent events.

    POST PATH/v1/chat/completions, PATH/v1/completions, PATH/v1/responses, PATH/v1/messages     GET PATH/v1/models

A session has a recorder, which answers, and limits. The owner of the sessions says which one a request belongs to: the
gateway has one for each episode, `rlsys serve` one for all its clients.

Invariants:
- No request gets an answer before its owner has found its session, and then of the recorder of this session only.
- A request whose client is gone is cancelled, and so is every request of a session that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rlsys.data.trajectory import Finish
from rlsys.errors import RunError, UserError
from rlsys.rollout.agent.chat_formats import FORMATS, MODEL, ChatCompletions, Format, SamplingRule, parsed
from rlsys.rollout.agent.chat_recorder import Asked, OnText, Refused, Reply
from rlsys.rollout.agent.conversation_tree import Message
from rlsys.rollout.agent.recorder import EpisodeOver, TurnSampling
from rlsys.rollout.agent.tokens import Codec
from rlsys.search.connections import EventStream

T = TypeVar("T")
MOST_BODY_BYTES = 16 << 20
BODY_S = 30.0
"""Time for a request body to arrive."""
MOST_CONNECTIONS = 4096
MOST_AT_ONCE = 32
"""Maximum number of requests of an episode that are read or answered at the same time."""
MOST_REFUSED = 1000
"""Number of refused requests of an episode after which every further one is refused unread."""


class Answering(Protocol):
    """Answers the requests of a session, such as a `ChatRecorder`."""

    codec: Codec
    sampling: TurnSampling
    counts: Counter[str]
    """Reason -> requests without an answer."""

    async def generate(self, asked: Asked, on_text: OnText | None = None) -> Reply:
        """Answer a request. Raises Refused, and RunError if the engine fails."""

    def refused(self, reason: str) -> None:
        """Count a request without an answer."""


@dataclass(eq=False)
class ChatSession:
    """Requests that belong together, as the server sees them."""

    recorder: Answering
    former: MutableMapping[str, Sequence[Message]] = field(default_factory=dict)
    """Id of an answer -> its messages, for requests that refer to an earlier answer."""
    most_at_once: int = MOST_AT_ONCE
    most_refused: int | None = MOST_REFUSED
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    inside: int = 0
    """Number of requests that are read or answered now, streams included."""
    failed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Fails when the session cannot go on."""

    @contextlib.contextmanager
    def entered(self) -> Generator[None, None, None]:
        """Count a request as inside. Raises Refused beyond the limits of the session."""
        if self.most_refused is not None and self.recorder.counts.total() >= self.most_refused:
            sentence = f"{self.most_refused} requests of this episode were refused: end the agent."
            raise Refused(sentence, status=429, code="too_many_refused")
        if self.inside >= self.most_at_once:
            sentence = f"{self.most_at_once} requests are answered already: wait for one of them."
            raise Refused(sentence, status=429, code="too_many_requests")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work`, which is cancelled if the session ends before it."""
        task = asyncio.ensure_future(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    def stream(self, reply: asyncio.Task[Reply]) -> None:
        """Count a request as inside until its reply is complete, also after its response has begun."""

        def leave(_: object) -> None:
            self.inside -= 1

        self.inside += 1
        reply.add_done_callback(leave)

    def fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def end(self) -> None:
        """Cancel all requests."""
        self.failed.cancel()
        if not self.failed.cancelled():
            self.failed.exception()  # Marks it as seen.
        for request in self.running:
            request.cancel()


Find = Callable[[Request, str], ChatSession]
"""(request, its key) -> its session. Raises Refused for a key that is not the session's."""
Answer = Callable[[Request, Any], Awaitable[Response]]
"""Answers a request of a session, which has the class that `Find` returns."""


def chat_app(find: Find, rule: SamplingRule, path: str = "", more: dict[str, Answer] | None = None) -> Starlette:
    """Return the application. `path` is the route before `/v1`; `more` has further answers to POST by their path."""
    posts = {name: guarded(find, _answering(form, rule), form) for name, form in FORMATS.items()}
    posts |= {name: guarded(find, answer) for name, answer in (more or {}).items()}
    routes = [Route(path + name, endpoint, methods=["POST"]) for name, endpoint in posts.items()]
    routes.append(Route(f"{path}/v1/models", guarded(find, _models), methods=["GET"]))
    known = ", ".join([*posts, "/v1/models"])

    async def unknown(request: Request, _: Exception) -> Response:
        sentence = f"{request.method} of this path is not offered: {known} are."
        return as_json(ChatCompletions.error(Refused(sentence, status=404, code="unknown_path")), 404)

    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})


def guarded(
    find: Find, answer: Answer, form: type[Format] = ChatCompletions
) -> Callable[[Request], Awaitable[Response]]:
    """Return `answer` as an endpoint, for requests of a session. Errors are written as `form` does."""

    async def endpoint(request: Request) -> Response:
        session = None
        try:
            session = find(request, _key_of(request))
            with session.entered():
                return await answer(request, session)
        except Refused as refusal:
            if session is not None:
                session.recorder.refused(refusal.code)
            return as_json(form.error(refusal), refusal.status)
        except Exception as error:  # A fault of this server; the client learns that there is one.
            if session is not None:
                session.fail(error)
            raise

    return endpoint


def _key_of(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    if not key:
        sentence = "The api_key is missing: send it as a bearer token or as x-api-key."
        raise Refused(sentence, status=401, code="invalid_api_key")
    return key


def _answering(form: type[Format], rule: SamplingRule) -> Answer:
    async def answer(request: Request, session: ChatSession) -> Response:
        recorder = session.recorder
        asked = parsed(form, await read_body(request), recorder.codec, recorder.sampling, rule)
        if asked.streams:
            return await _streamed(request, asked, session)
        return as_json(asked.written(await unless_gone(request, session.run(_reply(asked, session, None)))))

    return answer


async def _reply(asked: Format, session: ChatSession, on_text: Callable[[str], None] | None) -> Reply:
    """Return the engine's answer to a request. Raises Refused; if the engine fails, the session fails too."""
    request = replace(asked.asked(session.former), sampling=asked.sampling, id=asked.id)
    try:
        reply = await session.recorder.generate(request, None if request.tools else on_text)
    except (RunError, UserError) as error:
        session.fail(error)
        raise Refused("The engine has failed: the session is over.", status=503, code="engine_failed") from error
    except Refused as refusal:
        if refusal.code == "aborted":
            session.fail(EpisodeOver(Finish.ABORTED))
        raise
    session.former[asked.id] = (*request.messages, reply.message)
    return reply


async def unless_gone(request: Request, task: asyncio.Task[T]) -> T:
    """Return the result of `task`; cancel it if the client disconnects. Raises Refused then, and if the session ends."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused("The client has disconnected.", status=499, code="disconnected")
        return _result(task)
    finally:
        gone.cancel()
        await end_task(task)


async def _streamed(request: Request, asked: Format, session: ChatSession) -> Response:
    """Return the answer as events. The response begins with the first text, so that a refusal still has its status."""
    texts: asyncio.Queue[str | None] = asyncio.Queue()
    task = session.run(_reply(asked, session, texts.put_nowait))
    task.add_done_callback(lambda _: texts.put_nowait(None))
    try:
        first = await unless_gone(request, asyncio.ensure_future(texts.get()))
        if first is None and (task.cancelled() or task.exception() is not None):
            _result(task)
    except BaseException:
        await end_task(task)
        raise
    session.stream(task)
    return EventStream(_events(asked, session, task, first, texts))


async def _events(
    asked: Format, session: ChatSession, task: asyncio.Task[Reply], text: str | None, texts: asyncio.Queue[str | None]
) -> AsyncGenerator[str, None]:
    passed = 0
    try:
        for event in asked.begun():
            yield event
        while text is not None:
            for event in asked.more(text[passed:]):
                yield event
            passed = len(text)
            text = await texts.get()
        reply = _result(task)
        for event in asked.ended(reply, reply.message["content"][passed:]):
            yield event
    except Refused as refusal:  # The status is sent already: the error is the last event.
        session.recorder.refused(refusal.code)
        yield f"event: error\ndata: {json.dumps(asked.error(refusal))}\n\n"
    finally:
        if not task.done():
            session.recorder.refused("disconnected")
            await end_task(task)


def _result(task: asyncio.Task[T]) -> T:
    if task.cancelled():
        raise Refused("The session is over.", status=404, code="unknown_session")
    return task.result()


async def _disconnected(request: Request) -> None:
    """Wait until the client is gone. Requires that the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> bytes:
    """Read the body of a request. Raises Refused."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for block in request.stream():
                body += block
                if len(body) > MOST_BODY_BYTES:
                    raise Refused(f"The body has more than {MOST_BODY_BYTES} bytes.", status=413, code="too_large")
    except TimeoutError:
        raise Refused(f"The body did not arrive within {BODY_S:g} s.", status=408, code="timeout") from None
    except ClientDisconnect:
        raise Refused("The body is incomplete.", code="disconnected") from None
    return bytes(body)


async def _models(_: Request, session: ChatSession) -> Response:  # noqa: ARG001
    about = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlsys"}
    return as_json({"object": "list", "data": [about]})


def as_json(values: Any, status: int = 200) -> Response:
    """Write a response. The JSON is ASCII, which any text can be."""
    return Response(json.dumps(values), status, media_type="application/json")


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
