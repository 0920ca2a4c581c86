"""Bodies of HTTP answers that are not trusted, in bounded memory, whichever library receives them.

Libraries decode what a server says it has compressed, in whatever layers, with no limit: some kilobytes may become
gigabytes. So a request says which encoding it takes, the raw bytes are read, and one layer at most is taken off under a
limit.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum


class Encoding(StrEnum):
    """Values of the request header Accept-Encoding for an answer that `read_body` reads."""

    identity = "identity"
    gzip = "gzip"


class BodyError(Exception):
    """A body that is refused; the text says why."""


async def read_body(
    headers: Mapping[str, str], blocks: AsyncIterator[bytes], max_bytes: int, accepted: Encoding = Encoding.identity
) -> bytes:
    """The decoded body of an answer with these headers, which arrives as these raw blocks.

    Raises BodyError when it is, or would become, larger than `max_bytes`, or is encoded otherwise than `accepted`.
    """
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
