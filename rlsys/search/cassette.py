"""Records search calls to a cassette file and replays them without a server.

A cassette is a jsonl file: a header with topk and the server's identity, then one line per call, in order of
completion:

    {"rlsys_cassette": 1, "topk": 3, "server": {"kind": "dense", "passages": 3904, ...}}
    {"query": "Mali", "latency_s": 0.0123, "passages": [{"id": "17", "contents": "...", "score": 0.61}, ...]}
    {"query": "Mali", "latency_s": 0.0098}
    {"query": "Chad", "latency_s": 30.0, "error": "no answer from ...", "failure": "unavailable"}

A process writes the passages of a query once, in the line of the query's first successful call. Older files lack the
failure kind and some keys of `server`; missing keys never count as differences.

Invariants:

- A cassette is replayed or extended only with the topk of its header, and extended only from an equivalent server.
- The file appears under its name only once its header is complete.
- Lines are appended whole, under a lock, so several processes of one host can share a file.
- A line that a killed process left incomplete damages no other line.
- As long as no call is added, the k-th call of a query in a process has the same delay in every run.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import math
import os
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsys.errors import RunError, UserError, disk_error
from rlsys.search.retrieval import Failure, Passage, SearchResult, differences, listed, served
from rlsys.search.wire import as_sent

if TYPE_CHECKING:
    from rlsys.search.client import SearchClient

FORMAT = 1
_GOLDEN = (math.sqrt(5) - 1) / 2
_QUOTED_CHARS = 80
"""Maximum number of query characters quoted in an error; small, because the policy reads the error."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Header:
    """Facts that all calls of a cassette share."""

    topk: int
    server: Mapping[str, Any] = field(default_factory=dict)
    """Health keys that the answers depend on (see `served`); empty if the server has no /health."""

    def line(self) -> bytes:
        return json.dumps({"rlsys_cassette": FORMAT, "topk": self.topk, "server": dict(self.server)}).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Header:
        """Return the header of the cassette at `path`. Raises UserError for a missing or invalid file."""
        if not path.is_file():
            reason = f"there is no cassette at {path}"
            remedy = "record one with search.cassette.mode=record, or give another path"
            raise UserError(f"{reason}: {remedy}.", code="not_found", key=str(path))
        with path.open("rb") as file:
            row = _parsed(file.readline())
        match row:
            case {"rlsys_cassette": int(made), "topk": int(topk), "server": dict(server)} if made == FORMAT:
                return cls(topk, server)
        reason = f"{path} is not a cassette of format {FORMAT}"
        remedy = "give a file that search.cassette.mode=record has made"
        raise UserError(f"{reason}: {remedy}.", code="malformed", key=str(path))

    def require_topk(self, topk: int, path: Path) -> None:
        """Raise UserError if `topk` differs from the recorded one."""
        if self.topk != topk:
            problem = f"the cassette {path} was recorded with search.topk={self.topk}, not {topk}"
            reason = f"{problem}: set search.topk={self.topk}, or record another cassette."
            raise UserError(reason, code="mismatch", key="search.topk")


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One search with its result and latency, as seen by the episode."""

    query: str
    result: SearchResult
    latency_s: float

    def line(self, *, with_passages: bool) -> bytes:
        """Return the line of this call; `with_passages` is False if an earlier line of the query has the passages."""
        row: dict[str, Any] = {"query": self.query, "latency_s": round(self.latency_s, 6)}
        if self.result.error:
            row["error"] = self.result.error
            if self.result.failure is not None:
                row["failure"] = self.result.failure.value
        elif with_passages:
            kept = [asdict(passage) for passage in self.result.passages]
            row["passages"] = [
                {key: value for key, value in one.items() if (key, value) != ("url", "")} for one in kept
            ]
        return json.dumps(row).encode() + b"\n"


@dataclass(slots=True)
class Cassette:
    """Answers and latencies of recorded calls."""

    header: Header
    answers: dict[str, SearchResult] = field(default_factory=dict)
    """Result by query. A failure is kept until a call of the query succeeds."""
    latencies_s: list[float] = field(default_factory=list)
    """Latencies of all calls, failed ones included, in ascending order."""
    errors: int = 0
    """Calls that failed."""

    @classmethod
    def read(cls, path: Path) -> Cassette:
        """Load the cassette at `path`. Raises UserError for a missing or invalid file."""
        cassette = cls(Header.read(path))
        torn = 0
        with path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, start=2):
                row = _parsed(line)
                if row is not None:
                    cassette._take(row, number, path)
                elif line.strip():
                    torn += 1
        cassette.latencies_s.sort()
        if torn:
            _log.warning("%s: %d incomplete line(s) left out, cut off by a kill or a full disk", path, torn)
        return cassette

    def add(self, call: RecordedCall) -> None:
        """Add `call` to the answers and latencies."""
        insort(self.latencies_s, call.latency_s)
        self._learn(call.query, call.result)

    def delay_s(self, query: str, asked: int) -> float:
        """Return the latency to replay for `query` if it was called `asked` times before; see `drawn_rank`."""
        return self.latencies_s[drawn_rank(query, asked, len(self.latencies_s))]

    def quantile_s(self, share: float) -> float:
        """Return the `share` quantile of the latencies, by nearest rank."""
        return self.latencies_s[max(0, math.ceil(share * len(self.latencies_s)) - 1)]

    def _take(self, row: Any, number: int, path: Path) -> None:
        try:
            query, latency_s, error = str(row["query"]), float(row["latency_s"]), str(row.get("error", ""))
            failure = Failure(row["failure"]) if "failure" in row else None
            passages = row.get("passages")
            found = tuple(Passage(**passage) for passage in passages or ())
            if not 0 <= latency_s < math.inf:
                raise ValueError(f"latency_s={latency_s}")  # noqa: TRY301  one message for every malformed line
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            reason = f"line {number} of {path} is not a search call ({problem!r}): record the cassette again."
            raise UserError(reason, code="malformed", key=str(path)) from None
        self.latencies_s.append(latency_s)
        if error or passages is not None:
            self._learn(query, SearchResult(found, error, failure))

    def _learn(self, query: str, result: SearchResult) -> None:
        self.errors += bool(result.error)
        known = self.answers.get(query)
        if known is None or (known.error and not result.error):
            self.answers[query] = result


def drawn_rank(query: str, asked: int, count: int) -> int:
    """Return an index into `count` sorted latencies, for a call of `query` after `asked` earlier calls.

    The indices of a query start at a hash of the query and advance, modulo `count`, by a stride of about 0.618 `count`
    that is coprime to `count`. So `count` calls visit every index once, and a few calls are spread evenly.
    """
    start = int.from_bytes(hashlib.sha256(query.encode()).digest()[:8], "big")
    stride = max(1, round(count * _GOLDEN))
    while math.gcd(stride, count) > 1:
        stride += 1
    return (start + asked * stride) % count


class CassetteFile:
    """Appends one process's lines to a cassette."""

    def __init__(self, path: Path, header: Header) -> None:
        """Create the file, or open it for appending. Raises UserError if its header does not match `header`."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:  # Other processes see either no file or one with a complete header.
            part.write_bytes(header.line())
            with suppress(FileExistsError):
                os.link(part, path)
        finally:
            part.unlink(missing_ok=True)
        written = Header.read(path)
        written.require_topk(header.topk, path)
        if keys := differences(written.server, header.server):
            recorded, serves = (listed(server, keys) for server in (written.server, header.server))
            problem = f"the cassette {path} was recorded from a server of {recorded}, but search.url serves {serves}"
            raise UserError(f"{problem}: record another cassette.", code="mismatch", key=str(path))
        self._file = os.open(path, os.O_RDWR | os.O_APPEND)
        with self._alone():
            if os.pread(self._file, 1, os.fstat(self._file).st_size - 1) != b"\n":
                self._write(b"\n")  # separates an incomplete line of a killed process from the next line

    def append(self, line: bytes) -> None:
        """Append a whole line. Raises RunError if the write fails or the disk is full."""
        with self._alone():
            self._write(line)

    def close(self) -> None:
        os.close(self._file)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the file lock, which the system releases if the process is killed."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise disk_error(error, f"the cassette {self._path}") from error
        if written < len(line):
            raise RunError(f"the cassette {self._path} cannot be written: free some space on its disk.", code="no_room")


def _parsed(line: bytes) -> Any:
    """Parse a line; None if it is not JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None


@dataclass(slots=True)
class Counts:
    """Searches since the start: replayed (`hits`), not in the cassette (`misses`), and written (`recorded`)."""

    hits: int = 0
    misses: int = 0
    recorded: int = 0


class CassetteTool(AbstractAsyncContextManager["CassetteTool"]):
    """A search tool that records calls, replays them, or both. For one event loop; `close` it at the end.

    Args:
        mode: `record`, `replay`, or `extend`, which replays known queries and records the others.
        latency_scale: Factor on the recorded latencies in replay.
        server: Client whose calls are recorded; must be None in mode `replay` and given in the other modes.

    Raises UserError if the cassette cannot be replayed, or if mode `record` finds an existing file.
    """

    def __init__(self, path: Path, mode: str, latency_scale: float, topk: int, server: SearchClient | None) -> None:
        if (server is None) != (mode == "replay"):
            raise ValueError(f"mode {mode} with server {server}: give a server to record or extend, none to replay")
        if mode == "record" and path.exists():
            problem = f"search.cassette.mode=record needs a new file, but {path} exists"
            raise UserError(f"{problem}: delete it, or use search.cassette.mode=extend.", code="exists", key=str(path))
        self.counts = Counts()
        self._path, self._mode, self._latency_scale, self._server = path, mode, latency_scale, server
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
        """Replay one query, or send it to the server and record the result.

        Raises UserError if the server differs from the recorded one, and RunError if the call cannot be written. These
        errors are raised rather than returned as an observation, because the policy did not cause them.
        """
        query = as_sent(query)
        asked = self._asked[query]
        self._asked[query] += 1
        played = None if self._mode == "record" else self._cassette.answers.get(query)
        # Mode `extend` retries a recorded failure at the server.
        if played is not None and not (played.error and self._mode == "extend"):
            self.counts.hits += 1
            await asyncio.sleep(self._latency_scale * self._cassette.delay_s(query, asked))
            return played
        self.counts.misses += 1
        if self._server is None:
            quoted = query if len(query) <= _QUOTED_CHARS else query[:_QUOTED_CHARS] + "..."
            error = f"the cassette holds no answer to {quoted!r} (mode {self._mode})"
            return SearchResult(error=error, failure=Failure.not_recorded)
        clock = asyncio.get_running_loop().time
        started = clock()
        result = await self._server.search(query)
        call = RecordedCall(query, result, clock() - started)
        if self._mode == "record" or not result.error:
            await self._write(self._server, call)
        return result

    async def close(self) -> None:
        """Close client and file. Calls in flight return the client's error result and are not recorded."""
        self._closed = True
        if self._server is not None:
            await self._server.close()
        async with self._opening:
            if self._file is not None:
                self._file.close()
                self._file = None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _write(self, server: SearchClient, call: RecordedCall) -> None:
        # Serialised, because the first call fetches the server's health and then creates the file.
        async with self._opening:
            health: Mapping[str, Any] = {}
            if self._file is None and not self._closed:
                with suppress(RunError):  # /health is optional in the retrieval contract
                    health = await server.health()
            if self._closed:
                return
            if self._file is None:
                self._file = CassetteFile(self._path, Header(self._cassette.header.topk, served(health)))
            known = self._cassette.answers.get(call.query)
            self._file.append(call.line(with_passages=known is None or bool(known.error)))
            self._cassette.add(call)
            self.counts.recorded += 1
