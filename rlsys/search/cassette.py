"""A cassette before a server, or in its place: search calls are recorded, and played back as they were.

Invariant: as long as nothing is added, the k-th ask of a query in a process is played with the same delay in
every run. `recording` has the file.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rlsys.errors import RunError, UserError
from rlsys.search.recording import Call, Cassette, CassetteFile, Header
from rlsys.search.retrieval import BLANK, Failure, SearchResult, as_sent, served

_QUOTED_CHARS = 80
"""Of a query in an error: the policy, which wrote the query, reads that error."""


class Server(Protocol):
    """What is recorded: `client.SearchClient`, or anything that answers as it does."""

    async def search(self, query: str) -> SearchResult:
        """Passages of a query, or why there are none."""

    async def health(self) -> Mapping[str, Any]:
        """What the server says of itself. Raises RunError where it says nothing."""

    async def close(self) -> None:
        """End what is in flight, and the connections."""


@dataclass(slots=True)
class Counts:
    """Searches since the start."""

    hits: int = 0
    """Played from the cassette."""
    misses: int = 0
    """Not played: they went to the server, or failed where there is none."""
    recorded: int = 0
    """Written to the cassette."""


class CassetteTool:
    """A search tool that records calls, plays them, or both. For one event loop; `close` it at the end.

    Args:
        path: of the cassette.
        mode: record, replay or extend. Blank queries are not searches in any of them.
        latency_scale: a played call takes this times a recorded latency.
        topk: passages a query.
        server: what is asked and recorded; not used to replay.

    Raises UserError for a cassette that cannot be played, and for a recording that is there already.
    """

    def __init__(self, path: Path, mode: str, latency_scale: float, topk: int, server: Server | None) -> None:
        if (server is None) != (mode == "replay"):
            raise ValueError(f"{mode} with {server}: a server is there to be recorded, and for nothing else")
        if mode == "record" and path.exists():
            raise UserError(
                f"search.cassette.mode=record would mix with what {path} holds: delete it or use mode=extend."
            )
        self.counts = Counts()
        self._path = path
        self._mode = mode
        self._latency_scale = latency_scale
        self._server = server
        self._asked: Counter[str] = Counter()
        self._file: CassetteFile | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        if mode == "replay" or path.exists():
            self._cassette = Cassette.read(path)
            self._cassette.header.require_topk(topk, path)
        else:
            self._cassette = Cassette(Header(topk))

    async def search(self, query: str) -> SearchResult:
        """Play or ask one query.

        Raises UserError if the server that is recorded serves something else than the cassette was made from,
        and RunError if a call cannot be written: neither is the policy's fault, as a search that fails may be.
        """
        query = as_sent(query)
        if not query:
            return BLANK
        asked = self._asked[query]
        self._asked[query] += 1
        played = self._played(query)
        if played is not None:
            self.counts.hits += 1
            await asyncio.sleep(self._latency_scale * self._cassette.delay_s(query, asked))
            return played
        self.counts.misses += 1
        if self._server is None:
            quoted = query if len(query) <= _QUOTED_CHARS else query[:_QUOTED_CHARS] + "..."
            return SearchResult(
                error=f"the cassette holds no answer to {quoted!r} (mode {self._mode})",
                failure=Failure.not_recorded,
            )
        return await self._ask(self._server, query)

    async def close(self) -> None:
        """End the client and the file; calls in flight end as the client ends them, unrecorded."""
        self._closed = True
        if self._server is not None:
            await self._server.close()
        async with self._opening:
            if self._file is not None:
                self._file.close()
                self._file = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _played(self, query: str) -> SearchResult | None:
        """What the cassette answers; where a server can be asked, a recorded failure is no answer."""
        if self._mode == "record":
            return None
        result = self._cassette.answer(query)
        if result is not None and result.error and self._mode == "extend":
            return None
        return result

    async def _ask(self, server: Server, query: str) -> SearchResult:
        clock = asyncio.get_running_loop().time
        started = clock()
        result = await server.search(query)
        call = Call(query, result, clock() - started)
        if self._mode == "record" or not result.error:
            await self._write(server, call)
        return result

    async def _write(self, server: Server, call: Call) -> None:
        # One at a time, because the first opens the file, and asks the server what it serves before that.
        async with self._opening:
            if self._closed:
                return
            if self._file is None:
                header = Header(self._cassette.header.topk, await _served(server))
                if self._closed:
                    return
                self._file = CassetteFile(self._path, header)
            known = self._cassette.answer(call.query)
            self._file.append(call.line(with_passages=known is None or bool(known.error)))
            self._cassette.add(call)
            self.counts.recorded += 1


async def _served(server: Server) -> dict[str, Any]:
    """What the answers of `server` depend on, as far as it says."""
    try:
        return served(await server.health())
    except RunError:  # the retrieval contract asks for no /health
        return {}
