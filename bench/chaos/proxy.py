"""An HTTP proxy in front of a search server that passes, refuses, delays or garbles replies."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import aiohttp
from aiohttp import web

from bench.chaos.faults import Kind

SLOWER = 100
"""Factor by which `Kind.slow` lengthens the time of a reply."""
_HOP = {"Transfer-Encoding", "Content-Length", "Content-Encoding", "Connection", "Host", "Accept-Encoding"}


class Proxy:
    """Serves at `url` from a thread, until this process ends. `mode` may change at any time."""

    def __init__(
        self,
        upstream: str,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`clock` measures the time of a reply, and `wait` lengthens it."""
        self.mode: Kind | None = None
        """`refuse`, `slow`, `garble`, or None to pass replies unchanged."""
        self._upstream, self._random = upstream, random.Random(seed)
        self._clock, self._wait = clock, wait
        started: Future[str] = Future()
        threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True).start()
        self.url = started.result()

    def heal(self) -> None:
        """Pass replies unchanged again."""
        self.mode = None

    async def _serve(self, started: Future[str]) -> None:
        async with aiohttp.ClientSession() as session:
            self._session = session
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self._answer)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            started.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
            await asyncio.Event().wait()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.mode is Kind.refuse and request.transport is not None:
            request.transport.abort()
            return web.Response()  # Nobody gets it.
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        began, mode = self._clock(), self.mode
        asked = self._session.request(
            request.method, self._upstream + request.path_qs, data=await request.read(), headers=headers
        )
        async with asked as reply:
            body, status = await reply.read(), reply.status
            told = {name: value for name, value in reply.headers.items() if name not in _HOP}
        if mode is Kind.slow:
            await self._wait((SLOWER - 1) * (self._clock() - began))
        return web.Response(status=status, body=self._garbled(body) if mode is Kind.garble else body, headers=told)

    def _garbled(self, body: bytes) -> bytes:
        """Return `body` cut short, or with some bytes changed."""
        if self._random.random() < 0.5:
            return body[: self._random.randrange(len(body) + 1)]
        changed = bytearray(body)
        for place in self._random.choices(range(len(changed)), k=max(1, len(changed) // 20)) if changed else ():
            changed[place] ^= self._random.randint(1, 255)
        return bytes(changed)
