"""One-file tools for tests: a counter of an episode's calls, and tools that misbehave."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Annotated, Any

from annotated_types import Ge

from rlsys.rollout.tools.interface import EpisodeFacts


class Counting:
    """Says how often it was called in this episode, in steps of `by`."""

    name = "counting"
    tag = "count"
    timeout_s = 600.0
    description = "count"

    def __init__(self, *, by: Annotated[int, Ge(1)] = 1, label: str) -> None:
        self.by, self.label = by, label
        self.begun: list[EpisodeFacts] = []
        self.states: list[State] = []

    async def open(self, episode: EpisodeFacts) -> State:
        self.begun.append(episode)
        await asyncio.sleep(0)
        self.states.append(State(self))
        return self.states[-1]


class State:
    """State of `Counting` in one episode."""

    def __init__(self, tool: Counting) -> None:
        self.tool = tool
        self.heard: list[str] = []
        self.closed = 0

    async def call(self, text: str) -> str:
        self.heard.append(text)
        await asyncio.sleep(0)
        match text:
            case "hang":
                await asyncio.Event().wait()
            case "raise":
                raise RuntimeError("no\nmore")
        return f"{self.tool.label} {self.tool.by * len(self.heard)}"

    async def close(self) -> None:
        self.closed += 1


class TakesItsTag:
    """Has the tag of `Counting`."""

    name, tag, timeout_s, description = "other", "count", 1.0, "say nothing"

    async def call(self, text: str) -> str:
        return text


class WithoutCall:
    """Is no tool: it lacks `call`."""

    name, tag, timeout_s, description = "silent", "silent", 1.0, "say nothing"


class Faulty(Counting):
    """Fails in the way that `label` names."""

    name = "faulty"
    tag = "fault"
    timeout_s = 0.1

    async def open(self, episode: EpisodeFacts) -> Any:
        state = await super().open(episode)
        match self.label:
            case "open raises":
                raise OSError("no room")
            case "open exits":
                raise SystemExit(3)
            case "open hangs":
                await asyncio.Event().wait()
            case "open returns a number":
                return 7
            case "open is late":
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            case "close raises":
                state.close = self._raise  # type: ignore[method-assign]
            case "close hangs":
                state.close = self._hang  # type: ignore[method-assign]
        return state

    async def _raise(self) -> None:
        self.states[-1].closed += 1
        raise OSError("no room")

    async def _hang(self) -> None:
        self.states[-1].closed += 1
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()  # The task ends when it is cancelled again.


class Blocking(Counting):
    """Blocks its event loop in the method that `label` names until `released` is set."""

    name = "blocking"
    tag = "block"
    timeout_s = 0.1

    def __init__(self, *, label: str) -> None:
        super().__init__(label=label)
        self.released = threading.Event()

    async def open(self, episode: EpisodeFacts) -> State:
        self.block("open")
        self.begun.append(episode)
        self.states.append(BlockingState(self))
        return self.states[-1]

    def block(self, method: str) -> None:
        if method == self.label:
            self.released.wait(60)


class BlockingState(State):
    tool: Blocking

    async def call(self, text: str) -> str:
        self.tool.block("call")
        return await super().call(text)

    async def close(self) -> None:
        self.tool.block("close")
        await super().close()
