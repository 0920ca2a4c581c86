"""The HTTP of a search: Search-R1's retrieval contract as a client speaks it, and what each answer means.

aiohttp, because one event loop carries the searches of hundreds of episodes: with 64 requests in flight it takes 0.1 ms
of the loop's time for a request, httpx takes 2 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp
import orjson

from rlsys.search.body import BodyError, Encoding, read_body
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


class NoReplyError(Exception):
    """The connection gave no whole answer; one sentence says why."""


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
                retry_after_s = float(wait) if wait.isdecimal() else 0.0
                most = _MAX_ANSWER_BYTES if method == "POST" and answer.status == 200 else _MAX_SHORT_ANSWER_BYTES
                try:
                    content = await read_body(answer.headers, answer.content.iter_any(), most)
                except BodyError as error:
                    return Reply(answer.status, b"", retry_after_s, refused=str(error))
                return Reply(answer.status, content, retry_after_s)
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
        self.failure = failure
        self.verdict = verdict
        self.retry_after_s = retry_after_s
        self.divisible = divisible
        self.final = failure in (Failure.rejected, Failure.denied)
        """Neither time nor another server would change the answer."""


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
        raise Fault(
            f"its answer is refused: {reply.refused}; serve shorter passages, uncompressed, or lower search.topk",
            divisible=True,  # half of the queries may have an answer that is within the limit
        )
    try:
        lines = orjson.loads(reply.body)["result"]
        if len(lines) != queries:
            raise Fault(f"{_NONSENSE}: {len(lines)} results for {queries} queries")
        return [_line(line, topk) for line in lines]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Fault(f"{_NONSENSE}: {reason[:_QUOTED_CHARS]}") from error


def health_of(reply: Reply) -> dict[str, Any] | None:
    """The server's account of itself; None where it is not well, nothing where it has no such answer.

    The retrieval contract asks for no GET /health: who does not know it is alive all the same.
    """
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
