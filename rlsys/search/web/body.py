"""Bodies of servers that are not trusted, in bounded memory.

httpx decodes what a server says it has compressed, in whatever layers, with no limit: some kilobytes may
become gigabytes. So requests ask for gzip at most, the raw bytes are read, and one layer is taken off under
a limit.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

import httpx

ACCEPT_ENCODING = "gzip"
"""Value of the request header that goes with `read_body`."""


class BodyError(Exception):
    """A body that is refused; the text says why."""


async def read_body(response: httpx.Response, max_bytes: int) -> bytes:
    """The decoded body of a response that is being streamed.

    Raises BodyError when it is, or would become, larger than `max_bytes`, or is encoded in another way.
    """
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return await _join(response.aiter_raw(), max_bytes)
    if encoding in ("gzip", "x-gzip"):
        return await _join(_gunzip(response.aiter_raw(), max_bytes), max_bytes)
    raise BodyError(f"its encoding {encoding[:40]!r} is not gzip")


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
