"""The file of a cassette: search calls that were recorded from a server, to be played back without one.

A jsonl file. The header says what was asked, each further line is one call, in the order of their ends:

    {"rlsys_cassette": 1, "topk": 3, "server": {"kind": "dense", "passages": 3904, ...}}
    {"query": "Mali", "latency_s": 0.0123, "passages": [{"id": "17", "contents": "...", "score": 0.61}, ...]}
    {"query": "Mali", "latency_s": 0.0098}
    {"query": "Chad", "latency_s": 30.0, "error": "no answer from ...", "failure": "unavailable"}

Passages stand in the first line of a query that a process writes; all lines give their latency. Older files
say less of the server, and nothing of the kind of a failure: what is missing is no difference.

Invariants: a cassette is never played or continued with another topk, nor continued from a server that
serves something else; a file under the cassette's name has a whole header; a line is written at once, to the
file's end and under a lock, so several processes of a host may write one file; a line that was torn by a
kill is left out, with a warning, and costs no other line; the delays of a cassette depend on nothing but the
latencies it holds, the query and how often that was asked.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
from bisect import insort
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlsys.errors import RunError, UserError
from rlsys.search.retrieval import Failure, Passage, SearchResult, differences, listed

FORMAT = 1
_GOLDEN = (math.sqrt(5) - 1) / 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Header:
    """What all calls of a cassette have in common."""

    topk: int
    server: Mapping[str, Any] = field(default_factory=dict)
    """The part of the server's health that its answers depend on, see `retrieval.served`; empty without a health."""

    def line(self) -> bytes:
        """As it is written."""
        return _line({"rlsys_cassette": FORMAT, "topk": self.topk, "server": dict(self.server)})

    @classmethod
    def read(cls, path: Path) -> Header:
        """The header of the cassette at `path`. Raises UserError where there is no cassette."""
        if not path.is_file():
            raise UserError(
                f"there is no cassette at {path}: record one with search.cassette.mode=record, or give another path."
            )
        with path.open("rb") as file:
            row = _parsed(file.readline())
        match row:
            case {"rlsys_cassette": int(made), "topk": int(topk), "server": dict(server)} if made == FORMAT:
                return cls(topk, server)
        raise UserError(
            f"{path} is not a cassette of format {FORMAT}: give a file that search.cassette.mode=record has made."
        )

    def require_topk(self, topk: int, path: Path) -> None:
        """Raise UserError if the calls were made with another number of passages."""
        if self.topk != topk:
            raise UserError(
                f"the cassette {path} was recorded with search.topk={self.topk}, not {topk}: set it to that, or "
                "record another cassette."
            )

    def require_server(self, server: Mapping[str, Any], path: Path) -> None:
        """Raise UserError if `server` is known to serve something else."""
        keys = differences(self.server, server)
        if keys:
            recorded, serves = (listed({key: one[key] for key in keys}) for one in (self.server, server))
            raise UserError(
                f"the cassette {path} was recorded from a server of {recorded}, search.url serves {serves}: "
                "record another cassette."
            )


@dataclass(frozen=True, slots=True)
class Call:
    """One search as an episode saw it."""

    query: str
    result: SearchResult
    latency_s: float

    def line(self, *, with_passages: bool) -> bytes:
        """As it is written; `with_passages` unless an earlier line of this query has them."""
        row: dict[str, Any] = {"query": self.query, "latency_s": round(self.latency_s, 6)}
        if self.result.error:
            row["error"] = self.result.error
            if self.result.failure is not None:
                row["failure"] = self.result.failure.value
        elif with_passages:
            row["passages"] = [asdict(passage) for passage in self.result.passages]
        return _line(row)


@dataclass(slots=True)
class Cassette:
    """What is known from calls."""

    header: Header
    answers: dict[str, SearchResult] = field(default_factory=dict)
    """By query. A failure stands here only while no call of the query has worked."""
    latencies_s: list[float] = field(default_factory=list)
    """Of all calls, failed ones too, in ascending order: the recorded distribution."""
    errors: int = 0
    """Calls that failed."""

    @classmethod
    def read(cls, path: Path) -> Cassette:
        """The cassette at `path`. Raises UserError for a file that is not one."""
        cassette = cls(Header.read(path))
        torn = 0
        with path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, start=2):
                row = _parsed(line)
                if row is not None:
                    cassette._take(row, f"line {number} of {path}")
                elif line.strip():
                    torn += 1
        cassette.latencies_s.sort()
        if torn:
            _log.warning("%s: %d torn line(s) left out, cut off by a kill or a full disk", path, torn)
        return cassette

    def answer(self, query: str) -> SearchResult | None:
        """What is played for `query`; None if it was not asked."""
        return self.answers.get(query)

    def add(self, call: Call) -> None:
        """Count `call` in."""
        insort(self.latencies_s, call.latency_s)
        self._learn(call.query, call.result)

    def delay_s(self, query: str, asked: int) -> float:
        """How long `query` takes when it was asked `asked` times before; see `drawn_rank`."""
        return self.latencies_s[drawn_rank(query, asked, len(self.latencies_s))]

    def quantile_s(self, share: float) -> float:
        """The least latency that `share` of the calls do not exceed (nearest rank), in seconds."""
        return self.latencies_s[max(0, math.ceil(share * len(self.latencies_s)) - 1)]

    def _take(self, row: Any, where: str) -> None:
        try:
            query, latency_s, error = str(row["query"]), float(row["latency_s"]), str(row.get("error", ""))
            failure = Failure(row["failure"]) if "failure" in row else None
            passages = row.get("passages")
            found = tuple(Passage(**passage) for passage in passages or ())
            if not 0 <= latency_s < math.inf:
                raise ValueError(f"latency_s={latency_s}")  # noqa: TRY301  one sentence for all that is wrong
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise UserError(f"{where} is not a search call ({problem!r}): record the cassette anew.") from None
        self.latencies_s.append(latency_s)
        if error or passages is not None:
            self._learn(query, SearchResult(found, error, failure))

    def _learn(self, query: str, result: SearchResult) -> None:
        self.errors += bool(result.error)
        known = self.answers.get(query)
        if known is None or (known.error and not result.error):
            self.answers[query] = result


def drawn_rank(query: str, asked: int, count: int) -> int:
    """Which of `count` sorted latencies the ask of `query` after `asked` earlier ones gets.

    The asks of one query walk through all ranks in strides near the golden section and coprime to `count`:
    `count` asks get every rank once, and a few are spread over all of them. The walk starts at a hash of the
    query, so that queries that are asked once get the distribution too.
    """
    start = int.from_bytes(hashlib.sha256(query.encode()).digest()[:8], "big")
    stride = max(1, round(count * _GOLDEN))
    while math.gcd(stride, count) > 1:
        stride += 1
    return (start + asked * stride) % count


class CassetteFile:
    """The writing end of a cassette, for one of the processes that write it."""

    def __init__(self, path: Path, header: Header) -> None:
        """Make the file, or join the others that write it.

        Raises UserError if `header` does not fit to that of a file that is there.
        """
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _create(path, header)
        written = Header.read(path)
        written.require_topk(header.topk, path)
        written.require_server(header.server, path)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND)
        with self._alone():
            if os.pread(self._file, 1, os.fstat(self._file).st_size - 1) != b"\n":
                self._write(b"\n")  # a killed process left a part of a line, which must not swallow the next

    def append(self, line: bytes) -> None:
        """Write a whole line. Raises RunError if it does not fit onto the disk."""
        with self._alone():
            self._write(line)

    def close(self) -> None:
        """Give the file back."""
        os.close(self._file)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the other writers away; a process that is killed lets them in again."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise RunError(f"the cassette {self._path} cannot be written: {error}") from error
        if written < len(line):
            raise RunError(f"the cassette {self._path} cannot be written: the disk is full")


def _create(path: Path, header: Header) -> None:
    """Make a file with a header at `path`, in one moment, unless there is one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(header.line())
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _parsed(line: bytes) -> Any:
    """The JSON value of a line; None if it is none."""
    try:
        return json.loads(line)
    except ValueError:
        return None
