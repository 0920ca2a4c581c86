"""Scripted chat endpoint that logs its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from rlsys.config.schema import JudgeConfig


def completion(content: Any) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": content}}]})


def status(code: int, text: str = "busy", **headers: str) -> httpx.Response:
    return httpx.Response(code, text=text, headers=headers)


@dataclass
class Chat:
    """Returns `replies` in turn, then the last one again; text becomes a completion, an exception is raised."""

    replies: Sequence[str | httpx.Response | Exception] = ("yes",)
    takes_s: float = 0.0
    asked_at: list[float] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    most_at_once: int = 0
    cancelled: int = 0
    _running: int = 0

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked_at.append(asyncio.get_running_loop().time())
        self.requests.append(request)
        reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._running -= 1
        if isinstance(reply, Exception):
            raise reply
        reply = completion(reply) if isinstance(reply, str) else reply
        # A response that has been read cannot be streamed.
        return httpx.Response(reply.status_code, headers=reply.headers, stream=reply.stream)


def settings(**changes: Any) -> JudgeConfig:
    good = {"url": "http://judge.test/v1", "model": "grader"}
    return JudgeConfig(**(good | changes))
