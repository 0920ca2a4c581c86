"""Calls the search and the tools for an episode: time limits, failures as text, and the state that tools keep.

Invariants:
- A failed call is returned, not raised: also of a tool that raises, hangs, or returns another type. Only a search that
  no server answers may raise `SearchFailed`, which ends the episode. So may a tool that reads pages of the search server.
- A tool's code runs on an event loop of its own, so code that blocks delays no episode and no other tool. Only tools of
  rlsys that never block may run on the loop of the episodes.
- A call lasts at most its time limit and `CANCEL_GRACE_S`, and `BLOCKED_S` more if the tool blocks its event loop. The
  first call of a tool with state also includes its opening.
- The state of a tool belongs to one episode. What `open` has returned is closed exactly once, also if the episode was
  aborted, and even if `open` returned too late. `Toolbox.close` returns within `CANCEL_GRACE_S`; a state that takes longer
  is closed beside later episodes, and abandoned after the tool's time limit.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import contextmanager
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar

from rlsys.rollout.tools.interface import EpisodeFacts, Tool, ToolError, has_state
from rlsys.search.retrieval import Passage, SearchFailed, SearchResult
from rlsys.search.web.loop import LoopThread

T = TypeVar("T")
CANCEL_GRACE_S = 1.0
"""Time for a cancelled call to end; afterwards it is abandoned."""
BLOCKED_S = 10.0
"""Time after a call's limit within which its event loop must answer; a loop that does not is blocked."""
MAX_CHARS = 100_000
"""Maximum length of a tool's result; the rest is cut off before any processing."""
SEARCH = "search"
"""Key of the search in `Toolbox`'s counts; the other keys are names of tools."""
_log = logging.getLogger(__name__)


class SearchTool(Protocol):
    """Search interface of an episode."""

    async def search(self, query: str) -> SearchResult:
        """Return the passages for one query. Failures are returned, except SearchFailed (`RequiredSearch`)."""


class ToolResult(NamedTuple):
    """Outcome of a search or of a tool call."""

    text: str
    error: str = ""
    """Reason of the failure, on one line; empty on success."""
    seconds: float = 0.0


def render_result(result: ToolResult, tool: str = "") -> str:
    """Return what the policy reads of a search, or of a call of `tool`: the text, or an error message."""
    return f"{tool or 'Search'} failed: {result.error}" if result.error else result.text or "No result."


def render_search(contents: Iterable[str]) -> str:
    """Return the passages as `Doc {i}(Title: {first line}) {rest}`, one per line, numbered from 1."""
    parts = (content.partition("\n") for content in contents)
    lines = [f"Doc {number}(Title: {title}) {rest}\n" for number, (title, _, rest) in enumerate(parts, start=1)]
    return "".join(lines) or "No results found."


class Toolbox:
    """Search and tools of one episode. Close it when the episode ends."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        threads: Mapping[str, LoopThread | None],
        search: SearchTool | None,
        episode: EpisodeFacts,
        awaited: Counter[str],
    ) -> None:
        """`tools` and the `threads` that run them are by name; None is the current event loop. Without `search` the policy
        cannot search. `awaited` counts the calls in flight, by tool name or `SEARCH`."""
        self.by_name = tools
        self.searches = search is not None
        """True if the policy can search."""
        self.failed_search: SearchFailed | None = None
        """Error of the first search that no server answered. It ends the episode even if the agent hides it."""
        self._search = search
        self._threads = threads
        self._episode = episode
        self._awaited = awaited
        self._calls: dict[str, _Calls] = {}

    async def search(self, query: str) -> ToolResult:
        """Search, if `searches`. The policy should read `render_result(result)`."""
        return await self.call("", query)

    async def call(self, tool: str, text: str) -> ToolResult:
        """Call `tool`, or the search if it is empty. The policy should read `render_result(result, tool)`."""
        started = perf_counter()
        with self.waiting(tool or SEARCH):
            result = await self._call(tool, text)
        return result._replace(seconds=perf_counter() - started)

    @contextmanager
    def waiting(self, name: str) -> Generator[None, None, None]:
        """Count the episode as one that waits for `name` during the body."""
        self._awaited[name] += 1
        try:
            yield
        finally:
            self._awaited[name] -= 1

    async def close(self) -> None:
        """Close the states of all tools; idempotent."""
        closing = [asyncio.ensure_future(calls.close()) for calls in self._calls.values() if calls.has_state]
        self._calls = {}
        if closing:
            await asyncio.wait(closing, timeout=CANCEL_GRACE_S)

    async def _call(self, name: str, text: str) -> ToolResult:
        if name and (thread := self._threads[name]) is not None:
            if name not in self._calls:
                self._calls[name] = _Calls(self.by_name[name], thread, self._episode)
            return await self._calls[name].call(text)
        try:
            return await (self._of_pages(name, text) if name else self._found(text))
        except SearchFailed as failure:
            self.failed_search = self.failed_search or failure
            raise

    async def _found(self, query: str) -> ToolResult:
        assert self._search is not None, "an agent calls no search where there is none"
        found = await self._search.search(query)
        named = _with_url if None in self._threads.values() else attrgetter("contents")
        return ToolResult(render_search(map(named, found.passages)), found.error)

    async def _of_pages(self, name: str, text: str) -> ToolResult:
        try:
            return ToolResult(_encodable(await self.by_name[name].call(text)))
        except ToolError as error:
            return ToolResult("", _reason(error))


def _with_url(passage: Passage) -> str:
    """Return the contents of a passage with its URL in the title, by which its page can be opened."""
    title, newline, text = passage.contents.partition("\n")
    return f"{title}, URL: {passage.url}{newline}{text}" if passage.url else passage.contents


class _Calls:
    """The calls of one tool in one episode, on the event loop of `thread`."""

    def __init__(self, tool: Tool, thread: LoopThread, episode: EpisodeFacts) -> None:
        self.has_state = has_state(tool)
        self._tool, self._thread, self._episode = tool, thread, episode
        self._state: _State | None = None
        self._running: set[asyncio.Task[Any]] = set()

    async def call(self, text: str) -> ToolResult:
        """Call the tool, and give up if it blocks its event loop."""
        opens = self.has_state and self._state is None
        limit_s = (1 + opens) * self._tool.timeout_s + CANCEL_GRACE_S + BLOCKED_S
        result = await within(self._thread.result_of(self._run(text)), timeout_s=limit_s)
        return result or ToolResult("", _late(self._tool))

    async def close(self) -> None:
        """Close the state, if there is one."""
        await self._thread.result_of(self._close())

    async def _run(self, text: str) -> ToolResult:
        if not self.has_state:
            return await call_tool(self._tool, text)
        if self._state is None:
            self._state = _State(self._tool, self._episode)
        running = asyncio.current_task()
        assert running is not None
        self._running.add(running)
        try:
            state, error = await self._state.opened()
            return ToolResult("", error) if error else await call_tool(self._tool, text, state)
        finally:
            self._running.discard(running)

    async def _close(self) -> None:
        if self._running:  # A cancelled call may still be ending.
            await asyncio.wait(self._running)
        if self._state is not None:
            await self._state.end()


class _State:
    """State of a tool in an episode, in a task that opens it, holds it and closes it."""

    def __init__(self, tool: Any, episode: EpisodeFacts) -> None:
        self._tool = tool
        self._over = asyncio.Event()
        self._opened: asyncio.Future[tuple[Any, str]] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(episode))

    async def opened(self) -> tuple[Any, str]:
        """Return the state, and the reason if it cannot be used."""
        await asyncio.wait([self._opened], timeout=self._tool.timeout_s)
        if not self._opened.done():
            self._opened.set_result((None, f"it did not open within {self._tool.timeout_s:g} s"))
            self._over.set()
            self._life.cancel()
        return self._opened.result()

    async def end(self) -> None:
        """Close the state, or stop opening it."""
        self._over.set()
        if not self._opened.done():
            self._life.cancel()
        await within(self._life, timeout_s=self._tool.timeout_s)

    async def _live(self, episode: EpisodeFacts) -> None:
        state, error = await _attempt(lambda: self._tool.open(episode))
        if not error and not inspect.iscoroutinefunction(getattr(state, "call", None)):
            error = f"open returned {type(state).__name__}, which has no async method call"
        if not self._opened.done():
            self._opened.set_result((state, f"it cannot be opened: {error}" if error else ""))
        close = getattr(state, "close", None)
        if close is None:
            return
        try:
            await self._over.wait()
        finally:
            _, error = await _attempt(close)
            if error:
                _log.warning("task.tools: the state of %s was not closed: %s", self._tool.name, error)


async def call_tool(tool: Tool, text: str, state: Any = None) -> ToolResult:
    """Call `tool`, or its `state` in an episode, under the tool's time limit. Failures are returned, not raised."""
    late = None, _late(tool)
    call = (tool if state is None else state).call
    answer, error = await within(_attempt(lambda: call(text)), timeout_s=tool.timeout_s) or late
    if error:
        return ToolResult("", error)
    if not isinstance(answer, str):
        return ToolResult("", f"it returned {type(answer).__name__}, not text")
    return ToolResult(_encodable(answer))


async def _attempt(work: Callable[[], Awaitable[T]]) -> tuple[T | None, str]:
    """Return the result of user code, and the reason of its failure."""
    try:
        return await work(), ""
    except ToolError as error:
        return None, _reason(error) or "it gives no reason"
    except asyncio.CancelledError:  # Raised by the tool itself: on a timeout nobody awaits this task.
        return None, "it was cancelled"
    # User code: the policy reads its error, and `exit()` in it must not end the worker.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return None, f"{type(error).__name__}: {_reason(error)}".rstrip(": ")


def _late(tool: Tool) -> str:
    return f"no answer within {tool.timeout_s:g} s"


def _reason(error: BaseException) -> str:
    """Return an error's message on one line; empty if it has none."""
    try:
        return " ".join(_encodable(str(error)).split())
    except Exception:  # noqa: BLE001 (__str__ is user code too)
        return ""


def _encodable(text: str) -> str:
    """Return `text` cut to `MAX_CHARS`. Lone surrogates are replaced, because no tokenizer accepts them."""
    return text[:MAX_CHARS].encode("utf-8", "replace").decode("utf-8")


async def within(call: Coroutine[Any, Any, T] | asyncio.Future[T], *, timeout_s: float | None = None) -> T | None:
    """Return the result of `call`, or None after `timeout_s` seconds.

    A call that has not ended by then is cancelled; if it still runs after `CANCEL_GRACE_S`, it is abandoned.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task], timeout=timeout_s)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            # The gather retrieves the task's exception, so that asyncio does not warn about it.
            await asyncio.wait([asyncio.gather(task, return_exceptions=True)], timeout=CANCEL_GRACE_S)
