"""Tests of reading the answers of untrusted servers: their size, compression and meaning."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import orjson
import pytest

from rlsys.search.client import SearchClient
from rlsys.search.retrieval import Failure
from rlsys.search.wire import BodyError, Encoding, Fault, HttpWire, ReplicaVerdict, Reply, passages_of, read_body
from tests.support.serving import serving

from .scripted import FixedApp

LIMIT = 1000


class CountedBlocks:
    """Blocks of a body; `taken` counts the bytes that have been read."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = blocks
        self.taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for block in self._blocks:
            self.taken += len(block)
            yield block


async def read(blocks: CountedBlocks, encoding: str | None = None, accepted: Encoding = Encoding.gzip) -> bytes:
    headers = {} if encoding is None else {"content-encoding": encoding}
    return await read_body(headers, aiter(blocks), LIMIT, accepted)


async def test_gzip_is_decoded_for_any_block_size() -> None:
    packed = gzip.compress(b"text " * 200)
    for size in (1, 7, len(packed)):
        blocks = CountedBlocks([packed[start : start + size] for start in range(0, len(packed), size)])
        assert await read(blocks, "X-Gzip") == b"text " * 200


def nothing_in_gzip() -> Iterable[bytes]:
    """Yield a body of 50 MB without a single byte of text: empty blocks of deflate."""
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    yield packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    empty = packer.flush(zlib.Z_FULL_FLUSH) or b"\x00\x00\x00\xff\xff"
    for _ in range(100_000):
        yield empty * 100


@pytest.mark.parametrize(
    ("blocks", "encoding", "most"),
    [
        ([b"x" * 100] * 100_000, None, LIMIT + 100),
        ([gzip.compress(bytes(1 << 20))], "gzip", 1 << 20),
        (nothing_in_gzip(), "gzip", LIMIT + 500),
    ],
    ids=["plain", "bomb", "nothing"],
)
async def test_no_more_of_a_body_is_read_than_the_limit_and_a_block(
    blocks: Iterable[bytes], encoding: str | None, most: int
) -> None:
    counted = CountedBlocks(blocks)
    with pytest.raises(BodyError):
        await read(counted, encoding)
    assert counted.taken <= most


def hits(*contents: str) -> bytes:
    line = [{"document": {"id": str(row), "contents": text}, "score": 1.0} for row, text in enumerate(contents)]
    return orjson.dumps({"result": [line]})


DEEP = b"[" * 1000 + b"]" * 1000
BUSY = Failure.unavailable, ReplicaVerdict.busy, False
LOST = Failure.broken, ReplicaVerdict.lost, False
SPLIT = Failure.broken, ReplicaVerdict.lost, True


@pytest.mark.parametrize(
    ("reply", "means"),
    [
        (Reply(503, b'{"detail": "full"}'), BUSY),
        (Reply(500, b"<html>\n<p>two lines"), SPLIT),
        (Reply(500, b'{"detail": ' + DEEP + b"}"), SPLIT),
        (Reply(200, b"", refused="it is too large"), SPLIT),
        (Reply(404, b'{"detail": "Not Found"}'), LOST),
        (Reply(401, b'{"detail": "no token"}'), (Failure.denied, ReplicaVerdict.answered, False)),
        (Reply(422, b'{"detail": ["no JSON"]}'), (Failure.rejected, ReplicaVerdict.answered, True)),
        (Reply(200, b"<html>"), LOST),
        (Reply(200, b'{"result": []}'), LOST),
        (Reply(200, b'{"result": [[{"id": "1", "contents": "a"}]]}'), LOST),
        (Reply(200, b'{"result": [[{"document": {"id": 1, "contents": null}, "score": 1}]]}'), LOST),
        (Reply(200, b'{"result": [[{"document": {"id": ' + DEEP + b', "contents": ""}, "score": 1}]]}'), LOST),
        (Reply(200, hits("").replace(b"1.0", b'"' + b"x" * 1_000_000 + b'"')), LOST),
    ],
)
def test_an_answer_without_passages_is_a_typed_fault_with_a_short_message(
    reply: Reply, means: tuple[Failure, ReplicaVerdict, bool]
) -> None:
    with pytest.raises(Fault) as caught:
        passages_of(reply, 1, 3)
    fault = caught.value
    assert (fault.failure, fault.verdict, fault.divisible) == means
    assert len(str(fault)) < 400
    assert len(str(fault).splitlines()) == 1


def test_passages_are_limited_in_length_and_number() -> None:
    reply = Reply(200, hits("short", "y" * 65_536, "z" * 1_000_000, "one more"))
    (passages,) = passages_of(reply, 1, 3)
    assert [len(passage.contents) for passage in passages] == [5, 65_536, 65_536]


# ---- over real sockets


@asynccontextmanager
async def raw_server(reply: bytes) -> AsyncIterator[str]:
    """Send `reply` to each request and close the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        pytest.param(b"", Failure.unavailable, id="nothing"),
        pytest.param(b"\x00\x01 what?\r\n\r\n", Failure.unavailable, id="garbage"),
        pytest.param(OK + b"X: " + b"x" * 100_000 + b"\r\n\r\n", Failure.unavailable, id="long header"),
        pytest.param(OK + b"Content-Length: 9999\r\n\r\n" + hits("a"), Failure.unavailable, id="cut body"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{", Failure.unavailable, id="cut chunk"),
        pytest.param(
            OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"z" * 5000, Failure.unavailable, id="long chunk size"
        ),
        pytest.param(OK + b"\r\n" + hits("a")[:9], Failure.broken, id="cut JSON"),
        pytest.param(OK + b"\r\n" + hits("a") + b" " * (8 << 20), Failure.broken, id="too large"),
        pytest.param(OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(hits("a")), Failure.broken, id="gzip"),
    ],
)
async def test_a_torn_or_refused_answer_is_a_failed_search_with_a_short_reason(reply: bytes, failure: Failure) -> None:
    async with raw_server(reply) as url, SearchClient(url, retries=0, timeout_s=3000.0) as client:
        result = await client.search("Mali")
    assert result.failure is failure
    assert url in result.error
    assert len(result.error) < 500
    assert len(result.error.splitlines()) == 1


@pytest.mark.parametrize(("said", "wait_s"), [("7", 7.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0)])
async def test_a_busy_server_with_a_large_body_and_any_retry_after_is_busy(said: str, wait_s: float) -> None:
    wire = HttpWire()
    with serving(FixedApp(b"x" * 100_000, 503, {"Retry-After": said})) as url:
        reply = await wire.post(url, b"{}")
        await wire.close()
    assert (reply.body, reply.refused != "") == (b"", True)
    with pytest.raises(Fault) as fault:
        passages_of(reply, 1, 3)
    assert (fault.value.verdict, fault.value.retry_after_s) == (ReplicaVerdict.busy, wait_s)


async def test_searches_and_probes_send_the_token_and_refuse_compression() -> None:
    app = FixedApp(hits("one"))
    with serving(app) as url:
        async with SearchClient(url, token="a b&c") as client:
            assert (await client.search("Mali")).failure is None
            await client.health()
        async with SearchClient(url) as client:
            await client.search("Mali")
    sent = [(asked["path"], asked.get("authorization"), asked["accept-encoding"]) for asked in app.asked]
    assert sent == [
        ("/retrieve", "Bearer a b&c", "identity"),
        ("/health", "Bearer a b&c", "identity"),
        ("/retrieve", None, "identity"),
    ]


async def test_a_redirect_is_not_followed() -> None:
    """A server could else have its client send requests to addresses that only the client can reach."""
    inside = FixedApp(hits("secret"))
    with serving(inside) as target:
        moved = FixedApp(status=307, headers={"location": f"{target}/retrieve"})
        with serving(moved) as url:
            async with SearchClient(url, retries=0) as client:
                assert (await client.search("Mali")).failure is not None
    assert moved.asked
    assert not inside.asked
