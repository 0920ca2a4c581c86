"""The HTTP of a search: Search-R1's retrieval contract as a client speaks it, and what each answer means.

aiohttp, because one event loop carries the searches of hundreds of episodes: with 64 requests in flight it takes 0.1 ms
of the loop's time for a request, httpx takes 2 ms.

`read_body` is for the answers of any server that is not trusted, whichever library receives them. Libraries decode what
a server says it has compressed, in whatever layers, with no limit: some kilobytes may become gigabytes. So a request
says which encoding it takes, the raw bytes are read, and one layer at most is taken off under a limit.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any

import aiohttp
import orjson

from rlsys.search.retrieval import Failure, Passage

_BUSY = (408, 429, 502, 503, 504)  # answers of a server that may do better later
_REJECTED = (400, 413, 422)
_DENIED = (401, 403)
_NONSENSE = "it does not speak the retrieval contract"
_QUOTED_CHARS = 200  # of an answer that is not understood
_MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""Of an answer with passages: 13,000 bytes a passage where 64 queries ask for 10 each."""
_MAX_SHORT_ANSWER_BYTES = 64 * 1024  # of any other answer: a health, or the sentence of a failure
_MAX_PASSAGE_CHARS = 65_536  # A longer passage is cut there: more than any observation holds
_KEPT_ALIVE_S = 2.0  # of an idle connection: less than the 5 s after which uvicorn ends it, maybe under a request


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    refused: str = ""  # why the body was not read; empty where it was


class HttpWire:
    """Pooled connections of one event loop. Proxies of the environment are not used, redirections not followed.

    An answer is read as it is sent, without decompression, and under a limit; aiohttp limits its headers, to 128 lines
    of 8 KiB. Requests raise NoReplyError.
    """

    def __init__(self, token: str | None = None) -> None:
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": Encoding.identity}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._open: aiohttp.ClientSession | None = None

    async def get(self, url: str) -> Reply:
        """The answer to GET."""
        return await self._request("GET", url, None)

    async def post(self, url: str, body: bytes) -> Reply:
        """The answer to POST of a JSON body."""
        return await self._request("POST", url, body)

    async def close(self) -> None:
        """End the connections."""
        if self._open is not None:
            await self._open.close()

    async def _request(self, method: str, url: str, body: bytes | None) -> Reply:
        if self._open is None:  # made here, as it belongs to the loop that runs now
            self._open = aiohttp.ClientSession(
                headers=self._headers,
                # Who calls bounds both the requests in flight and their time.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                auto_decompress=False,
            )
        try:
            async with self._open.request(method, url, data=body, allow_redirects=False) as answer:
                wait = answer.headers.get("Retry-After", "")
                reply = Reply(answer.status, b"", float(wait) if wait.isdecimal() else 0.0)
                most = _MAX_ANSWER_BYTES if method == "POST" and answer.status == 200 else _MAX_SHORT_ANSWER_BYTES
                try:
                    return replace(reply, body=await read_body(answer.headers, answer.content.iter_any(), most))
                except BodyError as error:
                    return replace(reply, refused=str(error))
        except (aiohttp.ClientError, OSError) as error:
            reason = " ".join(str(error).split())[:_QUOTED_CHARS]  # some are of several lines
            raise NoReplyError(reason or type(error).__name__) from error


class ReplicaVerdict(Enum):
    """The end of a request to a replica."""

    answered = "answered"  # also by a "no" that is the request's own fault
    busy = "busy"  # turned away for now
    lost = "lost"  # no answer in time, none at all, or one that makes no sense
    abandoned = "abandoned"  # cancelled: it says nothing about the replica


class Fault(Exception):
    """A request that found nothing; one sentence says why."""

    def __init__(
        self,
        reason: str,
        failure: Failure = Failure.broken,
        verdict: ReplicaVerdict = ReplicaVerdict.lost,
        *,
        retry_after_s: float = 0.0,
        divisible: bool = False,
    ) -> None:
        """`divisible`: it may be the fault of one query alone."""
        super().__init__(reason)
        self.failure, self.verdict = failure, verdict
        self.retry_after_s, self.divisible = retry_after_s, divisible
        self.final = failure in (Failure.rejected, Failure.denied)
        """Neither time nor another server would change the answer."""


class NoReplyError(Fault):
    """The connection gave no whole answer; one sentence says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, Failure.unavailable)


def request_body(queries: Sequence[str], topk: int) -> bytes:
    """The body of POST /retrieve."""
    return orjson.dumps({"queries": list(queries), "topk": topk, "return_scores": True})


def passages_of(reply: Reply, queries: int, topk: int) -> list[tuple[Passage, ...]]:
    """The passages of each query, at most `topk`. Raises Fault for an answer that is none."""
    status = reply.status
    if status != 200:
        detail = _detail(reply)
        if status in _BUSY:
            raise Fault(detail, Failure.unavailable, ReplicaVerdict.busy, retry_after_s=reply.retry_after_s)
        if status in _REJECTED:
            raise Fault(detail, Failure.rejected, ReplicaVerdict.answered, divisible=True)
        if status in _DENIED:
            reason = f"the server wants another bearer token ({detail}): give the client the server's"
            raise Fault(reason, Failure.denied, ReplicaVerdict.answered)
        raise Fault(detail, divisible=status == 500)
    if reply.refused:
        reason = f"its answer is refused: {reply.refused}; serve shorter passages, uncompressed, or lower search.topk"
        raise Fault(reason, divisible=True)  # half of the queries may have an answer that is within the limit
    try:
        lines = orjson.loads(reply.body)["result"]
        if len(lines) != queries:
            raise Fault(f"{_NONSENSE}: {len(lines)} results for {queries} queries")
        return [_line(line, topk) for line in lines]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Fault(f"{_NONSENSE}: {reason[:_QUOTED_CHARS]}") from error


def health_of(reply: Reply) -> dict[str, Any] | None:
    """The server's account of itself: None where it is not well, empty without /health, which no server has to have."""
    if reply.status in (404, 405):
        return {}
    try:
        described = orjson.loads(reply.body) if reply.status == 200 else None
    except ValueError:
        return None
    return described if isinstance(described, dict) else None


def _line(line: Any, topk: int) -> tuple[Passage, ...]:
    if not isinstance(line, list):
        raise TypeError(f"a result is {type(line).__name__}, not list")
    passages = []
    for hit in line[:topk]:
        document = hit["document"]
        if not isinstance(document["contents"], str):
            raise TypeError(f"contents are {type(document['contents']).__name__}, not text")
        passages.append(Passage(str(document["id"]), document["contents"][:_MAX_PASSAGE_CHARS], float(hit["score"])))
    return tuple(passages)


def _detail(reply: Reply) -> str:
    """The server's own sentence, where it gives one."""
    try:
        detail = str(orjson.loads(reply.body)["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        detail = reply.refused or reply.body.decode("utf-8", "replace")
    return f"status {reply.status}: {' '.join(detail.split())[:_QUOTED_CHARS]}"


def as_sent(query: str) -> str:
    """`query` without white space around it, and without what UTF-8 cannot say."""
    return query.encode("utf-8", "replace").decode("utf-8").strip()


class Encoding(StrEnum):
    """Values of the request header Accept-Encoding for an answer that `read_body` reads."""

    identity = "identity"
    gzip = "gzip"


class BodyError(Exception):
    """A body that is refused; the text says why."""


async def read_body(
    headers: Mapping[str, str], blocks: AsyncIterator[bytes], max_bytes: int, accepted: Encoding = Encoding.identity
) -> bytes:
    """The decoded body of raw `blocks`. Raises BodyError beyond `max_bytes`, and for an encoding not `accepted`."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return await _join(blocks, max_bytes)
    if accepted is Encoding.gzip and encoding in ("gzip", "x-gzip"):
        return await _join(_gunzip(blocks, max_bytes), max_bytes)
    raise BodyError(f"its encoding {encoding[:40]!r} is not {accepted}")


async def _join(blocks: AsyncIterator[bytes], max_bytes: int) -> bytes:
    body = bytearray()
    async for block in blocks:
        body += block
        if len(body) > max_bytes:
            raise BodyError(f"it is larger than {max_bytes} bytes")
    return bytes(body)


async def _gunzip(blocks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Decompressed blocks of at most `max_bytes` + 1; reads at most about `max_bytes` compressed ones."""
    stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
    read = 0
    try:
        async for block in blocks:
            read += len(block)
            if read > max_bytes:
                raise BodyError(f"it is larger than {max_bytes} bytes")
            yield stream.decompress(block, max_bytes + 1)
            if stream.eof:
                return
    except zlib.error as error:
        raise BodyError(f"it is not gzip ({error})") from None
    if read:
        raise BodyError("it ends too early")
