"""Random access to large jsonl files: a corpus with one passage per line, and a pages file indexed by URL.

File format: UTF-8, one JSON object per line; row r is line r + 1. Blank lines at the end are ignored; a blank line
elsewhere keeps its row number, and reading it raises UserError. A corpus line has an `id` (string or integer) and a
string `contents`; other fields are passed through. To replace an open file, rename another one over it; readers then
keep the old file. Overwriting an open file in place is undefined, but truncation is detected.

Reading: files are memory-mapped. A fetch first announces all its memory pages by madvise and then reads them, so disk
reads overlap and skip unneeded read-ahead.

Row offsets are cached in a sidecar file, so that only the first open reads the whole file. The sidecar of
`corpus.jsonl` is `corpus.jsonl.offsets` in the same folder. If that folder is not writable, the sidecar is in
`$XDG_CACHE_HOME/rlsys` or `~/.cache/rlsys`. If neither is writable, the offsets are only in memory, and a warning is
logged. Invariants:

- A sidecar is used only if its checksum is valid and it matches its source by size, time and sampled content.
  Otherwise it is rebuilt. The check takes 0.1 s for 21 million rows.
- Sidecars are renamed into place, so none is ever partial; among concurrent writers the last rename wins.

A line of a pages file has strings `url` and `contents`. A second sidecar holds the sorted URL hashes with their rows; a
lookup is a binary search in the mapped array. Building it takes 24 bytes of memory per page. Invariants:

- URLs are compared in full, so a hash collision never returns a wrong page.
- An exact URL match has priority over a match by `page_key`; of several matches the last line wins.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray
from yarl import URL

from rlsys.errors import RunError, UserError

HEADER_BYTES = 4096
"""Byte offset of a sidecar's arrays; a multiple of the page size, so that the mapped arrays are aligned."""
_VERSION = 1
"""Version of the sidecar format; increase it whenever the sidecar of the same file would have other content."""
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_BLOCK_BYTES = 1 << 20
_SCAN_BYTES = 1 << 22
_NEWLINE = ord("\n")
_OFFSET, _HASH, _ROW = np.dtype("<i8"), np.dtype("<u8"), np.dtype("<i8")
_CHUNK_ROWS = 256
_FOREIGN = {
    b"\x1f\x8b": ("compressed by gzip", "decompress it first with `gzip -dk`"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it first with `zstd -dk`"),
    b"BZh": ("compressed by bzip2", "decompress it first with `bzip2 -dk`"),
    b"\xfd7zXZ": ("compressed by xz", "decompress it first with `xz -dk`"),
    b"PK\x03\x04": ("a zip archive", "unpack it first with `unzip`"),
    b"PAR1": ("a parquet file", "write it as jsonl first, with `datasets.Dataset.from_parquet(...).to_json(...)`"),
    b"ARROW1": ("an Arrow file", "write it as jsonl first, with `datasets.Dataset.from_file(...).to_json(...)`"),
}
"""Magic bytes of other file formats -> kind of file and remedy, for error messages."""
logger = logging.getLogger(__name__)


class JsonLines:
    """An open jsonl file of `len(lines)` rows; thread-safe."""

    what: ClassVar[str] = "jsonl file"
    """Word for the file in error messages."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        """Map `file`, opened from `path`; the caller may close it afterwards."""
        name, head = f"{self.what} {path}", os.pread(file.fileno(), 8, 0)
        for magic, (kind, remedy) in _FOREIGN.items():
            if head.startswith(magic):
                raise UserError(
                    f"{name} is {kind}, and only jsonl can be read in place: {remedy}.",
                    code="unsupported",
                    key=str(path),
                )
        size = os.fstat(file.fileno()).st_size
        found = open_sidecar(
            file, path, "offsets", lambda source, write: _write_offsets(source, write, path, size, self.what)
        )
        self.path = path
        self.checksum: str = found.facts["sha256"]
        """SHA-256 of the whole file, in hex, computed when the sidecar was built."""
        self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._sidecar = found
        self._offsets = np.frombuffer(found.data, dtype=_OFFSET, count=found.facts["rows"] + 1, offset=HEADER_BYTES)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map `path` and locate its rows, which are parsed and validated only when fetched.

        The first open of a file reads it once from start to end. Raises UserError for a file that is missing, empty,
        compressed or of another format.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"{cls.what} {path} is not a file: give a jsonl file.", code="not_found", key=str(path))
        try:
            file = path.open("rb", buffering=0)
        except OSError as error:
            raise UserError(
                f"{cls.what} {path} cannot be read ({error.strerror}): check its permissions.",
                code="denied",
                key=str(path),
            ) from None
        with file:
            return cls(file, path)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def where(self, row: int) -> str:
        """Return the name of a row in error messages."""
        return f"{self.what} {self.path} line {row + 1}"

    def fetch(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the objects of `rows`, in that order.

        One call with many rows is faster than many calls, because disk reads overlap.

        Each object is a new dict, but repeated rows share their nested values. Raises UserError with the line number
        of a bad row, IndexError for a row out of range, and RunError if the file shrank while open.
        """
        wanted = np.unique(np.asarray(rows, dtype=np.int64))
        if not wanted.size:
            return []
        if wanted[0] < 0 or wanted[-1] >= len(self):
            raise IndexError(f"{self.what} {self.path} has {len(self)} rows, asked for {wanted[[0, -1]]}")
        places = HEADER_BYTES + wanted * _OFFSET.itemsize
        _prefetch(self._sidecar.data, places, places + 2 * _OFFSET.itemsize)
        starts, ends = self._offsets[wanted], self._offsets[wanted + 1]
        if self._data.size() < ends[-1]:
            raise RunError(f"{self.what} {self.path} was truncated while it was open: restore it and start again")
        _prefetch(self._data, starts, ends)
        bounds = zip(wanted.tolist(), starts.tolist(), ends.tolist(), strict=True)
        parsed = {row: self._parse(row, start, end) for row, start, end in bounds}
        return [dict(parsed[int(row)]) for row in rows]

    def chunks(self, rows: int) -> Iterator[list[dict[str, Any]]]:
        """Yield all objects in file order, in lists of up to `rows`."""
        for first in range(0, len(self), rows):
            yield self.fetch(range(first, min(first + rows, len(self))))

    def _parse(self, row: int, start: int, end: int) -> dict[str, Any]:
        try:
            parsed = orjson.loads(self._data[start:end])
        except orjson.JSONDecodeError as error:
            raise UserError(
                f"{self.where(row)} is not JSON ({error}): write one JSON object per line.",
                code="malformed",
                key=str(self.path),
            ) from None
        if not isinstance(parsed, dict):
            raise UserError(
                f"{self.where(row)} is not an object: write one JSON object per line.",
                code="malformed",
                key=str(self.path),
            )
        return parsed


class Corpus(JsonLines):
    """An open corpus of `len(corpus)` passages; thread-safe."""

    what = "corpus"

    def fetch(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the passages of `rows`, as `JsonLines.fetch` does; also checks `id` and `contents`."""
        passages = super().fetch(rows)
        for row, passage in zip(rows, passages, strict=True):
            if not isinstance(passage.get("contents"), str):
                raise UserError(
                    f"{self.where(row)} has no text in `contents`: it must be a string.",
                    code="malformed",
                    key=str(self.path),
                )
            if not isinstance(passage.get("id"), str | int):
                raise UserError(
                    f"{self.where(row)} has no `id`: it must be a string or an integer.",
                    code="malformed",
                    key=str(self.path),
                )
        return passages


def _prefetch(data: mmap.mmap, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Start reading the memory pages of the ascending byte ranges [start, end), without waiting."""
    firsts, lasts = starts // mmap.PAGESIZE, (ends - 1) // mmap.PAGESIZE
    apart = np.flatnonzero(firsts[1:] > lasts[:-1] + 1)
    runs = zip(firsts[np.r_[0, apart + 1]].tolist(), lasts[np.r_[apart, -1]].tolist(), strict=True)
    for first, last in runs:
        data.madvise(mmap.MADV_WILLNEED, first * mmap.PAGESIZE, (last - first + 1) * mmap.PAGESIZE)


def _write_offsets(source: BinaryIO, write: OnArray, path: Path, size: int, what: str) -> Mapping[str, Any]:
    """Write the byte offset of each row, and of the end of the last row, [rows + 1].

    The offset behind a newline is written only once more text follows, because newlines after the last text start no
    row. The first of these final newlines ends the last row; the others belong to trailing blank lines.
    """
    digest = hashlib.sha256()
    done, text_end, rows = 0, 0, 1
    waiting = np.empty(0, dtype=_OFFSET)
    write(np.zeros(1, dtype=_OFFSET))
    with ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(digest.update, b"")
        while block := source.read(min(_SCAN_BYTES, size - done)):
            hashing.result()
            hashing = pool.submit(digest.update, block)
            newlines = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE)
            waiting = np.concatenate([waiting, newlines.astype(_OFFSET) + (done + 1)])
            if text := len(block.rstrip()):
                text_end = done + text
            settled = int(np.searchsorted(waiting, text_end))
            write(waiting[:settled])
            waiting, rows, done = waiting[settled:], rows + settled, done + len(block)
    if not text_end:
        raise UserError(f"{what} {path} is empty: it needs one JSON object per line.", code="empty", key=str(path))
    write(waiting[:1] if waiting.size else np.array([done], dtype=_OFFSET))
    return {"rows": rows, "sha256": digest.hexdigest()}


class Sidecar(NamedTuple):
    """An open sidecar file."""

    facts: Mapping[str, Any]
    data: mmap.mmap
    """Header and arrays."""


OnArray = Callable[[NDArray[Any]], None]
"""Appends an array to a sidecar."""
Make = Callable[[BinaryIO, OnArray], Mapping[str, Any]]
"""Reads the source file, writes arrays and returns facts, which are small JSON values. May raise UserError."""


def open_sidecar(source: BinaryIO, path: Path, suffix: str, make: Make) -> Sidecar:
    """Open the sidecar of `source`, or build it. Raises UserError if `source` changes during the build."""
    stamp = _stamp(source)
    resolved = path.resolve()
    places = [resolved.with_name(f"{resolved.name}.{suffix}")]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if cache.is_absolute():
        name = f"{resolved.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(resolved))}.{suffix}"
        places.append(cache / "rlsys" / name)
    for place in places:
        if (sidecar := _load(place, stamp)) is not None:
            return sidecar
    for place in places:
        try:
            with _replacing(place, os.fstat(source.fileno()).st_mode & 0o666) as file:
                return _fill(file, source, path, stamp, make)
        except OSError as error:
            logger.debug("no sidecar at %s: %s", place, error)
    logger.warning(
        "%s is read from start to end at every open, because its index cannot be written to %s: make one of "
        "these folders writable",
        *(path, " or ".join(str(place.parent) for place in places)),
    )
    with open(os.memfd_create(suffix), "w+b", buffering=0) as file:
        return _fill(file, source, path, stamp, make)


def _stamp(file: BinaryIO) -> dict[str, Any]:
    """Return size, mtime and a hash of 16 evenly spaced blocks, which identify an unchanged file."""
    status = os.fstat(file.fileno())
    last = max(0, status.st_size - _SAMPLE_BYTES)
    digest = xxhash.xxh3_64()
    for place in range(_SAMPLES):
        digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, last * place // (_SAMPLES - 1)))
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sample": digest.hexdigest()}


def _load(place: Path, stamp: Mapping[str, Any]) -> Sidecar | None:
    """Open the sidecar at `place`; None if it is missing or damaged, or belongs to another file or version."""
    try:
        with place.open("rb", buffering=0) as file:
            header = orjson.loads(file.read(HEADER_BYTES))
            if header["version"] != _VERSION or header["source"] != stamp:
                return None
            digest = xxhash.xxh3_64()
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            digest.update(orjson.dumps(header["facts"]))
            if digest.hexdigest() != header["xxh3"]:
                return None
            return Sidecar(header["facts"], mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _replacing(place: Path, mode: int) -> Iterator[BinaryIO]:
    """Yield a temporary file that is renamed to `place` on success and removed on error."""
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with open(descriptor, "w+b", buffering=0) as file:
            yield file
            os.fchmod(descriptor, mode)
            os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise


def _fill(file: BinaryIO, source: BinaryIO, path: Path, stamp: Mapping[str, Any], make: Make) -> Sidecar:
    """Write a sidecar to `file` and map it."""
    digest = xxhash.xxh3_64()

    def write(array: NDArray[Any]) -> None:
        block = np.ascontiguousarray(array).view(np.uint8).data
        file.write(block)
        digest.update(block)

    file.seek(HEADER_BYTES)
    source.seek(0)
    facts = make(source, write)
    if _stamp(source) != stamp:
        raise UserError(
            f"{path} changed while it was read: open it again when it is complete.", code="in_use", key=str(path)
        )
    digest.update(orjson.dumps(facts))
    header = {"version": _VERSION, "source": stamp, "facts": facts, "xxh3": digest.hexdigest()}
    file.seek(0)
    file.write(orjson.dumps(header).ljust(HEADER_BYTES - 1) + b"\n")
    return Sidecar(facts, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class _PageLines(JsonLines):
    what = "pages file"

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file, path)
        self.index = open_sidecar(file, path, "urls", lambda _, write: _write_urls(self, write)).data


class PageStore:
    """A `PageSource` over an open pages file of `len(store)` pages; thread-safe.

    The first open parses the whole file. Raises UserError for a bad file and for a page without `url` or `contents`.
    """

    def __init__(self, path: str | Path) -> None:
        self._lines = _PageLines.open(path)
        count = len(self._lines)
        self._hashes: NDArray[np.uint64] = np.frombuffer(self._lines.index, _HASH, count, HEADER_BYTES)
        self._rows: NDArray[np.int64] = np.frombuffer(self._lines.index, _ROW, count, HEADER_BYTES + 8 * count)

    def __len__(self) -> int:
        return len(self._lines)

    async def fetch(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """Run `find` in a thread."""
        return await asyncio.to_thread(self.find, urls)

    def find(self, urls: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """Return the page of each URL as stored in the file, including the stored `url`, or None."""
        keys = [page_key(url) for url in urls]
        wanted = _hashes(keys)
        bounds = zip(*(np.searchsorted(self._hashes, wanted, side=side) for side in ("left", "right")), strict=True)
        nominees = [self._rows[first:last].tolist() for first, last in bounds]
        pages = iter(self._lines.fetch([row for rows in nominees for row in rows]))
        found: list[Mapping[str, Any] | None] = []
        for url, key, rows in zip(urls, keys, nominees, strict=True):
            held = [next(pages) for _ in rows]
            same = [page for page in held if page["url"] == url] or [
                page for page in held if page_key(page["url"]) == key
            ]
            found.append(same[-1] if same else None)
        return found

    def close(self) -> None:
        """No-op; the files are unmapped with the last reference."""


def page_key(url: str) -> str:
    """Return a normalised URL, equal for URLs of the same page.

    For http and https URLs it ignores the scheme, the host's case, a default port, user and password, and the fragment.
    It also ignores a trailing slash, dot segments and differences in percent-encoding (RFC 3986, 6.2.2). MediaWiki's
    `index.php/Title` becomes `index.php?title=Title`. Any other text is only stripped.
    """
    text = url.strip()
    try:
        parsed = URL(text.replace("index.php/", "index.php?title="))
    except (ValueError, IndexError):  # IndexError for some hosts in brackets
        return text
    if parsed.scheme not in ("http", "https") or not parsed.host_port_subcomponent:
        return text
    return f"{parsed.host_port_subcomponent}{parsed.raw_path.rstrip('/')}?{parsed.raw_query_string}"


def _hashes(keys: Sequence[str]) -> NDArray[np.uint64]:
    return np.array([xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")) for key in keys], _HASH)


def _write_urls(lines: JsonLines, write: OnArray) -> Mapping[str, Any]:
    """Write the ascending hashes of all page keys and their rows, both [pages]; equal hashes keep the file order."""
    keys: list[NDArray[np.uint64]] = []
    for first, pages in enumerate(lines.chunks(_CHUNK_ROWS)):
        for row, page in enumerate(pages, first * _CHUNK_ROWS):
            for key in ("url", "contents"):
                if not isinstance(page.get(key), str):
                    raise UserError(
                        f"{lines.where(row)} has no text in `{key}`: it must be a string.",
                        code="malformed",
                        key=str(lines.path),
                    )
        keys.append(_hashes([page_key(page["url"]) for page in pages]))
    hashes = np.concatenate(keys)
    order = np.argsort(hashes, kind="stable")
    write(hashes[order])
    write(order.astype(_ROW))
    return {}
