"""Pages from URLs: fetched by one event loop, and read by a few worker processes.

Processes, not threads: reading is bound by the CPU, and only a process can be ended in the middle of it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection

import orjson

from rlsys.errors import RunError
from rlsys.search.web import worker
from rlsys.search.web.extract import MAX_TEXT_CHARS, Page
from rlsys.search.web.fetch import Fetched, PageError, PageFetcher
from rlsys.search.web.slots import Slots

_START_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 16 * MAX_TEXT_CHARS


class Workers:
    """Up to `count` worker processes, started when they are first needed. For one event loop.

    Args:
        job_timeout_s: a page that takes longer ends its process, and has no text.
        hidden: variables of the environment that the processes do not get.
    """

    def __init__(self, count: int, job_timeout_s: float, hidden: Collection[str] = ()) -> None:
        self._job_timeout_s = job_timeout_s
        self._environ = {name: value for name, value in os.environ.items() if name not in hidden}
        self._slots = Slots(count)
        self._idle: list[Process] = []

    async def read(self, fetched: Fetched, rank: int = 0) -> Page | None:
        """What the page says; None where it has no text, or cannot be read within the limits.

        It waits for its turn by `rank`. Raises RunError when no process can be started.
        """
        async with self._slots.held(rank):
            process = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await _ask(process, fetched)
            except BaseException:
                await _end(process)
                raise
            if answer is None:
                await _end(process)
                return None
            self._idle.append(process)
        return _page(answer)

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", worker.__name__, str(self._job_timeout_s)),
            stdin=PIPE,
            stdout=PIPE,
            env=self._environ,
            limit=_MAX_ANSWER_BYTES,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await process.stdout.readline()
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                raise RunError(f"a page reader did not start within {_START_TIMEOUT_S:g} s") from None
            raise
        if ready != worker.READY:
            await _end(process)
            raise RunError("a page reader did not start: see its message on standard error")
        return process


async def _ask(process: Process, fetched: Fetched) -> bytes | None:
    """The answer of a worker; None when it has ended, or said what none says."""
    assert process.stdin is not None
    assert process.stdout is not None
    job = {"media_type": fetched.media_type, "charset": fetched.charset, "bytes": len(fetched.body)}
    try:
        process.stdin.write(orjson.dumps(job) + b"\n" + fetched.body)
        await process.stdin.drain()
        answer = await process.stdout.readline()
    except (ConnectionError, ValueError):
        return None
    return answer if answer.endswith(b"\n") else None


def _page(answer: bytes) -> Page | None:
    """The page of a worker's answer; the process that wrote it has read a stranger's bytes."""
    try:
        found = orjson.loads(answer)
        return None if found is None else Page(str(found["title"]), str(found["text"]))
    except (ValueError, KeyError, TypeError):
        return None


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


class PageReader:
    """The text of pages, by URL."""

    def __init__(self, fetcher: PageFetcher, workers: Workers) -> None:
        self._fetcher = fetcher
        self._workers = workers

    async def read(self, url: str, rank: int = 0) -> Page:
        """The page at `url`; among pages that wait, those of a lower `rank` go first.

        Raises PageError for a page that cannot be had or has no text.
        """
        page = await self._workers.read(await self._fetcher.fetch(url, rank), rank)
        if page is None:
            raise PageError(f"{url[:200]!r} has no text that can be read within the limits")
        return page

    async def close(self) -> None:
        """Give connections and processes back."""
        await self._fetcher.close()
        await self._workers.close()
