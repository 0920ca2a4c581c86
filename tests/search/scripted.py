"""A scripted server, and cassettes of it, for the tests of what records and plays."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.config.schema import CassetteMode
from rlsys.errors import RunError
from rlsys.search.cassette import Call, CassetteFile, CassetteTool, Header
from rlsys.search.client import Passage, SearchResult

RECORD, REPLAY, EXTEND = CassetteMode.record, CassetteMode.replay, CassetteMode.extend


@dataclass
class Script:
    """A server with set answers and times, on any loop."""

    results: Mapping[str, SearchResult] = field(default_factory=dict)
    takes_s: Iterable[float] = (0.0,)
    """Times of the searches in the order of asking, from the start again after the last."""
    serves: Mapping[str, Any] | None = field(default_factory=lambda: {"encoder": "e", "queries": 7})
    asked: list[str] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._times = itertools.cycle(self.takes_s)

    async def search(self, query: str) -> SearchResult:
        self.asked.append(query)
        await asyncio.sleep(next(self._times))
        return self.results.get(query) or found(query)

    async def health(self) -> Mapping[str, Any]:
        if self.closed:
            raise RuntimeError("the client has been closed")  # as httpx says it
        await asyncio.sleep(0.5)
        if self.serves is None or self.closed:
            raise RunError("no /health here")
        return self.serves

    async def close(self) -> None:
        self.closed = True


def found(query: str, contents: str = "text") -> SearchResult:
    return SearchResult((Passage(f"id of {query}", f'"{query}"\n{contents}', 1 / 3), Passage("0", "é", 0.0)))


def tool(path: Path, mode: CassetteMode, server: Script | None = None, scale: float = 1.0) -> CassetteTool:
    return CassetteTool(path, mode, scale, 3, server)


def written(path: Path, latencies_s: Iterable[float], query: str = "Mali") -> Path:
    """A cassette of one query that was asked again and again."""
    path.unlink(missing_ok=True)
    file = CassetteFile(path, Header(3, {"encoder": "e"}))
    for latency_s in latencies_s:
        file.append(Call(query, found(query), latency_s).line(with_passages=True))
    file.close()
    return path


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
