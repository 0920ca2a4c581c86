"""Bodies in blocks, as libraries give them: what is decoded, and how much is read of what is refused."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator, Iterable

import pytest

from rlsys.search.wire import BodyError, Encoding, read_body

LIMIT = 1000


class Blocks:
    """The blocks of a body, of which it counts the bytes that were taken."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = blocks
        self.taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for block in self._blocks:
            self.taken += len(block)
            yield block


async def read(blocks: Blocks, encoding: str | None = None, accepted: Encoding = Encoding.gzip) -> bytes:
    headers = {} if encoding is None else {"content-encoding": encoding}
    return await read_body(headers, aiter(blocks), LIMIT, accepted)


def nothing_in_gzip() -> Iterable[bytes]:
    """A body that is 50 MB long and never becomes a byte of text: empty blocks of deflate."""
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    yield packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    empty = packer.flush(zlib.Z_FULL_FLUSH) or b"\x00\x00\x00\xff\xff"
    for _ in range(100_000):
        yield empty * 100


@pytest.mark.parametrize("encoding", [None, "", "identity", " Identity "])
@pytest.mark.parametrize("accepted", list(Encoding))
async def test_a_plain_body_is_as_it_was_sent(encoding: str | None, accepted: Encoding) -> None:
    assert await read(Blocks([b"a" * 400, b"", b"b" * 600]), encoding, accepted) == b"a" * 400 + b"b" * 600


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP"])
async def test_gzip_is_decoded_in_whatever_blocks_it_comes(encoding: str) -> None:
    packed = gzip.compress(b"text " * 200)
    for size in (1, 7, len(packed)):
        blocks = Blocks([packed[start : start + size] for start in range(0, len(packed), size)])
        assert await read(blocks, encoding) == b"text " * 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "gzip, gzip", "x" * 10_000])
async def test_an_encoding_that_was_not_asked_for_is_refused_unread(encoding: str) -> None:
    blocks = Blocks([gzip.compress(b"text")])
    with pytest.raises(BodyError) as error:
        await read(blocks, encoding, Encoding.identity)
    assert blocks.taken == 0
    assert len(str(error.value)) < 100


async def test_of_a_body_that_is_too_large_no_more_is_read_than_the_limit_and_a_block() -> None:
    plain = Blocks([b"x" * 100] * 100_000)
    with pytest.raises(BodyError):
        await read(plain)
    assert plain.taken <= LIMIT + 100
    bomb = Blocks([gzip.compress(bytes(1 << 20))])
    with pytest.raises(BodyError):
        await read(bomb, "gzip")


async def test_of_a_compressed_body_that_holds_nothing_no_more_is_read_than_the_limit_and_a_block() -> None:
    blocks = Blocks(nothing_in_gzip())
    with pytest.raises(BodyError):
        await read(blocks, "gzip")
    assert blocks.taken <= LIMIT + 500
