"""Pages by their URL: what a model reads when it asks for a whole page instead of passages.

A pages file is jsonl (`corpus.JsonLines`), one `{"url", "contents", ...}` a line. URLs are found through a sidecar of
it, their hashes in order with the row of each: a lookup is a binary search in a memory-mapped array, and no URL is held
in memory. Making it parses every page once and takes 24 bytes a page of memory.

Invariants:
- A page is never given for another page's URL: hashes only nominate, and URLs themselves are compared.
- The page stored under exactly the URL that was asked for goes before one that is merely equal by `page_key`.
- Of several pages of one URL the last counts, as in a dict that is filled in file order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray
from yarl import URL

from rlsys.errors import UserError
from rlsys.search.corpus import HEADER_BYTES, JsonLines, OnArray, OnBytes, Sidecar, open_sidecar

_HASH, _ROW = np.dtype("<u8"), np.dtype("<i8")
_CHUNK_ROWS = 256


class PageSource(Protocol):
    """Gives whole pages, to several callers at once."""

    async def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """The page of each URL, in order: `url`, `contents` and whatever else is known; None where there is none.

        Does not block the event loop; a caller that is cancelled leaves no work behind that takes long.
        """

    def close(self) -> None:
        """Give back what it holds; nothing is called after."""


def page_key(url: str) -> str:
    """The part that two URLs of the same page have in common.

    Of an http or https URL these do not count: the scheme, the case of the host, a default port, user and password, the
    fragment, a slash at the end of the path, dot segments, and how characters are percent-encoded (RFC 3986, 6.2.2).
    MediaWiki's `index.php/Title` is `index.php?title=Title`. Of anything else only white space around it does not
    count.
    """
    text = url.strip()
    try:
        parsed = URL(text.replace("index.php/", "index.php?title="))
    except (ValueError, IndexError):  # the latter for some hosts in brackets
        return text
    if parsed.scheme not in ("http", "https") or not parsed.host_port_subcomponent:
        return text
    return f"{parsed.host_port_subcomponent}{parsed.raw_path.rstrip('/')}?{parsed.raw_query_string}"


class _PageLines(JsonLines):
    what = "pages file"


class PageStore:
    """A pages file, open: a `PageSource` of `len(store)` pages, safe to read from several threads."""

    def __init__(self, lines: JsonLines, index: Sidecar) -> None:
        self._lines = lines
        count = len(lines)
        self._hashes: NDArray[np.uint64] = np.frombuffer(index.data, _HASH, count, HEADER_BYTES)
        self._rows: NDArray[np.int64] = np.frombuffer(index.data, _ROW, count, HEADER_BYTES + count * _HASH.itemsize)

    @classmethod
    def open(cls, path: str | Path, progress: OnBytes | None = None) -> PageStore:
        """Open a pages file; one that was not open before is read through, and parsed, once.

        `progress` is called meanwhile, with (bytes read, bytes in all) and then (pages parsed, pages in all). Raises
        UserError for a file that `JsonLines` refuses, and for a page without a string `url` or `contents`.
        """
        path = Path(path)
        with _PageLines.open_file(path) as file:
            lines = _PageLines.read(file, path, progress)
            return cls(lines, open_sidecar(file, path, "urls", lambda _, write: _index(lines, write, progress)))

    def __len__(self) -> int:
        return len(self._lines)

    async def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """As `find`, in a thread."""
        return await asyncio.to_thread(self.find, urls)

    def find(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """The pages of `urls`, in order, as they are in the file, under the URL of the file; None for no page."""
        keys = [page_key(url) for url in urls]
        wanted = _hashes(keys)
        firsts = np.searchsorted(self._hashes, wanted, side="left").tolist()
        lasts = np.searchsorted(self._hashes, wanted, side="right").tolist()
        nominees = [self._rows[first:last].tolist() for first, last in zip(firsts, lasts, strict=True)]
        pages = iter(self._lines.fetch([row for rows in nominees for row in rows]))
        return [
            _choose(url, key, [next(pages) for _ in rows]) for url, key, rows in zip(urls, keys, nominees, strict=True)
        ]

    def close(self) -> None:
        """Nothing to give back: the mapped files go with the last reference to them."""


def _choose(url: str, key: str, pages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last page of exactly this URL, else the last one of this key; `pages` are in file order."""
    same = [page for page in pages if page["url"] == url] or [page for page in pages if page_key(page["url"]) == key]
    return same[-1] if same else None


def _hashes(keys: Sequence[str]) -> NDArray[np.uint64]:
    return np.array([xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")) for key in keys], _HASH)


def _index(lines: JsonLines, write: OnArray, progress: OnBytes | None) -> Mapping[str, Any]:
    """Write the hashes of all keys, ascending, and the row of each; equal ones in file order (both [pages])."""
    hashes = np.empty(len(lines), _HASH)
    done = 0
    for pages in lines.chunks(_CHUNK_ROWS):
        for row, page in enumerate(pages, done):
            for key in ("url", "contents"):
                if not isinstance(page.get(key), str):
                    raise UserError(f"{lines.where(row)} has no text in `{key}`: it must be a string")
        hashes[done : done + len(pages)] = _hashes([page_key(page["url"]) for page in pages])
        done += len(pages)
        if progress is not None:
            progress(done, len(lines))
    order = np.argsort(hashes, kind="stable")
    write(hashes[order])
    write(order.astype(_ROW))
    return {}
