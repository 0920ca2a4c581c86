"""Pages of the web for /access: a `PageSource` that fetches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.search.web.fetch import PageError
from rlsys.search.web.loop import LoopThread
from rlsys.search.web.reader import PageReader

_log = logging.getLogger(__name__)


class WebPages:
    """Fetches pages when they are asked for; keeps none.

    Args:
        reader: of pages; it belongs to this object, which closes it.
    """

    def __init__(self, reader: PageReader) -> None:
        self._reader = reader
        self._loop = LoopThread("web-pages")

    def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """{"url", "contents"} of each URL, in order; None for a page that cannot be had.

        All are fetched at once. Safe to call from several threads.
        """
        return self._loop.run(self._fetch(urls))

    def close(self) -> None:
        """Give connections and processes back; nothing is called after."""
        self._loop.close(self._reader.close())

    async def _fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        distinct = list(dict.fromkeys(urls))
        found = dict(zip(distinct, await asyncio.gather(*map(self._page, distinct)), strict=True))
        return [found[url] for url in urls]

    async def _page(self, url: str) -> Mapping[str, Any] | None:
        try:
            page = await self._reader.read(url)
        except PageError as error:
            _log.info("%s", error)
            return None
        return {"url": url, "contents": page.contents}
