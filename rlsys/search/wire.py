"""Client side of Search-R1's retrieval contract over HTTP: sends requests and interprets responses.

It uses aiohttp, because one event loop carries the searches of hundreds of episodes. With 64 requests in flight a
request costs 0.1 ms of loop time; with httpx it costs 2 ms.

`read_body` reads the response of an untrusted server, for any HTTP library. HTTP libraries decompress any number of
layers without a limit, so a few kilobytes may become gigabytes. Therefore requests name the accepted encoding, and
`read_body` decodes at most one layer of the raw bytes, under a limit.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any

import aiohttp
import orjson

from rlsys.errors import UserError
from rlsys.search.retrieval import Failure, Passage

_BUSY = (408, 429, 502, 503, 504)  # a retry may succeed
_REJECTED = (400, 413, 422)
_DENIED = (401, 403)
_NONSENSE = "its response violates the retrieval contract"
_QUOTED_CHARS = 200  # characters quoted from an unexpected response
_MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""Limit for a response with passages; for 64 queries with 10 passages each, it allows 13,000 bytes per passage."""
_MAX_SHORT_ANSWER_BYTES = 64 * 1024  # limit for any other response, such as a health object or an error
_MAX_PASSAGE_CHARS = 65_536  # longer passages are cut; no observation holds as much
_MAX_PAGE_CHARS = 1_000_000  # longer pages are cut
_MAX_URL_CHARS = 2048  # longer URLs are left out
_KEPT_ALIVE_S = 2.0  # lifetime of an idle connection; uvicorn closes it after 5 s, possibly while a request arrives


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    refused: str = ""  # reason why the body was not read; empty if it was read


class HttpWire:
    """Pooled connections of one event loop. Ignores proxies of the environment and does not follow redirects.

    Responses are read without decompression, under a size limit; aiohttp limits headers to 128 lines of 8 KiB.
    A request without a complete response raises NoReplyError.
    """

    def __init__(self, token: str | None = None) -> None:
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": Encoding.identity}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._open: aiohttp.ClientSession | None = None

    async def get(self, url: str) -> Reply:
        """Send GET and return the response."""
        return await self._request("GET", url, None)

    async def post(self, url: str, body: bytes) -> Reply:
        """Send POST with a JSON body and return the response."""
        return await self._request("POST", url, body)

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()

    async def _request(self, method: str, url: str, body: bytes | None) -> Reply:
        if self._open is None:  # created here, because it belongs to the running event loop
            self._open = aiohttp.ClientSession(
                headers=self._headers,
                # The caller bounds the number of requests in flight and their duration.
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
            reason = " ".join(str(error).split())[:_QUOTED_CHARS]  # some errors have several lines
            raise NoReplyError(reason or type(error).__name__) from error


class ReplicaVerdict(Enum):
    """Outcome of a request to a replica."""

    answered = "answered"  # with a result, or with an error that the request itself caused
    busy = "busy"  # rejected for now
    lost = "lost"  # timeout, lost connection or invalid response
    abandoned = "abandoned"  # cancelled; reveals nothing about the replica


class Fault(Exception):
    """A failed request, with the reason in one sentence."""

    def __init__(
        self,
        reason: str,
        failure: Failure = Failure.broken,
        verdict: ReplicaVerdict = ReplicaVerdict.lost,
        *,
        retry_after_s: float = 0.0,
        divisible: bool = False,
    ) -> None:
        """`divisible`: a single query of the request may be at fault."""
        super().__init__(reason)
        self.failure, self.verdict = failure, verdict
        self.retry_after_s, self.divisible = retry_after_s, divisible
        self.final = failure in (Failure.rejected, Failure.denied)
        """True if neither a retry nor another server can succeed."""


class NoReplyError(Fault):
    """The connection gave no complete response; the reason is one sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, Failure.unavailable)


def request_body(queries: Sequence[str], topk: int) -> bytes:
    """Return the body of POST /retrieve."""
    return orjson.dumps({"queries": list(queries), "topk": topk, "return_scores": True})


def page_request_body(url: str) -> bytes:
    """Return the body of POST /access for one page."""
    return orjson.dumps({"urls": [url]})


def page_of(reply: Reply) -> str | None:
    """Return the contents of a page, cut to a maximum; None if there is no such page.

    Raises Fault for an error or invalid response, and UserError if the server has no pages at all.
    """
    if reply.status == 404:
        reason = f"the search server has no pages to open ({_detail(reply)}): start it with --pages FILE"
        raise UserError(f"{reason}, or set search.pages for the server of a run.", code="missing", key="search.pages")
    _check_status(reply)
    if reply.refused:
        raise Fault(f"the page is rejected: {reply.refused}", Failure.rejected, ReplicaVerdict.answered)
    try:
        (page,) = orjson.loads(reply.body)["result"]
        contents = None if page is None else page["contents"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Fault(f"{_NONSENSE}: {type(error).__name__}: {str(error)[:_QUOTED_CHARS]}") from error
    if not isinstance(contents, str | None):
        raise Fault(f"{_NONSENSE}: contents are {type(contents).__name__}, not text")
    return contents if contents is None else contents[:_MAX_PAGE_CHARS]


def passages_of(reply: Reply, queries: int, topk: int) -> list[tuple[Passage, ...]]:
    """Return up to `topk` passages per query. Raises Fault for an error or invalid response."""
    _check_status(reply)
    if reply.refused:
        reason = (
            f"its response is rejected: {reply.refused}; serve shorter passages, uncompressed, or lower search.topk"
        )
        raise Fault(reason, divisible=True)  # the response to half of the queries may be within the limit
    try:
        lines = orjson.loads(reply.body)["result"]
        if len(lines) != queries:
            raise Fault(f"{_NONSENSE}: {len(lines)} results for {queries} queries")
        return [_line(line, topk) for line in lines]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Fault(f"{_NONSENSE}: {reason[:_QUOTED_CHARS]}") from error


def health_of(reply: Reply) -> dict[str, Any] | None:
    """Return the health object: None if unhealthy, empty if the server lacks the optional /health."""
    if reply.status in (404, 405):
        return {}
    try:
        described = orjson.loads(reply.body) if reply.status == 200 else None
    except ValueError:
        return None
    return described if isinstance(described, dict) else None


def _check_status(reply: Reply) -> None:
    status = reply.status
    if status != 200:
        detail = _detail(reply)
        if status in _BUSY:
            raise Fault(detail, Failure.unavailable, ReplicaVerdict.busy, retry_after_s=reply.retry_after_s)
        if status in _REJECTED:
            raise Fault(detail, Failure.rejected, ReplicaVerdict.answered, divisible=True)
        if status in _DENIED:
            reason = f"the bearer token is missing or wrong ({detail}): give the client the server's token"
            raise Fault(reason, Failure.denied, ReplicaVerdict.answered)
        raise Fault(detail, divisible=status == 500)


def _line(line: Any, topk: int) -> tuple[Passage, ...]:
    if not isinstance(line, list):
        raise TypeError(f"a result is {type(line).__name__}, not list")
    passages = []
    for hit in line[:topk]:
        document = hit["document"]
        if not isinstance(document["contents"], str):
            raise TypeError(f"contents are {type(document['contents']).__name__}, not text")
        url = document.get("url")
        passages.append(
            Passage(
                str(document["id"]),
                document["contents"][:_MAX_PASSAGE_CHARS],
                float(hit["score"]),
                url if isinstance(url, str) and len(url) <= _MAX_URL_CHARS else "",
            )
        )
    return tuple(passages)


def _detail(reply: Reply) -> str:
    """Return the status with the server's `detail`, or else with the start of the body."""
    try:
        detail = str(orjson.loads(reply.body)["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        detail = reply.refused or reply.body.decode("utf-8", "replace")
    return f"status {reply.status}: {' '.join(detail.split())[:_QUOTED_CHARS]}"


def as_sent(query: str) -> str:
    """Return `query` stripped, with "?" for each character that UTF-8 cannot encode."""
    return query.encode("utf-8", "replace").decode("utf-8").strip()


class Encoding(StrEnum):
    """Accept-Encoding values that `read_body` supports."""

    identity = "identity"
    gzip = "gzip"


class BodyError(Exception):
    """A rejected body; the text gives the reason."""


async def read_body(
    headers: Mapping[str, str], blocks: AsyncIterator[bytes], max_bytes: int, accepted: Encoding = Encoding.identity
) -> bytes:
    """Return the decoded body. Raises BodyError beyond `max_bytes` and for encodings except `accepted` and identity."""
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
    """Yield decompressed blocks of up to `max_bytes` + 1 bytes each. Raises BodyError beyond `max_bytes` of input."""
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
