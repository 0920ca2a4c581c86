"""Plays an episode by any agent that speaks an OpenAI or Anthropic API: token in, token out.

    POST /SESSION/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages     GET /SESSION/v1/models
    POST /SESSION/v1/search   {"query": "..."} -> {"result": "..."}, the run's search

The server (`chat_server`) listens on loopback, in the process and on the event loop of the engine. Each episode is a
session with a path and a key of its own. The agent is a function or a command, and begins with the question, the
session's `base_url` and its `api_key`.

Invariants:
- A request reaches the recorder of its own session only. A request without a key gets 401; a wrong key, the key of
  another session and a session that is over get 404.
- When an episode ends, in whatever way, its session is closed first: its running requests are cancelled, and later ones
  get 404. A command is killed with its children. A plain function cannot be ended: its thread is left behind.
- Code of the agent never runs on the event loop of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from math import isfinite
from secrets import token_urlsafe
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from rlsys.components import check_callable, import_component, one_line
from rlsys.config.schema import BranchCredit, GatewayAgent, TaskConfig, TokenMode
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish
from rlsys.errors import UserError
from rlsys.rollout.agent.chat_formats import MODEL, SamplingRule
from rlsys.rollout.agent.chat_recorder import ChatRecorder, Refused
from rlsys.rollout.agent.chat_server import (
    MOST_CONNECTIONS,
    ChatSession,
    as_json,
    chat_app,
    end_task,
    read_body,
    unless_gone,
)
from rlsys.rollout.agent.recorder import EpisodeOver
from rlsys.rollout.agent.tokens import encodable
from rlsys.rollout.tools.calls import Toolbox, render_result, within
from rlsys.search.address import bind
from rlsys.search.connections import GuestServer, LimitedConfig
from rlsys.search.retrieval import SearchFailed
from rlsys.search.web.loop import LoopThread

AGENT = "agent"
"""Key of the agent in the counts of what episodes wait for."""
MOST_OUTPUT_BYTES = 1 << 20
"""Maximum length of what a command writes."""
_RETURNED = dict.fromkeys(("answer", "reward", "branches"))
"""Keys of what an agent returns."""
_KILLED_S = 5.0
_PIPES_S = 1.0
"""Time for the pipes of a command that has ended to close; a child in a session of its own may hold them open."""
_log = logging.getLogger(__name__)


def gateway_of(task: TaskConfig, settings: GatewayAgent) -> Gateway:
    """Return the gateway of a task. Raises UserError for an agent or a task that it cannot play."""
    key = "task.agent.entry"
    if (settings.entry is None) == (not settings.command):
        sentence = "task.agent needs either entry=package.module.function or command=[...]: give one of them."
        raise UserError(sentence, code="missing" if settings.entry is None else "conflict", key=key)
    entry = None
    if settings.entry is not None:
        path = settings.entry.replace(":", ".")
        entry = import_component(path, key)
        check_callable(entry, path, key, ("question", "base_url", "api_key"))
    wrong = {"task.token_mode": "append"} if task.token_mode is not TokenMode.append else {}
    wrong |= {"task.train_eos": "false"} if task.train_eos else {}
    for name, needed in wrong.items():
        sentence = f"task.agent.kind=gateway trains sampled tokens only: use {name}={needed}."
        raise UserError(sentence, code="conflict", key=name)
    return Gateway(settings, entry)


class AgentFailed(Exception):
    """Reason why an agent did not end its episode, as the end of a sentence."""


@dataclass(eq=False, kw_only=True)
class _Session(ChatSession):
    """Requests of one episode."""

    recorder: ChatRecorder
    tools: Toolbox
    key: str = field(default_factory=lambda: token_urlsafe(24))


class Gateway:
    """The server of one engine's episodes, and their agents. It starts with the first one; `close` it at the end."""

    def __init__(self, settings: GatewayAgent, entry: Callable[..., Any] | None) -> None:
        self.counts: Counter[str] = Counter()
        """Totals: requests that were refused, whose client was gone, and agents that failed."""
        self._entry, self._command = entry, settings.command
        self._timeout_s, self._credit = settings.timeout_s, settings.credit
        self._rule = SamplingRule.ignored if settings.ignore_sampling else SamplingRule.fixed
        self._name = f"task.agent.entry={settings.entry}" if entry else f"task.agent.command={settings.command[:1]}"
        self._sessions: dict[str, _Session] = {}
        self._server: GuestServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._url = ""
        self._loop: LoopThread | None = None

    async def __call__(self, question: Question, tools: Toolbox, recorder: ChatRecorder) -> Finish:
        """Play an episode: run the agent and answer its requests until it ends.

        Raises UserError for an agent that fails before its first answer, or that returns something else than text, a
        number or None; RunError if the engine fails; EpisodeOver at the agent's time limit.
        """
        await self._start()
        path, session = token_urlsafe(12), _Session(recorder=recorder, tools=tools)
        self._sessions[path] = session
        try:
            with tools.waiting(AGENT):
                return await self._play(question, f"{self._url}/{path}/v1", session)
        finally:
            del self._sessions[path]
            session.end()
            self.counts.update(recorder.counts)

    def close(self) -> None:
        """Stop the server and the agents' thread without waiting; idempotent."""
        if self._server is not None:
            self._server.should_exit = True
        if self._loop is not None:
            self._loop.abandon()
            self._loop = None

    async def _play(self, question: Question, url: str, session: _Session) -> Finish:
        recorder = session.recorder
        agent = asyncio.ensure_future(self._run(question.text or question.prompt, url, session.key))
        try:
            done = {agent, session.failed}
            await asyncio.wait(done, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()
            if not agent.done():
                raise EpisodeOver(Finish.ABORTED)
            found = _returned(agent)
        except AgentFailed as failure:
            self.counts["failed"] += 1
            if not recorder.generations:
                fix = "correct it" if not recorder.counts else "read its error, and correct it"
                raise self._error(f"{failure}: {fix}.") from failure
            _log.warning("%s %s: the episode of question %s ends as aborted", self._name, failure, question.uid)
            return recorder.limit or Finish.ABORTED
        finally:
            await within(end_task(agent), timeout_s=_KILLED_S)
        return self._finish(found, recorder)

    def _finish(self, found: Any, recorder: ChatRecorder) -> Finish:
        """Take what the agent returned; return how the episode ended."""
        given = found if isinstance(found, dict) else {"answer" if isinstance(found, str) else "reward": found}
        answer, reward, branches = (given.get(name) for name in _RETURNED)
        sound = isinstance(answer, str | None) and given.keys() <= _RETURNED.keys()
        if not sound or not (reward is None or _is_reward(reward)):
            raise self._error(f"returned {found!r:.80}: return an answer as text, a finite reward, or None.")
        recorder.answer = None if answer is None else answer.strip()
        recorder.reward = None if reward is None else float(reward)
        if branches is not None:
            self._reward_branches(branches, recorder)
        return Finish.ANSWER if recorder.generations else recorder.limit or Finish.ABORTED

    def _reward_branches(self, rewards: Any, recorder: ChatRecorder) -> None:
        """Give branches the rewards that the agent has returned for them. Raises UserError for any that cannot be."""
        sound = isinstance(rewards, dict) and all(map(_is_reward, rewards.values()))
        if self._credit is BranchCredit.episode:
            raise self._error("returned rewards of branches: set task.agent.credit=branch, or leave them out.")
        if not sound:
            raise self._error(f"returned branches={rewards!r:.80}: return a map of ids of answers to finite rewards.")
        try:
            recorder.reward_branches({name: float(reward) for name, reward in rewards.items()})
        except LookupError as error:
            raise self._error(f"returned a reward for a branch by {error}: name it by one answer of it.") from error

    async def _run(self, question: str, url: str, key: str) -> Any:
        """Run the agent; return what it returned. Raises AgentFailed."""
        if self._entry is None:
            return await _command(self._command, question, url, key)
        entry = self._entry
        try:
            if inspect.iscoroutinefunction(entry):
                self._loop = self._loop or LoopThread(AGENT)
                return await self._loop.result_of(entry(question, url, key))
            return await _in_thread(lambda: entry(question, url, key))
        except AgentFailed:
            raise
        except (Exception, SystemExit) as error:  # Code of the user; `exit()` in it must not end the process.
            raise AgentFailed(f"failed ({one_line(error)})") from error

    def _error(self, what: str) -> UserError:
        return UserError(f"{self._name} {what}", code="user_code", key="task.agent")

    async def _start(self) -> None:
        """Start the server, unless it runs."""
        async with self._starting:
            if self._serving is not None and not self._serving.done():
                return
            sock = bind("127.0.0.1", 0)
            options = {"log_level": "error", "lifespan": "off", "timeout_graceful_shutdown": 1}
            app = chat_app(self._session, self._rule, "/{session}", {"/v1/search": self._search})
            config = LimitedConfig(app, MOST_CONNECTIONS, **options)
            self._server = GuestServer(config)
            self._url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            sock.listen(config.backlog)
            self._serving = asyncio.create_task(self._serve(self._server, sock))

    @staticmethod
    async def _serve(server: GuestServer, sock: Any) -> None:
        with sock:
            await server.serve(sockets=[sock])

    def _session(self, request: Request, key: str) -> _Session:
        session = self._sessions.get(request.path_params["session"])
        if session is None or not compare_digest(session.key.encode(), key.encode("latin-1", "replace")):
            self.counts["foreign"] += 1
            raise Refused("There is no such session, or it is over.", status=404, code="unknown_session")
        return session

    async def _search(self, request: Request, session: _Session) -> Response:
        query = _query(await read_body(request))
        if not session.tools.searches:
            raise Refused("The run has no search: search.enabled=false.", status=404, code="unsupported")
        try:
            result = await unless_gone(request, session.run(session.tools.search(query)))
        except SearchFailed as failure:
            session.fail(failure)
            raise Refused(
                "No search server answers: the episode is over.", status=503, code="search_failed"
            ) from failure
        return as_json({"result": render_result(result)})


def _query(body: bytes) -> str:
    """Return the query in the body of a search. Raises Refused."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    query = values.get("query") if isinstance(values, dict) else None
    if not isinstance(query, str) or not query.strip():
        raise Refused('Send {"query": "..."}.', param="query")
    return encodable(query).strip()


def _is_reward(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and isfinite(value)
    except OverflowError:  # An integer beyond all floats.
        return False


def _returned(agent: asyncio.Future[Any]) -> Any:
    """Return what an agent has returned. Raises AgentFailed, also if the agent raised a cancellation of its own."""
    if agent.cancelled():
        raise AgentFailed("has cancelled itself")
    return agent.result()


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a thread of its own. A cancelled call leaves the thread behind, which ends with its process."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(found: Any, error: AgentFailed | None) -> None:
        if not answer.done():
            answer.set_result(found) if error is None else answer.set_exception(error)

    def run() -> None:
        found, failure = None, None
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001, code of the user
            failure = AgentFailed(f"failed ({one_line(error)})")
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(settle, found, failure)

    threading.Thread(target=run, name=AGENT, daemon=True).start()
    return await answer


async def _command(command: Sequence[str], question: str, url: str, key: str) -> Any:
    """Run a command: it reads the question and the session as JSON, and writes the answer. Raises AgentFailed.

    It writes text, or {"answer": ..., "reward": ..., "branches": ...}. It is killed with its children when the call ends.
    """
    given = json.dumps({"question": question, "base_url": url, "api_key": key, "model": MODEL}).encode()
    own = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    own |= {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    try:
        transport, program = await asyncio.get_running_loop().subprocess_exec(
            _Program, *command, env=os.environ | own, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise AgentFailed(f"cannot be started ({one_line(error)})") from error
    with contextlib.closing(transport):
        try:
            stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
            stdin.write(given)
            stdin.close()
            await program.exited.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
            await program.exited.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PIPES_S):
                    await program.closed.wait()
    said, errors = program.written[1], program.written[2]
    if status := transport.get_returncode():
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise AgentFailed(f"ended with status {status} ({last:.200})")
    if len(said) > MOST_OUTPUT_BYTES:
        raise AgentFailed(f"wrote more than {MOST_OUTPUT_BYTES} bytes")
    return _answer(said.decode("utf-8", "replace").strip())


class _Program(asyncio.SubprocessProtocol):
    """A running command. It may end before its pipes are closed, which its children hold open."""

    def __init__(self) -> None:
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self.written = {1: bytearray(), 2: bytearray()}
        """File descriptor -> what came from it, cut after a little more than `MOST_OUTPUT_BYTES`."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if len(self.written[fd]) <= MOST_OUTPUT_BYTES:
            self.written[fd] += data

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.closed.set()


def _answer(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text or None
    return found if isinstance(found, dict) and found and found.keys() <= _RETURNED.keys() else text
