"""Pages of the web for /access: a `PageSource` that fetches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.search.web.fetch import PageError
from rlsys.search.web.loop import LoopThread
from rlsys.search.web.reader import PageReader

_AT_ONCE = 8
"""Pages of one request that are fetched together."""
_TIMEOUT_S = 30.0
_log = logging.getLogger(__name__)


class WebPages:
    """Fetches pages when they are asked for; keeps none.

    Args:
        reader: of pages; it belongs to this object, which closes it.
        timeout_s: for the pages of one request.
    """

    def __init__(self, reader: PageReader, timeout_s: float = _TIMEOUT_S) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._loop = LoopThread("web-pages")

    async def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """{"url", "contents"} of each URL, in order; None for a page that cannot be had in time.

        May be called from any event loop. Cancelling it ends its connections.
        """
        return await self._loop.result_of(self._fetch(urls))

    def close(self) -> None:
        """Give connections and processes back; nothing is called after."""
        self._loop.close(self._reader.close())

    async def _fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        places = asyncio.Semaphore(_AT_ONCE)
        pages = {
            url: asyncio.create_task(self._page(url, rank, places)) for rank, url in enumerate(dict.fromkeys(urls))
        }
        if not pages:
            return []
        try:
            _, late = await asyncio.wait(pages.values(), timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for page in pages.values():
                page.cancel()
            await asyncio.gather(*pages.values(), return_exceptions=True)
        found = {url: None if page.cancelled() else page.result() for url, page in pages.items()}
        if late:
            _log.info("%d of %d pages were not there in %g s", len(late), len(pages), self._timeout_s)
        return [found[url] for url in urls]

    async def _page(self, url: str, rank: int, places: asyncio.Semaphore) -> Mapping[str, Any] | None:
        try:
            async with places:
                page = await self._reader.read(url, rank)
        except PageError as error:
            _log.info("%s", error)
            return None
        return {"url": url, "contents": page.contents}
